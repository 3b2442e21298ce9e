"""Cuts a program into segments: at its period, the blocks of a model, else by bytes.

Invariant: cuts depend on the graph and the limit alone; equal blocks are cut alike.
"""

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.lifetimes import OrderedProgram, once

# Smaller blocks share a segment: each program costs a dispatch.
_SMALL_BYTES = 4 << 20
# A further segment costs as much as so many bytes at cuts.
_SEGMENT_COST = 1 << 20
# Factor by which a cut may exceed the cheapest one, to save a block.
_PHASE_TOLERANCE = 1.5
# So often at least blocks repeat.
_MIN_REPEATS = 3
_MAX_HALVINGS = 14


class Repeat(NamedTuple):
    """Tokens from `start` on that repeat every `period`, `length` in all."""

    start: int
    period: int
    length: int


def segment_limits(ready: OrderedProgram) -> list[int]:
    """Returns bytes of segments to try, descending: from those of one segment on."""
    bits = params_bits = ready.piece_bytes(ready.sizes).bit_length()
    if num_nodes := len(ready.forward):
        bits = max(bits, _segment_bytes(ready, 0, num_nodes).bit_length())
    least = max(0, params_bits - _MAX_HALVINGS)
    return [1 << n for n in range(bits, least, -1)]


@once
def cuts_of(ready: OrderedProgram, limit_bytes: int) -> tuple[int, ...]:
    """Returns the cuts in the forward order, with 0 and the end.

    Args:
      limit_bytes: The most that a segment should need for params, kept and working
        values. If a single node needs more, it becomes a segment.
    """
    cuts = [0]
    for repeat in find_repeats(tuple(map(ready.keys.node, ready.forward))):
        blocks = _blocks(ready, repeat)
        if blocks is None or blocks[0] < cuts[-1]:
            continue
        cuts += _divided(ready, cuts[-1], blocks[0], limit_bytes)
        cuts += _grouped(ready, blocks, limit_bytes)
    cuts += _divided(ready, cuts[-1], len(ready.forward), limit_bytes)
    return tuple(cuts)


def _segment_bytes(ready: OrderedProgram, start: int, end: int) -> int:
    """Estimates the memory of the segment between two cuts."""
    pieces = set[Piece]().union(*(_pieces(ready, at) for at in range(start, end)))
    kept = int(ready.kept_bytes[end] - ready.kept_bytes[start])
    working = int(ready.working_bytes[start:end].max())
    return ready.piece_bytes(pieces) + kept + 2 * working


def _blocks(ready: OrderedProgram, repeat: Repeat) -> list[int] | None:
    """Starts of the blocks that repeat, and the end; None if they have no params."""
    period, pieces = repeat.period, ready.pieces
    if not any(map(pieces.get, ready.forward[repeat.start : repeat.start + period])):
        return None
    ranked = []
    for offset in range(period):
        num_blocks = (repeat.length - offset) // period
        starts = repeat.start + offset + period * np.arange(num_blocks + 1)
        cost = int(np.median(ready.cut_bytes[starts[1:]]))
        ranked.append((cost, -num_blocks, offset, starts.tolist()))
    most = _PHASE_TOLERANCE * min(ranked)[0]
    cheap = [item for item in ranked if item[0] <= most]
    return min(cheap, key=lambda item: (item[1], item[0], item[2]))[3]


