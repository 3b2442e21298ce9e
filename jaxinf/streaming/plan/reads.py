"""Plans the reads of params: which units are read for which calls, and what stays.

A read may serve the calls of a later one. The last read of a unit before its gradient
is complete may serve its update, too; the unit then stays until it is updated.

Invariant: the memory of params is what the plan leaves for them, on the host and on the
JAX device; beyond it a unit is read again.
"""

from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from jaxinf.errors import BudgetError
from jaxinf.io.pages import PAGE_BYTES, page_ceil
from jaxinf.schedule.occupancy import Stay, occupancy
from jaxinf.schedule.packer import fill
from jaxinf.schedule.simulator import Load, Loads
from jaxinf.streaming.plan.calls import Call
from jaxinf.streaming.plan.memory import NUM_STAGED, Division
from jaxinf.streaming.plan.plan import Plan
from jaxinf.streaming.program.units import Places, Unit

__all__ = [
    "Fetch",
    "Reading",
    "completions",
    "fetches_of",
    "hand_over",
    "keep_between",
    "page_bytes",
    "planned_fetches",
    "reused_bytes",
    "staged_bytes",
    "window_bytes",
]


@dataclass(frozen=True)
class Fetch:
    """One read of a unit, and the calls that it serves.

    Attributes:
      unit: The unit to read.
      first, last: Numbers of the first and the last call that use it.
      gradient: Number of the call that completes its gradient, if the update takes the
        params from this read; None if it reads them again.
    """

    unit: Unit
    first: int
    last: int
    gradient: int | None = None

    @property
    def calls(self) -> tuple[int, int, int | None]:
        """The calls that it serves."""
        return self.first, self.last, self.gradient

    @property
    def end(self) -> int:
        """The number of the last call during which it must be in memory."""
        return self.last if self.gradient is None else max(self.last, self.gradient)


class Reading(NamedTuple):
    """The reads of a plan.

    Attributes:
      fetches: The reads of a step, in order.
      room_bytes: Memory for their units on the device.
    """

    fetches: tuple[Fetch, ...]
    room_bytes: int

    @property
    def num_first(self) -> int:
        """Number of units that have room when a step begins."""
        return bisect_right(self._sums, self.room_bytes)

    @property
    def needed_bytes(self) -> int:
        """Memory on the device that units can use."""
        return min(self.room_bytes, max(self._sums, default=0))

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest unit."""
        return max((page_bytes(fetch.unit) for fetch in self.fetches), default=0)

    def memory(self, division: Division) -> tuple[int, int | None]:
        """Returns memory of the host for reading, and of a device with its own."""
        if not division.staged:
            return self.needed_bytes, None
        return division.staged - self.largest_bytes, self.room_bytes

    def loads(self, division: Division) -> Loads:
        """Returns the reads for a simulation; those for the same calls are one."""
        read_bytes, device_bytes = self.memory(division)
        found: dict[Any, Load] = {}
        for number, fetch in enumerate(self.fetches):
            # On their way to a device, units pass one by one.
            key = fetch.calls if device_bytes is None else number
            own = fetch.unit.num_bytes, page_bytes(fetch.unit)
            one = found.get(key)
            if one is not None:
                own = own[0] + one.num_bytes, own[1] + one.host_bytes
            found[key] = Load(fetch.first, fetch.last, fetch.end, *own)
        return Loads(tuple(found.values()), read_bytes, device_bytes)

    @property
    def _sums(self) -> list[int]:
        return list(accumulate(page_bytes(fetch.unit) for fetch in self.fetches))


def planned_fetches(
    plan: Plan,
    places: Places,
    division: Division,
    can_take: Callable[[Unit], bool],
    stays: Container[Unit] = (),
) -> Reading:
    """Plans the reads of a step.

    Args:
      plan: The plan.
      places: The store's units.
      division: Memory.
      can_take: Whether the update of a unit can take params that were read for a
        program.
      stays: Units that are in memory and not read.

    Raises:
      BudgetError: The host has no room for params on their way to the device.
    """
    calls = plan.calls.calls
    fetches = fetches_of(calls, places)
    fetches = tuple(fetch for fetch in fetches if fetch.unit not in stays)
    spare = max(0, division.programs - plan.peak_bytes)
    room = window_bytes(fetches, len(calls)) + spare
    is_staged = division.staged > 0
    # The rest is for reading ahead.
    fetches = keep_between(fetches, len(calls), room - spare // 2)
    limit = room - spare // 4
    if is_staged:
        largest = Reading(fetches, room).largest_bytes
        limit = division.staged - NUM_STAGED * largest
        if limit < 0:
            raise BudgetError(
                "memory_bytes",
                f"it leaves {division.staged} bytes for params on their way to the "
                f"device, which take {NUM_STAGED} x {largest}",
                -limit,
            )
    fetches = hand_over(
        fetches,
        completions(calls, places),
        can_take,
        num_calls=len(calls),
        limit_bytes=limit,
        is_staged=is_staged,
    )
    return Reading(fetches, room)


def staged_bytes(places: Places, plan: Plan, stays: Container[Unit]) -> int:
    """Returns the host's memory that params take on their way to the device."""
    pieces = {piece for call in plan.calls.calls for piece in call.pieces}
    units = (places.unit(piece) for piece in pieces)
    sizes = [page_bytes(unit) for unit in units if unit not in stays]
    return NUM_STAGED * max(sizes, default=PAGE_BYTES)


