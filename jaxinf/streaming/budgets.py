"""Finds the smallest budget that suffices where another was refused.

A refusal says how many bytes are missing, at least. A part of what is added to a budget
goes elsewhere, such as to buffers; how much the next refusal tells.

Invariant: a budget that is named was planned with, and the search is bounded in plans
and in time.
"""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from jaxinf.errors import BudgetError
from jaxinf.terminal import exact_bytes

_Plan = TypeVar("_Plan")

MOST_PLANS = 12
"""The most budgets that are tried; 0 in a program that looks for a budget itself."""

# The time after which no further one is tried.
_MOST_S = 120.0
# The least part of what is added that goes where bytes are missing.
_LEAST_SHARE = 0.5
# What is added if memory does not help, over the bytes that are missing.
_GROWTH = 8


def planned_within(
    limits: Mapping[str, int],
    plan: Callable[[Mapping[str, int]], _Plan],
    *,
    searches: bool = True,
) -> _Plan:
    """Returns what `plan` makes of budgets, or refuses them and names some that work.

    Args:
      searches: Whether to look for those that work; several processes plan once.

    Raises:
      BudgetError: A budget is too small.
    """
    if not searches:
        return plan(limits)
    try:
        return plan(limits)
    except BudgetError as error:
        raise _advised(error, limits, plan) from None


def _advised(
    error: BudgetError,
    limits: Mapping[str, int],
    plan: Callable[[Mapping[str, int]], object],
) -> BudgetError:
    """Returns the refusal with budgets that work; blocks while it plans."""
    if error.limit not in limits:
        return error
    tried, last, began_s = dict(limits), error, time.monotonic()
    share = 1.0
    for _ in range(MOST_PLANS):
        if last.limit not in tried or time.monotonic() - began_s > _MOST_S:
            break
        name, missing_bytes, before = last.limit, last.missing_bytes, tried[last.limit]
        tried[name] = _rounded(before + max(1, int(missing_bytes / share)))
        try:
            plan(tried)
        except BudgetError as other:
            last = other
            gained = (missing_bytes - last.missing_bytes) / (tried[name] - before)
            share = min(max(gained, _LEAST_SHARE), 1.0)
            if last.limit != name or gained < 0:  # it is missing somewhere else
                share = 1.0
            elif not gained:
                share = 1 / _GROWTH
            continue
        raised = [name for name, size in tried.items() if size != limits[name]]
        return error._advising({name: exact_bytes(tried[name]) for name in raised})
    return error


def _rounded(num_bytes: int) -> int:
    """Returns whole MiB that are easily read: at most 1/32 more."""
    unit = max(1 << 20, 1 << max(0, num_bytes.bit_length() - 6))
    return -(-num_bytes // unit) * unit
