"""Plans the reads of params, in the memory that a plan leaves.

See `schedule.reads` for what is chosen.

Invariant: the memory of params is what the plan leaves for them, on the host and on the
JAX device; beyond it a unit is read again.
"""

from bisect import bisect_right
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from jaxinf.errors import BudgetError
from jaxinf.io import PAGE_BYTES
from jaxinf.schedule.reads import (
    Fetch,
    fetches_of,
    hand_over,
    held_bytes,
    keep_between,
)
from jaxinf.streaming.plan.calls import Call, Plan
from jaxinf.streaming.plan.memory import NUM_STAGED, Division
from jaxinf.streaming.program.units import StoreUnits, Unit


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
        return max((fetch.unit.page_bytes for fetch in self.fetches), default=0)

    def memory(self, division: Division) -> tuple[int, int | None]:
        """Returns memory of the host for reading, and of a device with its own."""
        if not division.staged:
            return self.needed_bytes, None
        return division.staged - self.largest_bytes, self.room_bytes

    @property
    def _sums(self) -> list[int]:
        return list(accumulate(fetch.unit.page_bytes for fetch in self.fetches))


def planned_fetches(
    plan: Plan,
    store_units: StoreUnits,
    division: Division,
    can_take: Callable[[Unit], bool],
    stays: Container[Unit] = (),
) -> Reading:
    """Plans the reads of a step.

    Args:
      can_take: Whether the update of a unit can take params that were read for a
        program.
      stays: Units that are in memory and not read.

    Raises:
      BudgetError: The host has no room for params on their way to the device.
    """
    calls = plan.calls
    uses = [map(store_units.unit, call.reads) for call in calls]
    fetches = tuple(fetch for fetch in fetches_of(uses) if fetch.unit not in stays)
    spare = max(0, division.programs - plan.peak_bytes)
    held = held_bytes(fetches, len(calls))
    room = int(held.max(initial=0)) + spare
    is_staged = division.staged > 0
    # The rest is for reading ahead.
    fetches = keep_between(fetches, held, room - spare // 2)
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
        completions(calls, store_units),
        can_take,
        held=np.zeros_like(held) if is_staged else held,
        limit_bytes=limit,
        is_staged=is_staged,
    )
    return Reading(fetches, room)


def staged_bytes(store_units: StoreUnits, plan: Plan, stays: Container[Unit]) -> int:
    """Returns the host's memory that params take on their way to the device."""
    pieces = {piece for call in plan.calls for piece in call.reads}
    units = (store_units.unit(piece) for piece in pieces)
    sizes = [unit.page_bytes for unit in units if unit not in stays]
    return NUM_STAGED * max(sizes, default=PAGE_BYTES)


def reused_bytes(
    fetches: Sequence[Fetch], calls: Sequence[Call], store_units: StoreUnits
) -> int:
    """Bytes that calls of a step find in memory, because a call before used them."""
    used = sum(
        unit.num_bytes
        for call in calls
        for unit in {store_units.unit(piece) for piece in call.program.pieces}
    )
    return used - sum(fetch.unit.num_bytes for fetch in fetches)


def completions(calls: Sequence[Call], store_units: StoreUnits) -> Mapping[Unit, int]:
    return {
        store_units.unit(piece): number
        for number, call in enumerate(calls)
        for piece, _ in call.gradients
    }
