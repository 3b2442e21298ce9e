"""What is in memory during each call, who leaves it, and where that waits.

    device   who leaves, by next use; each comes back as early as there is room
    host     tensors that stay: those that are needed soonest
             tensors on their way to drives, in turns
             tensors that are read ahead, as far as the others leave room
    drives   the rest

Functions update the bytes of calls that they are given, int64 of shape (num_calls,).
The capacity is the most that a call should have. A stay that may be given up lies
between two uses of a tensor, which has to be in memory again at its `stop`.

Invariant: no function raises the bytes of a call above the capacity, so the memory of
each tier is as planned at every call, however fast moves are. What stays on the host
never reaches a drive.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

NUM_COPIES = 2
"""Times that a tensor is on the host on its way to a drive, or back: pinned for the
device, and pageable for the drive. JAX may read pinned memory in place, or copy it."""

# Of the memory beyond the least, so much at most is for what is on its way: a tensor
# may be copied while the one before it is written.
_WAY_SHARE = 4


class Stay(NamedTuple):
    """Successive calls during which a tensor is in memory, or may be.

    Attributes:
      stop: The call after the last.
      num_bytes: The tensor's bytes; negative ones count as freed.
      tensor: The tensor, as the caller knows it; hashable.
    """

    start: int
    stop: int
    num_bytes: int
    tensor: Any = None


class Candidate(NamedTuple):
    """A tensor that may stay between steps.

    Attributes:
      tensor: The tensor, as the caller knows it.
      saved_bytes: Bytes that do not move in a step if it stays.
      apart: Calls between its first use and its last.
    """

    tensor: Any
    num_bytes: int
    saved_bytes: int
    apart: int


class Eviction(NamedTuple):
    """The calls between which a tensor leaves the device's memory and is back.

    Attributes:
      written: The call that makes it, after which it leaves.
      gone: The first call before which its memory must be free.
      back: The first call before which its memory is taken again, to read it.
    """

    written: int
    gone: int
    back: int
    needed: int


@dataclass(frozen=True)
class Tiers:
    """The host's memory for tensors that are not on the device.

    Attributes:
      on_drive: Tensors that go on to drives, in the order in which they are needed.
      leaving_bytes: The part for tensors on their way to drives.
      room: Before each call, bytes for tensors that are read ahead; empty if none are.
      least_bytes: The smallest memory that would do, if this does not; else 0.
    """

    on_drive: tuple[Any, ...]
    host_bytes: int
    leaving_bytes: int = 0
    room: Sequence[int] = ()
    least_bytes: int = 0

    @property
    def buffer_bytes(self) -> int:
        """The most bytes of tensors that are read ahead."""
        return max(self.room, default=0)


class Waiting(NamedTuple):
    """Tensors that wait for the end of a step.

    Attributes:
      capacity_bytes: Memory for those that stay there.
      on_drive: The others, which go to a drive, and their bytes.
      num_reads: Number of times that each is read again.
    """

    capacity_bytes: int
    on_drive: Mapping[Any, int]
    num_reads: int = 1


def occupancy(num_calls: int, stays: Iterable[Stay]) -> np.ndarray:
    """Returns the bytes of all stays during each call; int64, of shape (num_calls,)."""
    change = [0] * (num_calls + 1)
    for start, stop, num_bytes, _ in stays:
        change[start] += num_bytes
        change[stop] -= num_bytes
    return np.cumsum(change[:-1], dtype=np.int64)


def fill(occupied: np.ndarray, stays: Iterable[Stay], capacity: int) -> list[Stay]:
    """Adds stays, in the order given, if there is room; returns those added."""
    added = []
    for stay in stays:
        during = occupied[stay.start : stay.stop]
        if during.max(initial=0) + stay.num_bytes <= capacity:
            during += stay.num_bytes
            added.append(stay)
    return added


def waiting(sizes: Mapping[Any, int], capacity: int, num_reads: int = 1) -> Waiting:
    """Chooses the tensors that wait in memory: in the order given, as there is room."""
    held = set(_together(sizes.items(), capacity))
    others = {one: num_bytes for one, num_bytes in sizes.items() if one not in held}
    return Waiting(capacity, others, num_reads)


def reside(candidates: Iterable[Candidate], capacity: int) -> list[Any]:
    """Returns tensors that stay: those first that save most for a byte of memory.

    Of equal ones those that are used far apart stay, as others may be read once.
    """
    ranked = sorted(
        candidates, key=lambda one: (-one.saved_bytes / one.num_bytes, -one.apart)
    )
    return _together(((one.tensor, one.num_bytes) for one in ranked), capacity)


def _together(sizes: Iterable[tuple[Any, int]], capacity: int) -> list[Any]:
    """Returns the tensors that have room together, in the order given."""
    stays = (Stay(0, 1, num_bytes, tensor) for tensor, num_bytes in sizes)
    return [stay.tensor for stay in fill(np.zeros(1, np.int64), stays, capacity)]


def evict(
    occupied: np.ndarray, stays: Iterable[Stay], capacity: int
) -> dict[Stay, int]:
    """Ends stays where the bytes exceed the capacity.

    The tensor that is needed last leaves first (Belady's rule), of several the largest,
    of equal ones the one given first. If all leave, the rest may still exceed.

    Returns:
      For each of `stays` that ends early, the first call without its tensor.
    """
    left: dict[Stay, int] = {}
    by_use = sorted(stays, key=lambda stay: (stay.stop, stay.num_bytes), reverse=True)
    for call in np.flatnonzero(occupied > capacity).tolist():
        for stay in by_use:
            if occupied[call] <= capacity:
                break
            if stay.start <= call < stay.stop and stay not in left:
                occupied[call : stay.stop] -= stay.num_bytes
                left[stay] = call
    return left


def prefetch(
    occupied: np.ndarray, left: Mapping[Stay, int], capacity: int
) -> dict[Stay, int]:
    """Lets tensors come back in the order of their use, as early as there is room.

    Each is away for one call at least, and none comes back before one used earlier.

    Args:
      left: The first call without each tensor, as from `evict`.

    Returns:
      For each, in that order, the first call with it again: at the latest its `stop`.
    """
    returned: dict[Stay, int] = {}
    back = 0
    for stay in sorted(left, key=lambda stay: stay.stop):
        earliest = max(back, left[stay] + 1)
        back = stay.stop
        while back > earliest and occupied[back - 1] + stay.num_bytes <= capacity:
            back -= 1
        occupied[back : stay.stop] += stay.num_bytes
        returned[stay] = back
    return returned


def evictions(
    occupied: np.ndarray,
    stays: Iterable[Stay],
    made: Mapping[Any, int],
    capacity: int,
) -> dict[Any, Eviction]:
    """Returns as few evictions as the device's capacity needs.

    Of the tensors in memory the one that is needed last leaves. They come back in the
    order of their use, as early as there is room. If all leave, the rest may still
    exceed the capacity.

    Args:
      occupied: Bytes of each call with all tensors in memory; updated. While a call
        runs, the one after it waits: what it needs is there.
      stays: Times that tensors may be away, each to the call before its use.
    """
    left = evict(occupied, stays, capacity)
    back = prefetch(occupied, left, capacity)
    return {
        stay.tensor: Eviction(
            made[stay.tensor], left[stay] + 1, call + 1, stay.stop + 1
        )
        for stay, call in back.items()
    }


def host_tier(
    num_calls: int,
    away: Mapping[Any, tuple[Eviction, int]],
    capacity: int,
    page_bytes: int = 1,
) -> Tiers:
    """Chooses the tensors that stay on the host, and divides its memory.

    While too many bytes wait, the tensor that is needed last goes to a drive, as soon
    as it is made.

    Args:
      away: Tensors that leave, and their bytes in whole pages.
      capacity: The most memory of the host for them.
    """
    stays = [
        Stay(one.written, one.needed, num_bytes, tensor)
        for tensor, (one, num_bytes) in away.items()
    ]
    held = occupancy(num_calls, stays)
    everything = int(held.max(initial=0))
    if everything <= capacity:
        return Tiers((), everything)
    largest = max(stay.num_bytes for stay in stays)
    passing = 2 * NUM_COPIES * largest
    if capacity < passing:
        return Tiers((), 0, least_bytes=min(passing, everything))
    more = min(largest, _floor((capacity - passing) // _WAY_SHARE, page_bytes))
    leaving = NUM_COPIES * largest + more
    left = evict(held, stays, capacity - 2 * leaving)
    held = occupancy(num_calls, (stay for stay in stays if stay not in left))
    # One tensor at a time is pinned for its copy back.
    ahead = capacity - leaving - (NUM_COPIES - 1) * largest
    most = sum(stay.num_bytes for stay in left)
    later = np.maximum.accumulate(held[::-1])[::-1].tolist()
    room = [_floor(min(most, ahead - num_bytes), page_bytes) for num_bytes in later]
    on_drive = tuple(stay.tensor for stay in sorted(left, key=lambda stay: stay.stop))
    return Tiers(on_drive, capacity, leaving, [room[0], *room[:-1]])


def _floor(num_bytes: int, page_bytes: int) -> int:
    return num_bytes - num_bytes % page_bytes
