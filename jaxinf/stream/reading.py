"""Decides how a step reads its params ahead, and which of them serve updates.

Invariant: the memory of params is what the plan leaves for them, on the host and on the
JAX device.
"""

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

from jaxinf.errors import StreamError
from jaxinf.stream.fetch import Fetcher, Source, fetches_of, page_bytes, window_bytes
from jaxinf.stream.handover import completions, hand_over, keep_between
from jaxinf.stream.memory import NUM_STAGED, Division
from jaxinf.stream.places import Places, Unit
from jaxinf.stream.plan import Plan
from jaxinf.stream.windows import DeviceWindow, HostWindow

__all__ = ["Reading", "make_reading"]


class Reading(NamedTuple):
    """The reads of a plan.

    Attributes:
      fetcher: Reads ahead.
      unused_bytes: Memory of the programs that no param needs.
    """

    fetcher: Fetcher
    unused_bytes: int


def make_reading(
    make_source: Callable[[int], Source],
    plan: Plan,
    places: Places,
    division: Division,
    device: Any,
    can_take: Callable[[Unit], bool],
) -> Reading:
    """Makes the fetcher of a plan.

    Args:
      make_source: Makes the source of units, given the number of units that have room
        when a step begins.
      plan: The plan.
      places: The store's units.
      division: Memory.
      device: The JAX device.
      can_take: Whether the update of a unit can take params that were read for a
        program.

    Raises:
      StreamError: The host has no room for params on their way to the device.
    """
    calls = plan.calls.calls
    fetches = fetches_of(calls, places)
    spare = max(0, division.programs - plan.peak_bytes)
    room = window_bytes(fetches, len(calls)) + spare
    is_staged = division.staged > 0
    largest = max((page_bytes(fetch.unit) for fetch in fetches), default=0)
    # The rest is for reading ahead.
    fetches = keep_between(fetches, len(calls), room - spare // 2)
    limit = room - spare // 4
    if is_staged:
        limit = division.staged - NUM_STAGED * largest
        if limit < 0:
            raise StreamError(
                f"memory_bytes: it leaves {division.staged} bytes for params on their "
                f"way to the device, which take {NUM_STAGED} x {largest}; raise it"
            )
    fetches = hand_over(
        fetches,
        completions(calls, places),
        can_take,
        num_calls=len(calls),
        limit_bytes=limit,
        is_staged=is_staged,
    )
    sums = list(accumulate(page_bytes(fetch.unit) for fetch in fetches))
    source = make_source(bisect_right(sums, room))
    if is_staged:
        window = DeviceWindow(device, room, division.staged - largest)
        return Reading(Fetcher(source, fetches, window), 0)
    needed = min(room, max(sums, default=0))
    return Reading(Fetcher(source, fetches, HostWindow(needed)), room - needed)
