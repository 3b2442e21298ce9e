"""A step bound to batches of one shape: params source, calls, gradient sink.

    Ends ─ fitted ─► Fitted(plan, memory) ─ bind ─► Bound(params, runner, sink)

A step of a store, one in memory and a function differ in their `Ends` alone.

Invariant: what a bound step takes stays within the memory of the options.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from jaxinf.errors import StreamError
from jaxinf.io import ByteCounts, ByteMeters
from jaxinf.schedule.placement import Tiers, Waiting
from jaxinf.streaming.move.mover import MoverCounts
from jaxinf.streaming.move.params import Params
from jaxinf.streaming.move.scratch import Folders
from jaxinf.streaming.move.workers import writing_bytes
from jaxinf.streaming.options import Options
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.device import check_pinned
from jaxinf.streaming.plan.fit import Prepared
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.offload import check_leaving, plan_tiers
from jaxinf.streaming.plan.reads import Reading
from jaxinf.streaming.plan.resident import ResidentUnits
from jaxinf.streaming.plan.saved import saved_cuts, saved_plan
from jaxinf.streaming.program.units import Unit
from jaxinf.streaming.run import (
    Runner,
    compiled_bytes,
    compiled_temp_bytes,
    offloaded,
)
from jaxinf.streaming.update.sink import Sink
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


class Moved(NamedTuple):
    """Bytes that a step moves on drives.

    An optimizer that leaves state alone in some steps moves fewer in those. Of state
    that stays in a memory, what commits alone write is divided among their steps; with
    ``durability="checkpoint"``, where no one knows these, it does not count.

    Attributes:
      waiting_bytes: Values and gradients that wait there, at most.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    waiting_bytes: int = 0


class _Kept(NamedTuple):
    """The cuts of a plan that a store keeps, this process's or another's."""

    cuts: Sequence[int]
    is_own: bool


