"""Cuts a program into segments: at its period, the blocks of a model, else by bytes.

Invariant: cuts depend on the graph and the limit alone; equal blocks are cut alike.
"""

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.lifetimes import Lifetimes

# Smaller blocks share a segment: each program costs a dispatch.
_SMALL_BYTES = 4 << 20
# The cost of one more segment, in bytes that are live at a cut.
_SEGMENT_COST = 1 << 16
# The cost of a byte above the limit, if no cut can avoid it.
_EXCESS_COST = 64
_MAX_CANDIDATES = 400
# Factor by which a cut may exceed the cheapest one, to save a block.
_PHASE_TOLERANCE = 1.5
# So often at least blocks repeat.
_MIN_REPEATS = 3


class Run(NamedTuple):
    """Tokens from `start` on that repeat every `period`, `length` in all."""

    start: int
    period: int
    length: int


def choose_cuts(
    lifetimes: Lifetimes, tokens: Sequence[Hashable], limit_bytes: int
) -> tuple[int, ...]:
    """Chooses the positions in the forward order of segments, with 0 and the end.

    Args:
      tokens: For each forward node, a token that identifies its computation.
      limit_bytes: The most that a segment should need for params, kept and working
        values. If a single node needs more, it becomes a segment.
    """
    cuts = [0]
    for run in find_runs(tuple(tokens)):
        blocks = _blocks(lifetimes, run)
        if blocks is None or blocks[0] < cuts[-1]:
            continue
        cuts += _divided(lifetimes, cuts[-1], blocks[0], limit_bytes)
        cuts += _grouped(lifetimes, blocks, limit_bytes)
    cuts += _divided(lifetimes, cuts[-1], len(lifetimes.forward), limit_bytes)
    return tuple(cuts)


def segment_bytes(lifetimes: Lifetimes, start: int, end: int) -> int:
    """Estimates the memory of the segment between two cuts."""
    return next(need for _, need in _ends(lifetimes, [start, end], 0))


def _blocks(lifetimes: Lifetimes, run: Run) -> list[int] | None:
    """Starts of the run's blocks, and its end; None if they have no params."""
    period, pieces = run.period, lifetimes.pieces
    if not any(map(pieces.get, lifetimes.forward[run.start : run.start + period])):
        return None
    ranked = []
    for offset in range(period):
        num_blocks = (run.length - offset) // period
        starts = run.start + offset + period * np.arange(num_blocks + 1)
        cost = int(np.median(lifetimes.cut_bytes[starts[1:]]))
        ranked.append((cost, -num_blocks, offset, starts.tolist()))
    most = _PHASE_TOLERANCE * min(ranked)[0]
    cheap = [item for item in ranked if item[0] <= most]
    return min(cheap, key=lambda item: (item[1], item[0], item[2]))[3]


