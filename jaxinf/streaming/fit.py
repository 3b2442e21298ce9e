"""A program fitted to its memory: how it is cut, what stays, where values wait.

Invariant: what is fitted takes no more than the memory.
"""

import hashlib
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from jaxinf.schedule.placement import Tiers
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.offload import plan_tiers
from jaxinf.streaming.plan.reads import Reading
from jaxinf.streaming.plan.resident import ResidentUnits
from jaxinf.streaming.program.units import Unit
from jaxinf.typing import JsonValue

Reads: TypeAlias = Callable[[Plan, Division, Set[Unit]], Reading]
"""Returns the reads of a plan with given memory, beside units that stay."""


@dataclass(frozen=True)
class Fitted:
    """A plan that fits, and what follows from it.

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
        fetches = [
            (*fetch.unit.place, fetch.first, fetch.last)
            for fetch in self.reading.fetches
        ]
        text = repr((self.plan.traced.mesh, self.plan.cuts, units, fetches))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def tiers(self) -> Tiers | None:
        """Where values wait; None if the device's memory is the host's."""
        if not self.division.staged:
            return None
        return plan_tiers(self.plan, self.host_bytes)

    @cached_property
    def beside_values(self) -> Division:
        """The memory beside values that wait on the host."""
        if self.reads is None or self.tiers is None or not self.tiers.host_bytes:
            return self.division
        pool_bytes = self.division.pool_factor * self.tiers.host_bytes
        return self.division.without(pool_bytes, "keeping values")

    @cached_property
    def reading(self) -> Reading:
        """The reads of a run."""
        if self.reads is None:
            return Reading((), 0)
        return self.reads(self.plan, self.beside_values, self.units.units)
