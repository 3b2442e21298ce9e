"""Ratios of figures that were taken in turns, and intervals that have their median."""

import math
from collections.abc import Sequence

__all__ = ["interval", "pairwise"]


def pairwise(some: Sequence[float], others: Sequence[float]) -> list[float]:
    """The ratios of pairs."""
    return [a / b for a, b in zip(some, others, strict=True)]


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Two of the values, between which the median lies with that confidence or more.

    All values where they are too few for it.
    """
    ordered, count = sorted(values), len(values)
    skipped, tail = 0, 0.0
    while skipped < count // 2:
        tail += 2 * math.comb(count, skipped) / 2**count
        if tail > 1 - confidence:
            break
        skipped += 1
    outermost = max(0, skipped - 1)
    return ordered[outermost], ordered[-1 - outermost]
