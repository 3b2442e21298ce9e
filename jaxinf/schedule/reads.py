"""Plans reads ahead: which units are read for which calls, and what stays.

A unit is whatever is read alone: hashable, with its `page_bytes` of memory. A read may
serve the calls of a later one. The last read of a unit before its gradient is complete
may serve its update, too; the unit then stays until it is updated.

Invariant: units take no more than the memory that is given, which is at least the most
of `held_bytes`; beyond it a unit is read again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxinf.schedule.placement import Stay, fill, occupancy


class Fetch(NamedTuple):
    """One read of a unit, and the calls that it serves.

    Attributes:
      first, last: Numbers of the first and the last call that use it.
      gradient: Number of the call that completes its gradient, if the update takes the
        params from this read; None if it reads them again.
    """

    unit: Any
    first: int
    last: int
    gradient: int | None = None

    @property
    def end(self) -> int:
        """The number of the last call during which it must be in memory."""
        return self.last if self.gradient is None else max(self.last, self.gradient)


def fetches_of(uses: Iterable[Iterable[Any]]) -> tuple[Fetch, ...]:
    """Returns the reads of one step, in order.

    A unit stays if the next call needs it, too; one needed later is read again.

    Args:
      uses: The units that each call uses.
    """
    open_ones: dict[Any, list[int]] = {}
    found: list[tuple[Any, list[int]]] = []
    for number, units in enumerate(uses):
        for unit in units:
            calls = open_ones.get(unit)
            if calls is None or calls[1] < number - 1:
                calls = open_ones[unit] = [number, number]
                found.append((unit, calls))
            calls[1] = number
    return tuple(Fetch(unit, first, last) for unit, (first, last) in found)


def held_bytes(fetches: Sequence[Fetch], num_calls: int) -> np.ndarray:
    """Returns the least memory for units during each call.

    Two calls are in flight; with less than the most of it a step would deadlock.
    """
    stays = (Stay(one.first, one.end + 2, one.unit.page_bytes) for one in fetches)
    return occupancy(num_calls + 2, stays)


def keep_between(
    fetches: Sequence[Fetch], held: np.ndarray, limit_bytes: int
) -> tuple[Fetch, ...]:
    """Joins reads of the same unit, those that are nearest to each other first.

    Args:
      fetches: The reads of a step, in order.
      limit_bytes: Memory for units; at least the most of `held`.
    """
    between = sorted(_between(fetches), key=lambda stay: stay.stop - stay.start)
    # By read, the one that serves its calls.
    before = dict(stay.tensor for stay in fill(held, between, limit_bytes))
    joined = list(fetches)
    for other in sorted(before, reverse=True):
        one = before[other]
        joined[one] = joined[one]._replace(last=joined[other].last)
    return tuple(fetch for i, fetch in enumerate(joined) if i not in before)


def _between(fetches: Sequence[Fetch]) -> Iterator[Stay]:
    """Yields the time between two reads of a unit, with their numbers, later first."""
    last: dict[Any, int] = {}
    for number, fetch in enumerate(fetches):
        if fetch.unit in last:
            one = last[fetch.unit]
            begin = fetches[one].end + 2
            yield Stay(begin, fetch.first, fetch.unit.page_bytes, (number, one))
        last[fetch.unit] = number


def hand_over(
    fetches: Sequence[Fetch],
    gradients: Mapping[Any, int],
    can_take: Callable[[Any], bool],
    held: np.ndarray,
    limit_bytes: int,
    is_staged: bool = False,
) -> tuple[Fetch, ...]:
    """Chooses the reads that serve an update, those that wait least first.

    Args:
      fetches: The reads of a step, in order.
      can_take: Whether the update of a unit can take its params from a read.
      held: Memory for units during each call, at least; updated.
      limit_bytes: Memory for units; at least the most of `held`.
      is_staged: Whether units only pass through this memory on their way to the device.

    Returns:
      The reads; those that serve an update have a `gradient`.
    """
    last = {
        one.unit: number
        for number, one in enumerate(fetches)
        if one.first <= gradients.get(one.unit, -1)
    }
    waits = []
    for unit, number in last.items():
        if can_take(unit):
            one = fetches[number]._replace(gradient=gradients[unit])
            start = one.first if is_staged else one.last + 2
            waits.append(Stay(start, one.end + 2, unit.page_bytes, (number, one)))
    waits.sort(key=lambda stay: stay.tensor[1].gradient - stay.tensor[1].last)
    chosen = dict(stay.tensor for stay in fill(held, waits, limit_bytes))
    return tuple(chosen.get(number, fetch) for number, fetch in enumerate(fetches))
