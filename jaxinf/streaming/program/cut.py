"""Cuts a program into segments: at its period, the blocks of a model, else by bytes.

Invariant: cuts depend on the graph and the limit alone; equal blocks are cut alike.
"""

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.lifetimes import OrderedProgram, once

# Smaller blocks share a segment, since each program costs a dispatch.
_SMALL_BYTES = 4 << 20
# A further segment costs as much as so many bytes at cuts.
_SEGMENT_COST_BYTES = 1 << 20
# Factor by which a cut may exceed the cheapest one, to save a block.
_PHASE_TOLERANCE = 1.5
_MIN_REPEATS = 3
_MAX_HALVINGS = 14


class Repeat(NamedTuple):
    """Tokens from `start` on that repeat every `period`, `length` in all."""

    start: int
    period: int
    length: int


def segment_limits(ordered: OrderedProgram) -> list[int]:
    """Returns limits to try, descending from the bytes of one segment."""
    bits = params_bits = ordered.piece_bytes(ordered.sizes).bit_length()
    if num_nodes := len(ordered.forward):
        bits = max(bits, _segment_bytes(ordered, 0, num_nodes).bit_length())
    min_bits = max(0, params_bits - _MAX_HALVINGS)
    return [1 << n for n in range(bits, min_bits, -1)]


@once
def cuts_of(ordered: OrderedProgram, limit_bytes: int) -> tuple[int, ...]:
    """Returns the cuts in the forward order, with 0 and the end.

    A segment needs at most `limit_bytes` for params, kept and working values, unless it
    is a single node.
    """
    cuts = [0]
    for repeat in _find_repeats(tuple(map(ordered.keys.node, ordered.forward))):
        blocks = _blocks(ordered, repeat)
        if blocks is None or blocks[0] < cuts[-1]:
            continue
        cuts += _cuts_between(ordered, cuts[-1], blocks[0], limit_bytes)
        cuts += _cuts_of_blocks(ordered, blocks, limit_bytes)
    cuts += _cuts_between(ordered, cuts[-1], len(ordered.forward), limit_bytes)
    return tuple(cuts)


def _segment_bytes(ordered: OrderedProgram, start: int, end: int) -> int:
    pieces = set[Piece]().union(*(_pieces(ordered, i) for i in range(start, end)))
    kept = int(ordered.kept_bytes[end] - ordered.kept_bytes[start])
    working = int(ordered.working_bytes[start:end].max())
    return ordered.piece_bytes(pieces) + kept + 2 * working


def _blocks(ordered: OrderedProgram, repeat: Repeat) -> list[int] | None:
    """Starts of the blocks that repeat, and the end; None if they have no params."""
    period, pieces = repeat.period, ordered.pieces
    if not any(map(pieces.get, ordered.forward[repeat.start : repeat.start + period])):
        return None
    ranked = []
    for offset in range(period):
        num_blocks = (repeat.length - offset) // period
        starts = repeat.start + offset + period * np.arange(num_blocks + 1)
        cost = int(np.median(ordered.cut_bytes[starts[1:]]))
        ranked.append((cost, -num_blocks, offset, starts.tolist()))
    max_cost = _PHASE_TOLERANCE * min(ranked)[0]
    cheap = [item for item in ranked if item[0] <= max_cost]
    return min(cheap, key=lambda item: (item[1], item[0], item[2]))[3]


def _cuts_of_blocks(
    ordered: OrderedProgram, blocks: list[int], limit_bytes: int
) -> list[int]:
    """Returns cuts after the first of `blocks`; small blocks share a segment."""
    num_blocks = len(blocks) - 1
    first, last = blocks[num_blocks // 2 : num_blocks // 2 + 2]
    block_bytes = _segment_bytes(ordered, first, last)
    if block_bytes > limit_bytes:
        inner = _cuts_between(ordered, first, last, limit_bytes)
        return [start + cut - first for start in blocks[:-1] for cut in inner]
    max_group = max(1, min(limit_bytes, _SMALL_BYTES) // max(block_bytes, 1))
    # A power of two, so models of 12, 24 and 48 blocks have the same programs.
    group = 1 << (min(max_group, num_blocks).bit_length() - 1)
    return blocks[num_blocks % group or group :: group]


def _cuts_between(
    ordered: OrderedProgram, start: int, end: int, limit_bytes: int
) -> list[int]:
    """Returns cuts after `start` up to `end` that the fewest bytes cross in all.

    Segments stay within the limit, except those of a single node.
    """
    length = end - start
    kept = ordered.kept_bytes[start : end + 1]
    uses = _piece_uses(ordered, start, end)
    totals = np.full(length + 1, np.inf)  # least costs up to each position
    totals[0], previous_cut = 0, np.zeros(length + 1, int)
    for first in range(length):
        is_new = (uses["place"] >= first) & (uses["before"] < first)
        new, sizes = uses["place"][is_new] - first, uses["bytes"][is_new]
        params = np.bincount(new, sizes, length - first).cumsum()
        working = np.maximum.accumulate(ordered.working_bytes[start + first : end])
        needs = params + kept[first + 1 :] - kept[first] + 2 * working
        num_ends = max(1, int(np.searchsorted(needs, limit_bytes, "right")))
        ends = slice(first + 1, first + 1 + num_ends)
        costs = totals[first] + _SEGMENT_COST_BYTES + ordered.cut_bytes[start:][ends]
        is_less = costs < totals[ends]
        totals[ends][is_less] = costs[is_less]
        previous_cut[ends][is_less] = first
    cuts, cut = [], length
    while cut:
        cuts.append(start + cut)
        cut = int(previous_cut[cut])
    return cuts[::-1]


def _piece_uses(ordered: OrderedProgram, start: int, end: int) -> np.ndarray:
    """Returns each use of a piece: its place, the place of the use before, bytes."""
    last, uses = dict[Piece, int](), list[tuple[int, int, int]]()
    for place in range(end - start):
        for piece in _pieces(ordered, start + place):
            uses.append((place, last.get(piece, -1), ordered.sizes[piece]))
            last[piece] = place
    return np.array(uses, [("place", int), ("before", int), ("bytes", int)])


def _pieces(ordered: OrderedProgram, i: int) -> set[Piece]:
    """Returns the pieces that a forward node and its share of backward read."""
    pieces, cuts = ordered.pieces, ordered.backward_cuts
    backward = ordered.backward[int(cuts[i + 1]) : int(cuts[i])]
    return set().union(pieces[ordered.forward[i]], *map(pieces.__getitem__, backward))


@lru_cache(maxsize=8)  # a program is cut for many limits, and traced again
def _find_repeats(tokens: tuple[Hashable, ...]) -> list[Repeat]:
    """Returns the longest disjoint repeats, in order; a period has several nodes."""
    repeats, ranges = list[Repeat](), [(0, len(tokens))]
    while ranges:
        start, end = ranges.pop()
        repeat = _longest_repeat(tokens[start:end])
        if repeat is not None:
            first, last = start + repeat.start, start + repeat.start + repeat.length
            repeats.append(repeat._replace(start=first))
            ranges += [(start, first), (last, end)]
    return sorted(repeats)


def _longest_repeat(tokens: Sequence[Hashable]) -> Repeat | None:
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
    """Returns the start and length of the longest stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(np.argmax(lengths))
    return int(edges[2 * longest]), int(lengths[longest])