def _grouped(lifetimes: Lifetimes, blocks: list[int], limit_bytes: int) -> list[int]:
    """Cuts after the first of `blocks`, with several small blocks in a segment."""
    num_blocks = len(blocks) - 1
    first, last = blocks[num_blocks // 2 : num_blocks // 2 + 2]
    block_bytes = segment_bytes(lifetimes, first, last)
    if block_bytes > limit_bytes:
        inner = _divided(lifetimes, first, last, limit_bytes)
        return [start + cut - first for start in blocks[:-1] for cut in inner]
    most = max(1, min(limit_bytes, _SMALL_BYTES) // max(block_bytes, 1))
    # A power of two, so models of 12, 24 and 48 blocks have the same programs.
    group = 1 << (min(most, num_blocks).bit_length() - 1)
    return blocks[num_blocks % group or group :: group]


def _divided(lifetimes: Lifetimes, start: int, end: int, limit_bytes: int) -> list[int]:
    """Cuts after `start` up to and including `end`, at the least cost."""
    if start == end:
        return []
    candidates = _candidates(lifetimes, start, end, limit_bytes)
    best = [(0, -1)] + [(1 << 62, -1)] * (len(candidates) - 1)
    for i in range(len(candidates) - 1):
        for j, need in _ends(lifetimes, candidates, i):
            cost = best[i][0] + int(lifetimes.cut_bytes[candidates[j]]) + _SEGMENT_COST
            cost += _EXCESS_COST * max(0, need - limit_bytes)
            if cost < best[j][0]:
                best[j] = (cost, i)
            if need > limit_bytes:
                break
    cuts, at = [], len(candidates) - 1
    while at > 0:
        cuts.append(candidates[at])
        at = best[at][1]
    return cuts[::-1]


def _candidates(
    lifetimes: Lifetimes, start: int, end: int, limit_bytes: int
) -> list[int]:
    """Local minima of the cost, or every position if they are too far apart."""
    cost = lifetimes.cut_bytes
    minima = [c for c in range(start + 1, end) if _is_minimum(cost, c)]
    fine = [start]
    for low, high in pairwise([start, *minima, end]):
        if segment_bytes(lifetimes, low, high) > limit_bytes:
            fine += range(low + 1, high)
        fine.append(high)
    if len(fine) > _MAX_CANDIDATES:
        inner = sorted(fine[1:-1], key=lambda c: (int(cost[c]), c))
        fine = [start, *sorted(inner[: _MAX_CANDIDATES - 2]), end]
    return fine


def _is_minimum(cost: np.ndarray, cut: int) -> bool:
    if cost[cut] >= cost[cut - 1]:
        return False
    different = np.flatnonzero(cost[cut:] != cost[cut])
    return not len(different) or cost[cut + different[0]] > cost[cut]


def _ends(
    lifetimes: Lifetimes, candidates: Sequence[int], i: int
) -> Iterator[tuple[int, int]]:
    """Yields ends of a segment from candidate `i`, with the bytes that it needs."""
    pieces, working = set[Piece](), 0
    of, cuts = lifetimes.pieces, lifetimes.backward_cuts
    at = start = candidates[i]
    for j, end in enumerate(candidates[i + 1 :], i + 1):
        pieces.update(*map(of.__getitem__, lifetimes.forward[at:end]))
        backward = lifetimes.backward[int(cuts[end]) : int(cuts[at])]
        pieces.update(*map(of.__getitem__, backward))
        working = max(working, int(lifetimes.working_bytes[at:end].max()))
        at = end
        kept = int(lifetimes.kept_bytes[end] - lifetimes.kept_bytes[start])
        yield j, lifetimes.piece_bytes(pieces) + kept + 2 * working


@lru_cache(maxsize=8)  # a program is cut for many limits
def find_runs(tokens: tuple[Hashable, ...], start: int = 0) -> list[Run]:
    """Finds disjoint runs of at least three periods, and returns them in order.

    Longer runs are preferred. A period has several nodes; a repeated node is not a run.
    """
    run = _longest(tokens)
    if run is None:
        return []
    end = run.start + run.length
    return [
        *find_runs(tokens[: run.start], start),
        Run(start + run.start, run.period, run.length),
        *find_runs(tokens[end:], start + end),
    ]


def _longest(tokens: Sequence[Hashable]) -> Run | None:
    numbers: dict[Hashable, int] = {}
    ids = np.array([numbers.setdefault(token, len(numbers)) for token in tokens])
    best: Run | None = None
    for period in range(2, len(ids) // _MIN_REPEATS + 1):
        start, same = _longest_true(ids[:-period] == ids[period:])
        length = same + period
        if length >= _MIN_REPEATS * period and (best is None or length > best.length):
            best = Run(start, period, length)
    return best


def _longest_true(flags: np.ndarray) -> tuple[int, int]:
    """Returns start and length of the longest stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(np.argmax(lengths))
    return int(edges[2 * longest]), int(lengths[longest])
