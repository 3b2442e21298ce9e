"""A step for batches of one shape: planned within its memory, and made ready to run.

    Ends ─ fitted ─► Fitted(plan, memory) ─ bind ─► Bound(params, runner, sink)

A step of a store, one in memory and a function differ in their `Ends` alone.

Invariant: what a bound step takes stays within the memory of the options. A refused
budget is refused with one that works.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from jaxinf.errors import BudgetError, StreamError
from jaxinf.io import ByteCounts, page_ceil
from jaxinf.streaming.move.mover import MoverCounts
from jaxinf.streaming.move.params import Params
from jaxinf.streaming.move.scratch import Scratch
from jaxinf.streaming.move.spill import Waiting
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.move.workers import writing_bytes
from jaxinf.streaming.options import Options
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.device import check_pinned
from jaxinf.streaming.plan.fit import Prepared
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.offload import (
    Tiers,
    check_leaving,
    check_tiers,
    plan_tiers,
)
from jaxinf.streaming.plan.reads import Reading
from jaxinf.streaming.plan.saved import saved_cuts, saved_plan
from jaxinf.streaming.run import (
    Runner,
    compiled_bytes,
    compiled_temp_bytes,
    offloaded,
)
from jaxinf.streaming.update.sink import Sink
from jaxinf.terminal import exact_bytes
from jaxinf.typing import JsonValue

_Plan = TypeVar("_Plan")

# Of what is added to a budget, so much at least goes where bytes are missing: buffers
# take at most three eighths. The last of three tries is generous.
_SHARES = 5 / 8, 5 / 8, 1 / 8


@dataclass(frozen=True)
class Fitted:
    """A plan that fits, and what follows from it.

    Attributes:
      division: The memory, without that of values that wait on the host.
      tiers: Where values wait; None if the device's memory is the host's.
      reading: The reads of params; none if all are in memory.
      is_saved: Whether this process keeps its cuts already.
    """

    plan: Plan
    division: Division
    tiers: Tiers | None
    reading: Reading
    is_saved: bool


class Ends(ABC):
    """Where params of batches of one shape come from, and where gradients go.

    Attributes:
      num_drives: Number of drives that values may wait on.
      saved_in: The store that may keep cuts; None if none is used.
      reads_params: Whether params are read from a store.
      held_bytes: Memory for what stays beside the programs.
    """

    num_drives = 1
    saved_in: Path | None = None
    reads_params = False
    held_bytes = 0

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def divided(self, ready: Prepared, budgets: Mapping[str, int]) -> Division:
        """Divides the memory of budgets, without that of values on their way.

        Raises:
          BudgetError: A budget does not suffice.
        """

    def staying(self, plan: Plan) -> Plan:
        """Returns the plan with the params that stay in memory."""
        return plan

    def passing_bytes(self, plan: Plan) -> int:
        """Memory of the host that params take on their way to a device with its own."""
        return 0

    def reading(self, plan: Plan, division: Division) -> Reading:
        """Plans the reads of params; raises BudgetError."""
        return Reading()

    def fitted(self, ready: Prepared, budgets: Mapping[str, int]) -> Fitted:
        """Divides the memory, and cuts the program to fit its part; compiles it.

        Nothing is written, and `ready` is not kept.

        Raises:
          BudgetError: A budget does not suffice.
          StreamError: The program cannot be cut, or the saved plan is another's.
        """
        group = self.options.together.group
        division, cuts, is_saved = self._agreed(ready, budgets)
        found: list[Fitted] = []

        def plan() -> JsonValue:
            found.append(self._fitted(ready, division, cuts, is_saved=is_saved))
            return None if group.is_alone else _digest(found[0])

        remedy = "give all the same options, and the same versions of packages"
        group.agree("the plan of a step", plan, remedy)
        return found[0]

    def _agreed(
        self, ready: Prepared, budgets: Mapping[str, int]
    ) -> tuple[Division, Sequence[int] | None, bool]:
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
        return division, kept.pop() if kept else None, read is not None

    def _fitted(
        self,
        ready: Prepared,
        division: Division,
        cuts: Sequence[int] | None,
        *,
        is_saved: bool,
    ) -> Fitted:
        self.check_held(division)
        policy, executables = self.options.policy, self.options.executables
        limit = division.limit

        def measure(plan: Plan) -> int:
            return self.held_bytes + compiled_bytes(self.staying(plan), executables)

        if cuts is None:
            plan = ready.plan(division.programs, policy, measure, limit)
        else:
            most = division.programs + division.spare
            plan = saved_plan(self.saved_in, ready, cuts, most, policy, measure, limit)
            programs = max(division.programs, plan.peak_bytes)  # with what is spare
            division = replace(division, programs=programs)
        division = replace(division, programs=division.programs - self.held_bytes)
        peak_bytes, host_bytes = plan.peak_bytes - self.held_bytes, division.staged
        plan = self.staying(plan).varied(peak_bytes=peak_bytes)
        if division.staged and plan.is_offloaded:
            host_bytes = (host_bytes - self.passing_bytes(plan)) // division.pool_factor
            temps = compiled_temp_bytes(plan, executables)
            check_leaving(plan, division.programs, temps, host_bytes)
        if plan.is_offloaded:
            plan = offloaded(plan, executables, division.programs)
        tiers = plan_tiers(plan, host_bytes) if division.staged else None
        if tiers is not None:
            check_tiers(tiers, host_bytes)
            if self.reads_params:
                pool_bytes = division.pool_factor * tiers.host_bytes
                division = division.without(pool_bytes, "keeping values")
        return Fitted(plan, division, tiers, self.reading(plan, division), is_saved)

    def check_held(self, division: Division) -> None:
        """Refuses programs' memory without room for what is held between steps."""

    def scratch(self, content: str) -> Scratch:
        """Returns files on drives for what waits there; none by default."""
        return Scratch(())

    def save(self, ready: Prepared, plan: Plan) -> None:
        """Saves a new plan's cuts, if bits have to last longer than this process."""

    def waiting(self, fitted: Fitted) -> Waiting | None:
        """Returns the gradients that wait for the last one; None if none does."""
        return None

    def waiting_bytes(self, fitted: Fitted) -> int:
        """Returns the bytes of values and gradients that wait on drives, at most."""
        plan, tiers = fitted.plan, fitted.tiers
        slots = plan.evictions if tiers is None else tiers.on_drive
        return sum(page_ceil(plan.lives[slot].num_bytes) for slot in slots)

    def traffic(self, fitted: Fitted) -> ByteCounts:
        """Returns the bytes that a step moves on drives: its values, by default."""
        waits = self.waiting_bytes(fitted)
        return ByteCounts(drive_read_bytes=waits, drive_write_bytes=waits)

    @abstractmethod
    def sink(self, fitted: Fitted) -> Sink:
        """Makes what takes gradients; takes room on drives."""

    @abstractmethod
    def source(self, fitted: Fitted) -> Params:
        """Makes what gives params."""

    def reused_bytes(self, fitted: Fitted) -> int:
        """Bytes of params that calls find in memory, as a call before used them."""
        return 0


