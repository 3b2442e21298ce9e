"""Divides the values that leave a device with memory of its own: host, or drives.

    host's memory    values that stay: those that are needed soonest
                     values on their way to drives, in turns
                     values that are read ahead, as far as the others leave room

Invariant: the host's memory is as planned at every call, however fast the drives are.
What stays on the host never reaches a drive.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxinf.errors import BudgetError
from jaxinf.io.pages import page_ceil, page_floor
from jaxinf.schedule.occupancy import Stay, occupancy
from jaxinf.schedule.packer import evict
from jaxinf.streaming.plan.calls import Calls, Slot
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.offload import fitted

__all__ = [
    "NUM_COPIES",
    "Tiers",
    "beside_values",
    "check_leaving",
    "check_tiers",
    "plan_tiers",
]

NUM_COPIES = 2
"""Times that a value is on the host on its way to a drive, or back: pinned for the
device, and pageable for the drive. JAX may read pinned memory in place, or copy it."""

# Of the memory beyond the least, so much at most is for what is on its way: a value may
# be copied while the one before it is written.
_WAY_SHARE = 4


@dataclass(frozen=True)
class Tiers:
    """Where values wait that are not on the device.

    Attributes:
      on_drive: Values that go on to drives, in the order in which they are needed.
      least_bytes: The least memory of the host for them.
      host_bytes: Memory of the host for all values; 0 if it is not enough.
      leaving_bytes: The part for values on their way to drives.
      room: Before each call, bytes for values that are read ahead.
    """

    on_drive: tuple[Slot, ...]
    least_bytes: int
    host_bytes: int
    leaving_bytes: int = 0
    room: Sequence[int] = ()

    @property
    def fits(self) -> bool:
        """Whether the host has room for what is on its way."""
        return self.host_bytes >= self.least_bytes

    @property
    def buffer_bytes(self) -> int:
        """The most bytes of values that are read ahead."""
        return max(self.room, default=0)


def plan_tiers(calls: Calls, host_bytes: int) -> Tiers:
    """Chooses the values that stay on the host, and divides its memory.

    While too many bytes wait, the value that is needed last goes to a drive (Belady's
    rule), as soon as it is made.

    Args:
      calls: The calls of a step, with absences.
      host_bytes: The most memory of the host for values.
    """
    stays = [
        Stay(one.written, one.needed, page_ceil(calls.lives[slot].num_bytes), slot)
        for slot, one in sorted(calls.absences.items())
    ]
    waiting = occupancy(len(calls.calls), stays)
    everything = int(waiting.max(initial=0))
    if everything <= host_bytes:
        return Tiers((), 0, everything)
    largest = max(stay.num_bytes for stay in stays)
    least = 2 * NUM_COPIES * largest
    if host_bytes < least:
        return Tiers((), min(least, everything), 0)
    more = min(largest, page_floor((host_bytes - least) // _WAY_SHARE))
    leaving, returning = NUM_COPIES * largest + more, NUM_COPIES * largest + more
    left = evict(waiting, stays, host_bytes - leaving - returning)
    waiting = occupancy(len(waiting), (stay for stay in stays if stay not in left))
    # One value at a time is pinned for its copy back.
    most = sum(stay.num_bytes for stay in left)
    room = [
        page_floor(min(most, host_bytes - leaving - (NUM_COPIES - 1) * largest - later))
        for later in np.maximum.accumulate(waiting[::-1])[::-1].tolist()
    ]
    on_drive = tuple(stay.tensor for stay in sorted(left, key=lambda stay: stay.stop))
    return Tiers(on_drive, least, host_bytes, leaving, [room[0], *room[:-1]])


def check_tiers(tiers: Tiers, host_bytes: int) -> None:
    """Refuses a host whose memory is too small for what is on its way.

    Raises:
      BudgetError: Names the bytes that are missing.
    """
    if not tiers.fits:
        raise BudgetError(
            "memory_bytes",
            f"it leaves {max(host_bytes, 0)} bytes of the host for values that leave "
            f"the device; expected {tiers.least_bytes}, for all of them or for "
            f"{2 * NUM_COPIES} x the largest, on its way to drives and back",
            tiers.least_bytes - host_bytes,
            ", or raise device_memory_bytes",
        )


def beside_values(division: Division, tiers: Tiers | None) -> Division:
    """Returns the memory without that of the host for values."""
    if tiers is None or not tiers.host_bytes:
        return division
    return division.without(tiers.host_bytes, "keeping values")


def check_leaving(
    every: Iterable[Calls],
    budget_bytes: int,
    memory: Callable[[Calls], Sequence[int]],
    host_bytes: int,
) -> None:
    """Refuses a host without room for values that have to leave the device.

    Args:
      every: Calls without absences; one of them has to fit.
      budget_bytes: Memory of the device.
      memory: Returns the memory during each call, such as `Calls.call_bytes`.
      host_bytes: The most memory of the host for values.

    Raises:
      BudgetError: As `check_tiers`.
    """
    found = None
    for calls in every:
        own = calls.lent()
        if max(memory(own), default=0) > budget_bytes:
            own = fitted(calls, budget_bytes, memory).lent()
        if max(memory(own), default=0) > budget_bytes:
            continue
        found = plan_tiers(own, host_bytes)
        if found.fits:
            return
    if found is not None:
        check_tiers(found, host_bytes)
