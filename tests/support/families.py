"""Families of tests: members of `make test`, of `make test-long`, and beyond; parts.

A family may be a covering array: few rows of a product, with all combinations of axes.
"""

import os
import zlib
from itertools import combinations, product

import pytest

LONG = os.environ.get("JAXINF_FAULTS") == "long"
"""Whether `make faults` runs, with long tests."""

BEYOND = (pytest.mark.long, pytest.mark.every)
"""Marks of members that `make test-long-all` alone runs."""


def family(members, *, short, beyond=()):
    """Returns the members as parameters of a test.

    Args:
      members: all of them; one that is a tuple is several parameters.
      short: those of `make test`.
      beyond: those of `make test-long-all` alone. The others are in `make test-long`.

    Raises:
      pytest.UsageError: A name in `short` or `beyond` is no member, or in both.
    """
    members = list(members)
    named = [*short, *beyond]
    if wrong := [x for x in named if x not in members or named.count(x) > 1]:
        raise pytest.UsageError(f"{wrong}: expected members of {members}, once each")

    def parameter(member):
        marks = BEYOND if member in beyond else (pytest.mark.long,)
        values = member if isinstance(member, tuple) else (member,)
        return pytest.param(*values, marks=() if member in short else marks)

    return [parameter(member) for member in members]


def is_in_part(name, part):
    """Whether a test is in part `part`, ``NUMBER/COUNT`` with numbers from 0."""
    number, count = map(int, part.split("/"))
    return zlib.crc32(name.encode()) % count == number


def covering(strength, *axes):
    """Returns rows of the product of `axes`, chosen greedily; the same in every run.

    Each combination of values of any `strength` axes is in one of the rows, so that a
    fault that so many axes together cause is found.
    """
    rows = list(product(*(range(len(axis)) for axis in axes)))

    def parts(row):
        return set(combinations(enumerate(row), strength))

    missing = set().union(*map(parts, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(parts(row) & missing))
        chosen.append(best)
        missing -= parts(best)
    return [tuple(a[i] for a, i in zip(axes, row, strict=True)) for row in chosen]