def _digest(fitted: Fitted) -> str:
    """What processes that run its programs together must have in common."""
    plan = fitted.plan
    fetches = [(*x.unit.place, x.first, x.last) for x in fitted.reading.fetches]
    text = repr((plan.traced.mesh, plan.cuts, fetches))
    return hashlib.sha256(text.encode()).hexdigest()


def within(options: Options, plan: Callable[[Mapping[str, int]], _Plan]) -> _Plan:
    """Returns what `plan` makes of the budgets.

    Raises:
      BudgetError: A budget is too small; names one with which `plan` works, unless
        several processes plan, which do so once.
    """
    try:
        return plan(options.budgets)
    except BudgetError as error:
        if not options.together.group.is_alone:
            raise
        raise _advised(error, options.budgets, plan) from None


def _advised(
    error: BudgetError,
    budgets: Mapping[str, int],
    plan: Callable[[Mapping[str, int]], object],
) -> BudgetError:
    """Returns the refusal with budgets that work; blocks while it plans."""
    tried, last = dict(budgets), error
    for share in _SHARES:
        if last.limit not in tried:
            break
        more = max(1, int(last.missing_bytes / share))
        tried[last.limit] = _rounded(tried[last.limit] + more)
        try:
            plan(tried)
        except BudgetError as other:
            last = other
            continue
        raised = {name: n for name, n in tried.items() if n != budgets[name]}
        return error._advising({name: exact_bytes(n) for name, n in raised.items()})
    return error


def _rounded(num_bytes: int) -> int:
    """Returns whole MiB that are easily read: at most 1/32 more."""
    unit = max(1 << 20, 1 << max(0, num_bytes.bit_length() - 6))
    return -(-num_bytes // unit) * unit


@dataclass(frozen=True)
class Bound:
    """Programs for batches of one shape, and what they run with."""

    ends: Ends
    fitted: Fitted
    runner: Runner
    params: Params
    sink: Sink

    @property
    def store_bytes(self) -> int:
        """Memory for the store's buffers."""
        return self.fitted.division.ring + self.fitted.reading.unused_bytes

    def begin(self) -> None:
        self.params.counts = MoverCounts()
        self.runner.values.counts()

    def close(self) -> None:
        """Frees memory and files; idempotent."""
        self.runner.values.close()
        self.params.close()
        self.sink.close()


def bind(ends: Ends, ready: Prepared) -> Bound:
    """Plans, compiles and divides the memory; blocks.

    What one process is refused, by its device or its drive, all are: none goes on to a
    step, where it would wait for the others.

    Raises:
      StreamError: The program cannot be cut to fit, or the saved plan is another's.
      ProcessError: Another process is refused.
    """
    fitted = within(ends.options, partial(ends.fitted, ready))
    with ExitStack() as undone:
        made = ends.options.together.group.in_all(
            "the room for a step", lambda: _made(ends, ready, fitted, undone)
        )
        undone.pop_all()
    return made


def _made(ends: Ends, ready: Prepared, fitted: Fitted, undone: ExitStack) -> Bound:
    """Saves a new plan, and takes the room of its step, which `undone` frees."""
    if not fitted.is_saved:
        ends.save(ready, fitted.plan)
    sink = ends.sink(fitted)
    undone.callback(sink.close)
    values, plan = Values(), fitted.plan
    if plan.is_offloaded:
        values = Values(plan, ends.scratch("activations"), fitted.tiers)
    undone.callback(values.close)
    runner = Runner(plan, ends.options.executables, values)
    fitted = replace(fitted, plan=runner.plan)
    params = ends.source(fitted)
    undone.callback(params.close)
    return Bound(ends, fitted, runner, params, sink)
