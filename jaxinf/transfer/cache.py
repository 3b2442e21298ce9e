"""Chooses what stays in memory, when the order of uses is known and repeats.

      uses      a  b  c  d │ a  b  c  d │
      stays     ├───────────►│              until its next use, or not at all
                   ├───────────►│

Invariant: pure functions over lists. At no time does more stay than there is room for.
"""

import heapq
from collections.abc import Hashable, Sequence


def stays(order: Sequence[tuple[Hashable, int]], capacity_bytes: int) -> list[bool]:
    """Says of each use in a cycle whether the piece stays until its next use.

    Whenever more would stay than fits, the piece with the furthest next use leaves
    (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer",
    1966). A piece may pass through without staying, so each has memory to be used in
    beside the capacity. Where every piece is used once in a cycle, the first that fit
    stay for good; dropping the least recently used instead would find none again.

    Args:
      order: key and length in bytes of the piece that each use needs. After the last
        use the first follows.
      capacity_bytes: room for pieces between their uses.

    Returns:
      For each use, whether the next one finds the piece in memory.
    """
    num_uses = len(order)
    next_use = [0] * num_uses
    following: dict[Hashable, int] = {}
    for use in range(2 * num_uses - 1, -1, -1):
        key = order[use % num_uses][0]
        if use < num_uses:
            next_use[use] = following[key]
        following[key] = use
    # The first cycle begins with empty memory, the second one with what it has left.
    kept = [False] * (2 * num_uses)
    held: list[tuple[int, int]] = []  # the furthest next use first
    held_bytes = 0
    last_use: dict[Hashable, int] = {}
    for use in range(2 * num_uses):
        key, num_bytes = order[use % num_uses]
        if key in last_use and kept[last_use[key]]:
            held_bytes -= num_bytes
        last_use[key] = use
        if num_bytes > capacity_bytes:
            continue
        kept[use] = True
        held_bytes += num_bytes
        end = next_use[use % num_uses] + use // num_uses * num_uses
        heapq.heappush(held, (-end, use))
        while held_bytes > capacity_bytes:
            _, left = heapq.heappop(held)
            kept[left] = False
            held_bytes -= order[left % num_uses][1]
    # What stays into the next cycle must have stayed from the one before as well.
    return [
        kept[num_uses + use] and (next_use[use] < num_uses or kept[use])
        for use in range(num_uses)
    ]