def _grouped(ready: OrderedProgram, blocks: list[int], limit_bytes: int) -> list[int]:
    """Cuts after the first of `blocks`, with several small blocks in a segment."""
    num_blocks = len(blocks) - 1
    first, last = blocks[num_blocks // 2 : num_blocks // 2 + 2]
    block_bytes = _segment_bytes(ready, first, last)
    if block_bytes > limit_bytes:
        inner = _divided(ready, first, last, limit_bytes)
        return [start + cut - first for start in blocks[:-1] for cut in inner]
    most = max(1, min(limit_bytes, _SMALL_BYTES) // max(block_bytes, 1))
    # A power of two, so models of 12, 24 and 48 blocks have the same programs.
    group = 1 << (min(most, num_blocks).bit_length() - 1)
    return blocks[num_blocks % group or group :: group]


def _divided(
    ready: OrderedProgram, start: int, end: int, limit_bytes: int
) -> list[int]:
    """Cuts after `start` up to and including `end`, with the fewest bytes at all cuts.

    Segments stay within the limit, but for those of a single node.
    """
    length = end - start
    kept = ready.kept_bytes[start : end + 1]
    uses = _new_pieces(ready, start, end)
    least = np.full(length + 1, np.inf)  # bytes at the cuts up to each position
    least[0], before = 0, np.zeros(length + 1, int)
    for first in range(length):
        is_new = (uses["place"] >= first) & (uses["before"] < first)
        new, sizes = uses["place"][is_new] - first, uses["bytes"][is_new]
        params = np.bincount(new, sizes, length - first).cumsum()
        working = np.maximum.accumulate(ready.working_bytes[start + first : end])
        needs = params + kept[first + 1 :] - kept[first] + 2 * working
        most = max(1, int(np.searchsorted(needs, limit_bytes, "right")))
        ends = slice(first + 1, first + 1 + most)
        bytes_at_cuts = least[first] + _SEGMENT_COST + ready.cut_bytes[start:][ends]
        is_less = bytes_at_cuts < least[ends]
        least[ends][is_less] = bytes_at_cuts[is_less]
        before[ends][is_less] = first
    cuts, at = [], length
    while at:
        cuts.append(start + at)
        at = int(before[at])
    return cuts[::-1]


def _new_pieces(ready: OrderedProgram, start: int, end: int) -> np.ndarray:
    """Returns the uses of params: their place, the place of the use before, bytes."""
    last, uses = dict[Piece, int](), list[tuple[int, int, int]]()
    for place in range(end - start):
        for piece in _pieces(ready, start + place):
            uses.append((place, last.get(piece, -1), ready.sizes[piece]))
            last[piece] = place
    return np.array(uses, [("place", int), ("before", int), ("bytes", int)])


def _pieces(ready: OrderedProgram, at: int) -> set[Piece]:
    """Returns the params that a forward node and its part of backward read."""
    of, cuts = ready.pieces, ready.backward_cuts
    backward = ready.backward[int(cuts[at + 1]) : int(cuts[at])]
    return set().union(of[ready.forward[at]], *map(of.__getitem__, backward))


@lru_cache(maxsize=8)  # a program is cut for many limits, and traced again
def find_repeats(tokens: tuple[Hashable, ...]) -> list[Repeat]:
    """Finds disjoint repeats of at least three periods, and returns them in order.

    Longer ones are preferred. A period has several nodes, not one.
    """
    found, parts = list[Repeat](), [(0, len(tokens))]
    while parts:
        start, end = parts.pop()
        repeat = _longest(tokens[start:end])
        if repeat is not None:
            first, last = start + repeat.start, start + repeat.start + repeat.length
            found.append(repeat._replace(start=first))
            parts += [(start, first), (last, end)]
    return sorted(found)


def _longest(tokens: Sequence[Hashable]) -> Repeat | None:
    numbers: dict[Hashable, int] = {}
    ids = np.array([numbers.setdefault(token, len(numbers)) for token in tokens])
    best: Repeat | None = None
    for period in range(2, len(ids) // _MIN_REPEATS + 1):
        start, same = _longest_true(ids[:-period] == ids[period:])
        length = same + period
        if length >= _MIN_REPEATS * period and (best is None or length > best.length):
            best = Repeat(start, period, length)
    return best


def _longest_true(flags: np.ndarray) -> tuple[int, int]:
    """Returns start and length of the longest stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(np.argmax(lengths))
    return int(edges[2 * longest]), int(lengths[longest])
