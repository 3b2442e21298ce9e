"""Decides how a step reads its params ahead, and which of them serve updates.

Invariant: the memory of params is what the plan leaves for them, on the host and on the
JAX device.
"""

from collections.abc import Callable
from typing import Any

from jaxinf.errors import StreamError
from jaxinf.stream.fetch import Fetcher, Source, fetches_of, page_bytes, window_bytes
from jaxinf.stream.handover import completions, hand_over, keep_between
from jaxinf.stream.memory import NUM_STAGED, Division
from jaxinf.stream.places import Places, Unit
from jaxinf.stream.plan import Plan
from jaxinf.stream.windows import DeviceWindow, HostWindow

__all__ = ["make_fetcher"]


def make_fetcher(
    source: Source,
    plan: Plan,
    places: Places,
    division: Division,
    device: Any,
    can_take: Callable[[Unit], bool],
) -> Fetcher:
    """Makes the fetcher of a plan.

    Args:
      source: The source of units.
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
    if not is_staged:
        return Fetcher(source, fetches, HostWindow(room))
    window = DeviceWindow(device, room, division.staged - largest)
    return Fetcher(source, fetches, window)
