"""Runs of equal parts in a sequence: the blocks of a model.

Invariant: the result depends on the tokens alone.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Run", "find_runs"]

_MIN_REPEATS = 3


@dataclass(frozen=True, order=True)
class Run:
    """Tokens from `start` on that repeat every `period`, `length` in all."""

    start: int
    period: int
    length: int


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
