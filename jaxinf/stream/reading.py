"""Decides how a step reads its params ahead, and which of them serve updates.

Invariant: the memory of params is what the plan leaves for them, on the host and on the
JAX device.
"""

from bisect import bisect_right
from collections.abc import Callable, Container
from itertools import accumulate
from typing import Any, NamedTuple

from jaxinf.errors import BudgetError
from jaxinf.io.pages import PAGE_BYTES
from jaxinf.stream.fetch import Fetch, fetches_of, page_bytes, window_bytes
from jaxinf.stream.handover import completions, hand_over, keep_between
from jaxinf.stream.memory import NUM_STAGED, Division
from jaxinf.stream.places import Places, Unit
from jaxinf.stream.plan import Plan
from jaxinf.stream.windows import DeviceWindow, HostWindow, Window

__all__ = ["Reading", "host_bytes", "make_window", "planned_fetches"]


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


def host_bytes(
    plan: Plan, places: Places, division: Division, stays: Container[Unit]
) -> int:
    """Returns the host's memory that params on their way to the device do not take.

    Arguments as for `planned_fetches`. 0 if the device's memory is the host's.
    """
    if not division.staged:
        return 0
    pieces = {piece for call in plan.calls.calls for piece in call.pieces}
    units = (places.unit(piece) for piece in pieces)
    sizes = [page_bytes(unit) for unit in units if unit not in stays]
    return division.staged - NUM_STAGED * max(sizes, default=PAGE_BYTES)


def make_window(
    reading: Reading, division: Division, device: Any
) -> tuple[Window, int]:
    """Makes the window for reads; returns it and the memory that no param needs."""
    room = reading.room_bytes
    if division.staged:
        return DeviceWindow(device, room, division.staged - reading.largest_bytes), 0
    return HostWindow(reading.needed_bytes), room - reading.needed_bytes
