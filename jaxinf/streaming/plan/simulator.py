"""The time of a step's calls, simulated from measured times and bandwidths.

Invariant: the simulation is that of `schedule.simulator`; here are only the numbers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxinf.schedule import simulator
from jaxinf.schedule.moves import Kind
from jaxinf.schedule.placement import NUM_COPIES, Eviction, Tiers, Waiting
from jaxinf.schedule.simulator import Trip, Trips
from jaxinf.streaming.plan.calls import Calls
from jaxinf.streaming.program.graph import Piece


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
        if calls.evictions or self.alone is None:
            return self.seconds
        return self.alone

    def call_s(self, calls: Calls) -> Sequence[float]:
        """Times of the calls, in order."""
        seconds = self.seconds_of(calls)
        return [seconds[call.program.key] for call in calls.calls]


def simulate(
    calls: Calls,
    profile: Profile,
    loads: Trips | None = None,
    tiers: Tiers | None = None,
    waiting: Waiting | None = None,
) -> float:
    """Returns the time of a step.

    Args:
      loads: Params that are read for calls; None if all are in memory.
      tiers: Where values wait; None if the device's memory is the host's.
      waiting: Gradients that wait for the last one; None if none does.
    """
    moved = [*moved_beside(calls, profile, loads, tiers)]
    if waiting is not None and waiting.on_drive:
        moved.append(moved_gradients(calls, profile, waiting))
    found_s = simulator.simulate(profile.call_s(calls), *moved)
    return profile.num_parts * found_s + profile.outside_s


def moved_beside(
    calls: Calls, profile: Profile, loads: Trips | None, tiers: Tiers | None
) -> Iterator[Trips]:
    """Yields what moves beside each run of the calls; arguments as `simulate`."""
    yield _values(calls, profile, tiers)
    if loads is not None and profile.params < math.inf:
        rates: dict[Kind, float] = {"read": profile.params, "back": profile.back}
        yield loads._replace(rates=rates)


def _values(calls: Calls, profile: Profile, tiers: Tiers | None) -> Trips:
    on_drive = calls.evictions if tiers is None else frozenset(tiers.on_drive)
    trips = []
    for slot, one in sorted(calls.evictions.items(), key=lambda item: item[1].needed):
        num_bytes = calls.lives[slot].num_bytes
        trip = Trip(
            one.needed,
            calls.lives[slot].reads[-1],
            num_bytes,
            calls.stored_bytes(slot, one.needed),
            host_bytes=num_bytes,
            way_bytes=NUM_COPIES * num_bytes if tiers and slot in on_drive else 0,
            eviction=one,
            is_on_drive=slot in on_drive,
        )
        trips.append(trip)
    rates: dict[Kind, float] = {"write": profile.write, "read": profile.read}
    if tiers is None:
        return Trips(trips, rates)
    rates |= {"out": profile.out, "back": profile.back}
    way_bytes = tiers.leaving_bytes
    return Trips(trips, rates, has_link=True, way_bytes=way_bytes, room=tiers.room)


def moved_gradients(calls: Calls, profile: Profile, waiting: Waiting) -> Trips:
    """Returns those that are written as they come, and read after the last call."""
    made = {
        key: number
        for number, call in enumerate(calls.calls)
        for piece, _ in call.gradients
        for key in (piece, Piece(piece.leaf))
        if key in waiting.on_drive
    }
    end = len(calls.calls)
    trips = [
        Trip(end, end, 0, num_bytes, eviction=Eviction(made[key], end, end, end))
        for key, num_bytes in waiting.on_drive.items()
    ]
    # Only the last part of a batch hands them out.
    write, read = (rate * profile.num_parts for rate in (profile.write, profile.read))
    return Trips(trips, {"write": write, "read": read / waiting.num_reads})
