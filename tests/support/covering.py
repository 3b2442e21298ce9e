"""Covering arrays: few rows of a product, in which all combinations of axes appear."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def covering(strength: int, *axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns rows of the product of `axes`, chosen greedily; the same in every run.

    Each combination of values of any `strength` axes is in one of the rows, so that a
    fault that so many axes together cause is found.
    """
    rows = list(product(*(range(len(axis)) for axis in axes)))

    def parts(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(row), strength))

    missing = set().union(*map(parts, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(parts(row) & missing))
        chosen.append(best)
        missing -= parts(best)
    return [tuple(a[i] for a, i in zip(axes, row, strict=True)) for row in chosen]