def fetches_of(calls: Sequence[Call], places: Places) -> tuple[Fetch, ...]:
    """Returns the reads of one step, in order.

    A unit stays if the next call needs it, too; one needed later is read again.
    """
    open_ones: dict[Unit, list[int]] = {}
    found: list[tuple[Unit, list[int]]] = []
    for number, call in enumerate(calls):
        for piece in call.pieces:
            unit = places.unit(piece)
            uses = open_ones.get(unit)
            if uses is None or uses[1] < number - 1:
                uses = open_ones[unit] = [number, number]
                found.append((unit, uses))
            uses[1] = number
    return tuple(Fetch(unit, first, last) for unit, (first, last) in found)


def reused_bytes(
    fetches: Sequence[Fetch], calls: Sequence[Call], places: Places
) -> int:
    """Bytes that calls of a step find in memory, because a call before used them."""
    used = sum(
        unit.num_bytes
        for call in calls
        for unit in {places.unit(piece) for piece in call.pieces}
    )
    return used - sum(fetch.unit.num_bytes for fetch in fetches)


def window_bytes(fetches: Sequence[Fetch], num_calls: int) -> int:
    """The least memory for two calls in flight; with less a step would deadlock."""
    return int(_held_bytes(fetches, num_calls).max(initial=0))


def _held_bytes(fetches: Sequence[Fetch], num_calls: int) -> np.ndarray:
    """The least memory for units during each call."""
    stays = (Stay(one.first, one.end + 2, page_bytes(one.unit)) for one in fetches)
    return occupancy(num_calls + 2, stays)


def page_bytes(unit: Unit) -> int:
    """Bytes of a unit in whole pages."""
    return page_ceil(max(unit.held_bytes, 1))


def keep_between(
    fetches: Sequence[Fetch], num_calls: int, limit_bytes: int
) -> tuple[Fetch, ...]:
    """Joins reads of the same unit, those that are nearest to each other first.

    Args:
      fetches: The reads of a step, in order.
      num_calls: Number of calls in a step.
      limit_bytes: Memory for units; at least `window_bytes` of the reads.
    """
    held = _held_bytes(fetches, num_calls)
    between = sorted(_between(fetches), key=lambda stay: stay.stop - stay.start)
    # By read, the one that serves its calls.
    before = dict(stay.tensor for stay in fill(held, between, limit_bytes))
    joined = list(fetches)
    for other in sorted(before, reverse=True):
        one = before[other]
        joined[one] = replace(joined[one], last=joined[other].last)
    return tuple(fetch for i, fetch in enumerate(joined) if i not in before)


def _between(fetches: Sequence[Fetch]) -> Iterator[Stay]:
    """Yields the time between two reads of a unit, with their numbers, later first."""
    last: dict[Unit, int] = {}
    for number, fetch in enumerate(fetches):
        if fetch.unit in last:
            one = last[fetch.unit]
            begin = fetches[one].end + 2
            yield Stay(begin, fetch.first, page_bytes(fetch.unit), (number, one))
        last[fetch.unit] = number


def completions(calls: Sequence[Call], places: Places) -> Mapping[Unit, int]:
    """Returns for each unit the number of the call that completes its gradient."""
    return {
        places.unit(piece): number
        for number, call in enumerate(calls)
        for piece, _ in call.gradients
    }


def hand_over(
    fetches: Sequence[Fetch],
    gradients: Mapping[Unit, int],
    can_take: Callable[[Unit], bool],
    num_calls: int,
    limit_bytes: int,
    is_staged: bool = False,
) -> tuple[Fetch, ...]:
    """Chooses the reads that serve an update, those that wait least first.

    Args:
      fetches: The reads of a step, in order.
      gradients: From `completions`.
      can_take: Whether the update of a unit can take its params from a read.
      num_calls: Number of calls in a step.
      limit_bytes: Memory for units; at least `window_bytes` of the reads, unless
        these are staged.
      is_staged: Whether units only pass through this memory on their way to the device.

    Returns:
      The reads; those that serve an update have a `gradient`.
    """
    last = {
        one.unit: (number, replace(one, gradient=gradients[one.unit]))
        for number, one in enumerate(fetches)
        if one.first <= gradients.get(one.unit, -1) and can_take(one.unit)
    }
    waits = []
    for number, one in last.values():
        start = one.first if is_staged else one.last + 2
        waits.append(Stay(start, one.end + 2, page_bytes(one.unit), (number, one)))
    waits.sort(key=lambda stay: gradients[stay.tensor[1].unit] - stay.tensor[1].last)
    held = _held_bytes(() if is_staged else fetches, num_calls)
    chosen = dict(stay.tensor for stay in fill(held, waits, limit_bytes))
    return tuple(chosen.get(number, fetch) for number, fetch in enumerate(fetches))
