"""Families of tests: members of `make test`, of `make test-long`, and beyond; parts."""

import os
import zlib
from collections.abc import Collection, Iterable
from typing import Any

import pytest

LONG = os.environ.get("JAXINF_FAULTS") == "long"
"""Whether `make faults` runs, with long tests."""

BEYOND = (pytest.mark.long, pytest.mark.every)
"""Marks of members that `make test-long-all` alone runs."""


def family(
    members: Iterable[Any], *, short: Collection[Any], beyond: Collection[Any] = ()
) -> list[Any]:
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

    def parameter(member: Any) -> Any:
        marks = BEYOND if member in beyond else (pytest.mark.long,)
        values = member if isinstance(member, tuple) else (member,)
        return pytest.param(*values, marks=() if member in short else marks)

    return [parameter(member) for member in members]


def is_in_part(name: str, part: str) -> bool:
    """Whether a test is in part `part`, ``NUMBER/COUNT`` with numbers from 0."""
    number, count = map(int, part.split("/"))
    return zlib.crc32(name.encode()) % count == number
