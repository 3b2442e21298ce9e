"""A program fitted to its memory: how it is cut, what stays, where values wait.

Invariant: what is fitted takes no more than the memory.
"""

import hashlib
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import TypeAlias

from jaxinf.schedule.placement import Tiers
from jaxinf.schedule.simulator import Trips
from jaxinf.streaming.plan.calls import Calls
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.offload import plan_tiers
from jaxinf.streaming.plan.plan import Plan
from jaxinf.streaming.plan.reads import Reading
from jaxinf.streaming.plan.resident import ResidentUnits
from jaxinf.streaming.program.units import Unit
from jaxinf.typing import JsonValue

Reads: TypeAlias = Callable[[Plan, Division, Set[Unit]], Reading]
"""Returns the reads of a plan with given memory, beside units that stay."""


@dataclass(frozen=True)
class Fitted:
    """A plan that fits, and what follows from it whatever the order of its calls.

    Attributes:
      host_bytes: Memory of the host for values that leave a device with memory of its
        own, without what a pool takes beside it.
      reads: Returns the reads of params; None if all are in memory.
    """

    plan: Plan
    units: ResidentUnits
    division: Division
    host_bytes: int
    reads: Reads | None
    is_saved: bool

    @property
    def digest(self) -> JsonValue:
        """What processes that run its programs together must have in common."""
        units = sorted(unit.place for unit in self.units.units)
        reading, _ = self.reading(self.plan)
        fetches = [
            (*fetch.unit.place, fetch.first, fetch.last) for fetch in reading.fetches
        ]
        text = repr((self.plan.traced.mesh, self.plan.cuts, units, fetches))
        return hashlib.sha256(text.encode()).hexdigest()

    def without_graph(self) -> "Fitted":
        """Returns the same for when the plan's programs are compiled."""
        return replace(self, plan=self.plan.without_graph())

    def tiers(self, calls: Calls) -> Tiers | None:
        """Where values wait; None if the device's memory is the host's."""
        return plan_tiers(calls, self.host_bytes) if self.division.staged else None

    def reading(self, plan: Plan) -> tuple[Reading, Division]:
        """The reads of a run, and the memory beside its values."""
        if self.reads is None:  # values may take all that there is
            return Reading((), 0), self.division
        division, tiers = self.division, self.tiers(plan.calls)
        if tiers is not None and tiers.host_bytes:
            pool_bytes = division.pool_factor * tiers.host_bytes
            division = division.without(pool_bytes, "keeping values")
        return self.reads(plan, division, self.units.units), division

    def loads(self, calls: Calls, peak_bytes: int) -> Trips:
        plan = replace(self.plan, calls=calls, peak_bytes=peak_bytes)
        reading, division = self.reading(plan)
        return reading.trips(division)
