"""Fits a program to its memory: how it is cut, what stays, where values wait.

    ready + memory + residents + reads ─► fit ─► plan, what stays, what is left

A step of a store, a step in memory and a function differ in what they give: which
params may stay, and how the others are read.

Invariant: what is fitted takes no more than the memory; nothing is written.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from jaxinf.schedule.placement import Tiers
from jaxinf.schedule.simulator import Trips
from jaxinf.streaming.plan.calls import Calls, Policy
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.plan import Plan, Prepared
from jaxinf.streaming.plan.reads import Reading
from jaxinf.streaming.plan.resident import Residents, ResidentUnits, beside
from jaxinf.streaming.plan.saved import saved_plan
from jaxinf.streaming.plan.tiers import beside_values, check_leaving, plan_tiers
from jaxinf.streaming.program.units import Unit
from jaxinf.streaming.run import Executables, compiled_temp_bytes

__all__ = ["Fitted", "Reads", "fit", "no_reads"]

Reads: TypeAlias = Callable[[Plan, Division, Set[Unit]], Reading]
"""Returns the reads of a plan with given memory, beside units that stay."""


def no_reads(plan: Plan, division: Division, stays: Set[Unit]) -> Reading:
    """Returns the reads of params that are all in memory: none."""
    return Reading((), 0)


@dataclass(frozen=True)
class Fitted:
    """A plan that fits, and what follows from it whatever the order of its calls.

    Attributes:
      plan: The plan, without what stays.
      units: What stays.
      division: Memory, without that of what stays.
      host_bytes: Memory of the host for values that leave a device with memory of its
        own.
      reads: As for `fit`.
      is_saved: Whether the store has the plan already.
    """

    plan: Plan
    units: ResidentUnits
    division: Division
    host_bytes: int
    reads: Reads
    is_saved: bool

    def without_graph(self) -> "Fitted":
        """Returns the same for when the plan's programs are compiled."""
        return replace(self, plan=self.plan.without_graph())

    def tiers(self, calls: Calls) -> Tiers | None:
        """Where values wait; None if the device's memory is the host's."""
        return plan_tiers(calls, self.host_bytes) if self.division.staged else None

    def reading(self, plan: Plan) -> tuple[Reading, Division]:
        """The reads of a run, and the memory beside its values."""
        if self.reads is no_reads:  # values may take all that there is
            return no_reads(plan, self.division, self.units.units), self.division
        division = beside_values(self.division, self.tiers(plan.calls))
        return self.reads(plan, division, self.units.units), division

    def loads(self, calls: Calls, peak_bytes: int) -> Trips:
        """Returns the reads of a run, for its simulation."""
        plan = replace(self.plan, calls=calls, peak_bytes=peak_bytes)
        reading, division = self.reading(plan)
        return reading.trips(division)


def fit(
    ready: Prepared,
    policy: Policy,
    division: Division,
    residents: Residents,
    reads: Reads,
    executables: Executables,
    *,
    passing: Callable[[Plan, Set[Unit]], int] = lambda plan, stays: 0,
    saved_in: Path | None = None,
) -> Fitted:
    """Cuts a program to fit its memory, and compiles it; blocks.

    Args:
      ready: The program.
      policy: The treatment of values that backward needs.
      division: Memory.
      residents: What stays.
      reads: How other params are read.
      executables: As for `compile_plan`.
      passing: Returns the memory of the host that params take on their way to the
        device, if this has memory of its own.
      saved_in: A store that may have a plan.

    Raises:
      BudgetError: The memory does not suffice.
      StreamError: The saved plan is another program's.
    """
    budget_bytes, limit, plan = division.programs, division.limit, None
    measure = residents.peak_bytes
    if saved_in is not None:
        most = budget_bytes + division.spare
        plan = saved_plan(saved_in, ready, most, policy, measure, limit)
    if plan is not None:
        division = division.for_kept(plan.peak_bytes)
    is_saved = plan is not None
    plan = plan or ready.plan(budget_bytes, policy, measure, limit)
    plan, units = residents.applied(plan)
    division, host_bytes = beside(division, units), 0
    if division.staged:
        host_bytes = division.staged - passing(plan, units.units)
        if plan.is_offloaded:
            temps = compiled_temp_bytes(plan, executables)

            def memory(calls: Calls) -> Sequence[int]:
                return calls.call_bytes(temps)

            check_leaving(plan.ways, division.programs, memory, host_bytes)
        reads(plan, division, units.units)  # or it refuses
    return Fitted(plan, units, division, host_bytes, reads, is_saved)