class Ends(ABC):
    """Where params of batches of one shape come from, and where gradients go."""

    reads: Reads | None = None
    num_drives = 1
    saved_in: Path | None = None

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def divided(self, ready: Prepared, budgets: Mapping[str, int]) -> Division:
        """Divides the memory of budgets, without that of values on their way.

        Raises:
          BudgetError: A budget does not suffice.
        """

    @abstractmethod
    def residents(
        self, ready: Prepared, division: Division, measure: Callable[[Plan], int]
    ) -> Callable[[Plan], ResidentUnits]:
        """Returns what chooses the params that stay beside a plan."""

    def passing_bytes(self, plan: Plan, stays: Set[Unit]) -> int:
        """Memory of the host that params take on their way to a device with its own."""
        return 0

    def fitted(self, ready: Prepared, budgets: Mapping[str, int]) -> Fitted:
        """Divides the memory, and cuts the program to fit its part; compiles it.

        Nothing is written, and `ready` is not kept.

        Raises:
          BudgetError: A budget does not suffice.
          StreamError: The program cannot be cut, or the saved plan is another's.
        """
        division, kept = self._agreed(ready, budgets)
        found: list[Fitted] = []

        def plan() -> JsonValue:
            found.append(self._fitted(ready, division, kept))
            return None if self.options.together.group.is_alone else found[0].digest

        remedy = "give all the same options, and the same versions of packages"
        self.options.together.group.agree("the plan of a step", plan, remedy)
        return found[0]

    def _agreed(
        self, ready: Prepared, budgets: Mapping[str, int]
    ) -> tuple[Division, _Kept | None]:
        """Returns the memory that all processes have, and the cuts that one has kept.

        Raises:
          StreamError: They have kept others.
        """
        leaves, own = self.options.may_leave, list[Division]()
        read: Sequence[int] | None = None

        def divided() -> JsonValue:
            nonlocal read
            given = ready.given_bytes
            division = self.divided(ready, budgets).without(
                given, "holding its batch and constants", is_on_device=True
            )
            # A plan that was kept before these counted still fits.
            division = replace(division, spare=division.spare + given)
            pool_bytes = division.pool_bytes(with_values=leaves)
            check_pinned(self.options.device, pool_bytes)
            if leaves:
                division = division.without(
                    writing_bytes(self.num_drives), "writing its values to drives"
                )
            own.append(division)
            if self.saved_in is not None:
                read = saved_cuts(self.saved_in, ready)
            return [division.programs, division.staged, division.spare, read]

        told = self.options.together.group.gather("the memory of a step", divided)
        programs, staged, spare = (min(one[n] for one in told) for n in range(3))
        kept = {tuple(cuts) for *_, cuts in told if cuts is not None}
        if len(kept) > 1:
            raise StreamError(
                f"{self.saved_in}: expected one plan that all processes have kept, "
                f"found {len(kept)}; pass replan=True for another one (bits then "
                "differ from here on)"
            )
        division = replace(own[0], programs=programs, staged=staged, spare=spare)
        return division, _Kept(kept.pop(), is_own=read is not None) if kept else None

    def _fitted(
        self, ready: Prepared, division: Division, kept: _Kept | None
    ) -> Fitted:
        options, executables = self.options, self.options.executables
        programs_bytes = partial(compiled_bytes, executables=executables)
        residents = self.residents(ready, division, programs_bytes)

        def measure(plan: Plan) -> int:
            units = residents(plan)
            return units.all_bytes + programs_bytes(units.applied(plan))

        budget_bytes, limit, policy = division.programs, division.limit, options.policy
        if kept is None:
            plan = ready.plan(budget_bytes, policy, measure, limit)
        else:
            folder, most = self.saved_in, budget_bytes + division.spare
            plan = saved_plan(folder, ready, kept.cuts, most, policy, measure, limit)
            programs = max(division.programs, plan.peak_bytes)  # with what is spare
            division = replace(division, programs=programs)
        units = residents(plan)
        rest_bytes = plan.peak_bytes - units.all_bytes
        plan = units.applied(plan).varied(peak_bytes=rest_bytes)
        division, host_bytes = units.left(division), 0
        if division.staged:
            host_bytes = division.staged
            if plan.is_offloaded:
                host_bytes -= self.passing_bytes(plan, units.units)
                host_bytes //= division.pool_factor
                temps = compiled_temp_bytes(plan, executables)
                check_leaving(plan, division.programs, temps, host_bytes)
            if self.reads is not None:
                self.reads(plan, division, units.units)  # or it refuses
        if plan.is_offloaded:
            room_bytes = division.programs
            plan = offloaded(plan, executables, room_bytes)
        is_saved = kept is not None and kept.is_own
        return Fitted(plan, units, division, host_bytes, self.reads, is_saved)

    @property
    def folders(self) -> Folders:
        """A folder on each drive that values may wait on."""
        return ()

    @property
    def meters(self) -> ByteMeters | None:
        """Counters of the bytes on these drives."""
        return None

    def save(self, ready: Prepared, plan: Plan) -> None:
        """Saves a new plan's cuts, if bits have to last longer than this process."""

    def waiting(self, fitted: Fitted) -> Waiting | None:
        """Returns the gradients that wait for the last one; None if none does."""
        return None

    def moved(self, fitted: Fitted) -> Moved:
        """Returns the bytes that a step moves on drives; by default 0."""
        return Moved()

    @abstractmethod
    def sink(self, fitted: Fitted) -> Sink:
        """Makes what takes gradients; takes room on drives."""

    @abstractmethod
    def source(self, fitted: Fitted) -> tuple[Params, int]:
        """Makes what gives params, and returns the memory for a store's buffers."""

    def reused_bytes(self, fitted: Fitted) -> int:
        """Bytes of params that calls find in memory, as a call before used them."""
        return 0


@dataclass(frozen=True)
class Bound:
    """Programs for batches of one shape, and what they run with.

    Attributes:
      fitted: The plan and the memory that they were fitted to.
      store_bytes: Memory for the store's buffers.
    """

    ends: Ends
    fitted: Fitted
    runner: Runner
    params: Params
    sink: Sink
    store_bytes: int

    @property
    def traffic(self) -> ByteCounts:
        """Bytes that the plan moves on the drive in a step."""
        moved = self.ends.moved(self.fitted)
        return ByteCounts(
            drive_read_bytes=moved.read_bytes, drive_write_bytes=moved.written_bytes
        )

    def begin(self) -> None:
        self.params.counts = MoverCounts()
        self.runner.values.counts()

    def close(self) -> None:
        """Frees memory and files; idempotent."""
        self.runner.values.close()
        self.params.close()
        self.sink.close()
