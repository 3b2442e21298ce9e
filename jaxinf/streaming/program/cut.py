"""Cuts a program into segments: at its period, the blocks of a model, else by bytes.

Invariant: cuts depend on the graph and the limit alone; equal blocks are cut alike.
"""

from collections.abc import Hashable, Sequence
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
    chooser = _Chooser(lifetimes, limit_bytes)
    num_nodes = len(lifetimes.forward)
    cuts = [0]
    for run in find_runs(tokens):
        blocks = chooser.blocks(run)
        if blocks is None or blocks[0] < cuts[-1]:
            continue
        cuts += chooser.divide(cuts[-1], blocks[0])
        cuts += chooser.grouped(blocks)
    cuts += chooser.divide(cuts[-1], num_nodes)
    return tuple(cuts)


def segment_bytes(lifetimes: Lifetimes, start: int, end: int) -> int:
    """Estimates the memory of the segment between two cuts."""
    return _Chooser(lifetimes, 0).bytes_of(start, end)


class _Chooser:
    def __init__(self, lifetimes: Lifetimes, limit_bytes: int) -> None:
        self.lifetimes = lifetimes
        self.limit_bytes = limit_bytes
        backward_live = lifetimes.backward_live_bytes[lifetimes.backward_cuts]
        self.cost = lifetimes.live_bytes + backward_live

    def blocks(self, run: Run) -> list[int] | None:
        """Starts of the run's blocks, and its end; None if they have no params."""
        period = run.period
        pieces = self.lifetimes.classes.pieces
        nodes = self.lifetimes.forward[run.start : run.start + period]
        if not any(pieces[node] for node in nodes):
            return None
        ranked = []
        for offset in range(period):
            num_blocks = (run.length - offset) // period
            starts = run.start + offset + period * np.arange(num_blocks + 1)
            cost = int(np.median(self.cost[starts[1:]]))
            ranked.append((cost, -num_blocks, offset, starts.tolist()))
        most = _PHASE_TOLERANCE * min(ranked)[0]
        cheap = [item for item in ranked if item[0] <= most]
        return min(cheap, key=lambda item: (item[1], item[0], item[2]))[3]

    def grouped(self, blocks: list[int]) -> list[int]:
        """Cuts after the first of `blocks`, with several small blocks in a segment."""
        num_blocks = len(blocks) - 1
        middle = num_blocks // 2
        block_bytes = self.bytes_of(blocks[middle], blocks[middle + 1])
        if block_bytes > self.limit_bytes:
            inner = self.divide(blocks[middle], blocks[middle + 1])
            offsets = [cut - blocks[middle] for cut in inner]
            return [start + offset for start in blocks[:-1] for offset in offsets]
        most = max(1, min(self.limit_bytes, _SMALL_BYTES) // max(block_bytes, 1))
        group = _group(num_blocks, most)
        return blocks[num_blocks % group or group :: group]

    def divide(self, start: int, end: int) -> list[int]:
        """Cuts after `start` up to and including `end`, at the least cost."""
        if start == end:
            return []
        candidates = self._candidates(start, end)
        best = [(0, -1)] + [(1 << 62, -1)] * (len(candidates) - 1)
        for i in range(len(candidates) - 1):
            for j, need in self._ends(candidates, i):
                excess = max(0, need - self.limit_bytes)
                cost = (
                    best[i][0]
                    + int(self.cost[candidates[j]])
                    + _SEGMENT_COST
                    + _EXCESS_COST * excess
                )
                if cost < best[j][0]:
                    best[j] = (cost, i)
        cuts = []
        at = len(candidates) - 1
        while at > 0:
            cuts.append(candidates[at])
            at = best[at][1]
        return cuts[::-1]

    def bytes_of(self, start: int, end: int) -> int:
        """Bytes that the segment between two cuts needs."""
        return next(need for _, need in self._ends([start, end], 0))

    def _candidates(self, start: int, end: int) -> list[int]:
        """Local minima of the cost, or every position if they are too far apart."""
        minima = [c for c in range(start + 1, end) if self._is_minimum(c)]
        coarse = [start, *minima, end]
        fine = [start]
        for low, high in pairwise(coarse):
            if self.bytes_of(low, high) > self.limit_bytes:
                fine += range(low + 1, high)
            fine.append(high)
        if len(fine) > _MAX_CANDIDATES:
            inner = sorted(fine[1:-1], key=lambda c: (int(self.cost[c]), c))
            fine = [start, *sorted(inner[: _MAX_CANDIDATES - 2]), end]
        return fine

    def _is_minimum(self, cut: int) -> bool:
        before, here = self.cost[cut - 1], self.cost[cut]
        if here >= before:
            return False
        after = self.cost[cut:]
        different = np.flatnonzero(after != here)
        return not len(different) or after[different[0]] > here

    def _ends(self, candidates: list[int], i: int) -> list[tuple[int, int]]:
        """Possible ends of a segment from candidate `i`, with the bytes it needs."""
        times = self.lifetimes
        start = candidates[i]
        backward_end = int(times.backward_cuts[start])
        pieces: set[Piece] = set()
        working = 0
        found: list[tuple[int, int]] = []
        at, backward_at = start, backward_end
        for j in range(i + 1, len(candidates)):
            end = candidates[j]
            for node in times.forward[at:end]:
                pieces |= times.classes.pieces[node]
            working = max(working, int(times.working_bytes[at:end].max()))
            backward_start = int(times.backward_cuts[end])
            for node in times.backward[backward_start:backward_at]:
                pieces |= times.classes.pieces[node]
            at, backward_at = end, backward_start
            kept = int(times.kept_bytes[end] - times.kept_bytes[start])
            need = times.piece_bytes(pieces) + kept + 2 * working
            found.append((j, need))
            if need > self.limit_bytes:
                break
        return found


def _group(num_blocks: int, most: int) -> int:
    """Number of blocks in a segment, at most `most`: a power of two.

    It is the same for models of 12, 24 and 48 blocks, so they have the same programs.
    """
    return 1 << (min(most, num_blocks).bit_length() - 1)


def find_runs(tokens: Sequence[Hashable], start: int = 0) -> list[Run]:
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
    starts, ends = edges[::2], edges[1::2]
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest] - starts[longest])
