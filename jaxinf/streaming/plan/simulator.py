"""The time of a step's calls, simulated from measured times and bandwidths.

Invariant: the simulation is that of `schedule.simulator`; here are only the numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxinf.schedule import simulator
from jaxinf.schedule.placement import NUM_COPIES, Tiers
from jaxinf.schedule.simulator import NO_LOADS, Away, Host, Loads
from jaxinf.streaming.plan.calls import Calls

__all__ = ["Profile", "simulate"]


@dataclass(frozen=True)
class Profile:
    """Measured times and bandwidths, those of drives beside a running step.

    Attributes:
      seconds: Time of a call by its program's key, beside transfers of values.
      alone: The same without such transfers; None if it is not known.
      num_parts: Number of times that the calls run in a step.
      write, read: Bandwidth for values that leave and come back, in bytes a second.
      params: Bandwidth for params.
      outside_s: Time of a step before its first call and after its last one.
      out, back: Bandwidth between host and device, if that has memory of its own.
    """

    seconds: Mapping[str, float]
    write: float
    read: float
    params: float = math.inf
    outside_s: float = 0.0
    alone: Mapping[str, float] | None = None
    num_parts: int = 1
    out: float = math.inf
    back: float = math.inf

    def seconds_of(self, calls: Calls) -> Mapping[str, float]:
        """Times of programs in given calls: some of their values leave, or none."""
        if calls.absences or self.alone is None:
            return self.seconds
        return self.alone


def simulate(
    calls: Calls,
    profile: Profile,
    loads: Loads = NO_LOADS,
    tiers: Tiers | None = None,
) -> float:
    """Returns the time of a step.

    Args:
      calls: The calls, with absences.
      profile: Measured times.
      loads: Params that are read for calls.
      tiers: Where values wait; None if the device's memory is the host's.
    """
    seconds = profile.seconds_of(calls)
    on_drive = calls.absences if tiers is None else frozenset(tiers.on_drive)
    away = []
    for slot, one in sorted(calls.absences.items(), key=lambda item: item[1].needed):
        num_bytes = calls.lives[slot].num_bytes
        stored_bytes = calls.stored_bytes(slot, one.needed)
        away.append(
            Away(
                one,
                calls.lives[slot].reads[-1],
                {
                    "out": num_bytes / profile.out,
                    "write": stored_bytes / profile.write,
                    "read": stored_bytes / profile.read,
                    "back": num_bytes / profile.back,
                },
                num_bytes,
                NUM_COPIES * num_bytes if tiers and slot in on_drive else 0,
                slot in on_drive,
            )
        )
    found_s = simulator.simulate(
        [seconds[call.program.key] for call in calls.calls],
        away,
        None if tiers is None else Host(tiers.leaving_bytes, tiers.room),
        loads if profile.params < math.inf else NO_LOADS,
        {"read": profile.params, "back": profile.back},
    )
    return profile.num_parts * found_s + profile.outside_s
