"""What a streamed step takes, before there is one.

Invariant: nothing is written, and params are never made.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import jax

from jaxinf.engine import StoreDescription
from jaxinf.errors import BudgetError
from jaxinf.io import ByteCounts
from jaxinf.layout import choose_grid
from jaxinf.program import UpdateProgram
from jaxinf.schedule.placement import Waiting
from jaxinf.schedule.steps import StepWork
from jaxinf.streaming.binding import fitting, planned
from jaxinf.streaming.bound import Ends
from jaxinf.streaming.budgets import planned_within
from jaxinf.streaming.fit import Fitted
from jaxinf.streaming.move.values import value_bytes
from jaxinf.streaming.move.workers import writing_bytes
from jaxinf.streaming.plan.calls import Order, Policy, may_leave
from jaxinf.streaming.plan.memory import NUM_STAGED, DeviceLimit, divide
from jaxinf.streaming.plan.plan import Plan, Prepared, prepare
from jaxinf.streaming.plan.tables import tables_in_rows
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.replanning import Replanner, offload_planned
from jaxinf.streaming.run import Executables, compiled_temp_bytes
from jaxinf.streaming.update.micro_batches import first_part
from jaxinf.streaming.update.optimizer import needed_whole
from jaxinf.streaming.work import Speeds, measured_s, num_operations, step_work
from jaxinf.terminal import exact_bytes, format_bytes, parse_bytes
from jaxinf.typing import PyTree

_MIB = 1 << 20
# Compiled programs take more than is estimated before: at most 1.5 times for streamed
# ones, and 2.4 times where one program does all, of GPT-2 nano in two sizes of batch.
_STREAMED, _WHOLE = 1.5, 2.5
_MOST_BYTES = 1 << 62


class Dry(NamedTuple):
    """What a dry run is of.

    Attributes:
      ready: The loss function, traced for the batch.
    """

    ready: Prepared
    ends: Ends
    store_bytes: int = 0
    is_there: bool = False
    update: UpdateProgram | None = None
    description: StoreDescription | None = None


class Known(NamedTuple):
    """What was traced before of the same loss function, params and optimizer.

    Attributes:
      ready: The loss function, which may be traced for other batches.
      update: The optimizer.
      description: Their store.
      ends: A params source and gradient sink, whose programs are used, too.
    """

    ready: Prepared | None = None
    update: UpdateProgram | None = None
    description: StoreDescription | None = None
    ends: Ends | None = None

    def over(self, other: "Known") -> "Known":
        """Returns what is known here, and else there."""
        return Known(
            self.ready or other.ready,
            self.update or other.update,
            self.description or other.description,
            self.ends or other.ends,
        )


@dataclass(frozen=True)
class DryRun:
    """What a step takes; as a string, a few lines of it.

    Attributes:
      plan: The plan; as a string, a table of its segments. Its `peak_bytes` and
        `resident_bytes` are of params, values and temporaries, as compiled. With
        ``policy="plan"`` it is that of the first steps.
      memory_bytes: The most memory of the host that a step takes.
      now_bytes: Bytes on drives now.
      disk_bytes: Bytes on drives at most: the store with both slots, and values and
        gradients that wait there.
      traffic: Bytes that a step moves on drives.
      commit_bytes: Bytes that a commit writes beside: with ``durability="checkpoint"``,
        of state that stays on the host.
      params_bytes: Params of these, which are read for programs.
    """

    plan: Plan
    memory_bytes: int
    now_bytes: int
    disk_bytes: int
    traffic: ByteCounts
    commit_bytes: int
    params_bytes: int
    _dry: Dry = field(repr=False)
    _planned: "_Planned" = field(repr=False)

    @property
    def used_bytes(self) -> int:
        """Memory of these that is in use at a step's peak; less if it is not needed."""
        return self._planned.used_bytes()

    @property
    def _known(self) -> Known:
        """What a step of the same need not trace again."""
        ready, ends, _, _, update, description = self._dry
        return Known(ready, update, description, ends)

    def _operations(self) -> Mapping[str, float]:
        """Operations of each program by its key, as counted before compilation."""
        return num_operations(self._planned.plan, self._dry.ready.keys)

    def _measured_s(self) -> Mapping[str, float]:
        """Runs each program some times; returns their times by key. Blocks."""
        return measured_s(self._planned.plan, self._dry.ends.setup.executables)

    def _on(self, speeds: Speeds) -> "DryRun":
        """Returns the dry run of the steps that a machine comes to.

        It is another one with ``policy="plan"`` alone.
        """
        replanner = self._planned.replanner
        if replanner is None:
            return self
        plan = self._planned.plan.chosen(replanner.chosen_by(speeds.profile))
        return _found(self._dry, replace(self._planned, plan=plan))

    def _work(self, speeds: Speeds) -> StepWork:
        """Returns what a step has to do, at the speeds of a machine."""
        planned = self._planned
        return step_work(planned.ends, planned.fitted, planned.plan, speeds)

    @cached_property
    def least(self) -> Mapping[str, int]:
        """The least budgets that work, in bytes by argument, up to 1/32 more.

        They are searched for when they are asked for: smaller programs are compiled,
        which may take minutes. None of them is larger than what the step has.
        """
        ready, ends, *_ = self._dry
        budgets = ends.setup.options.budgets
        smallest = dict.fromkeys(budgets, _MIB)
        try:
            planned_within(smallest, fitting(ends, ready))
        except BudgetError as error:
            works = {name: parse_bytes(text) for name, text in error.works.items()}
            found = {name: works.get(name, budgets[name]) for name in budgets}
            return {name: min(found[name], budgets[name]) for name in budgets}
        return smallest

    def __str__(self) -> str:
        read, written = self.traffic.drive_read_bytes, self.traffic.drive_write_bytes
        beside = f"; {format_bytes(self.commit_bytes)} more at a commit"
        return (
            f"memory  {exact_bytes(self.memory_bytes)} at most, "
            f"{format_bytes(self.plan.peak_bytes + self.plan.resident_bytes)} of "
            "programs and their params\n"
            f"disk    {format_bytes(self.now_bytes)} now, "
            f"{format_bytes(self.disk_bytes)} at most\n"
            f"drives  {format_bytes(read)} read and {format_bytes(written)} written a "
            f"step{beside if self.commit_bytes else ''}"
        )


def dry_run(dry: Dry, *, searches: bool = True) -> DryRun:
    """Plans a step and compiles its programs; blocks.

    Args:
      searches: Whether to look for a budget that works where one is too small.

    Raises:
      BudgetError: A budget is too small; names one that works.
    """
    ready, ends, fitted, _ = planned(dry.ends, dry.ready, searches=searches)
    options, executables = ends.setup.options, ends.setup.executables
    graph = ready.lifetimes.graph
    plan, replanner = offload_planned(fitted, graph, executables, options, ())
    if replanner is not None:
        replanner.close()
    return _found(dry, _Planned(ends, fitted, plan, replanner))


@dataclass(frozen=True)
class _Planned:
    """A step's plan with its graph, and what it was made of."""

    ends: Ends
    fitted: Fitted
    plan: Plan
    replanner: Replanner | None

    def used_bytes(self) -> int:
        (reading, division), plan = self.fitted.reading(self.plan), self.plan
        moves, spare = self.ends.moves(self.fitted, plan), division.programs
        spare = max(0, spare - plan.peak_bytes)
        read_bytes, device_bytes = reading.memory(division)
        unused = reading.room_bytes - read_bytes if device_bytes is None else 0
        beyond = max(0, read_bytes - (reading.room_bytes - spare))
        if device_bytes is not None:  # the device has the programs
            beyond = read_bytes - plan.peak_bytes - plan.resident_bytes
        state = sum(one.layout.num_bytes for _, one in moves.updates)
        ring = min(division.ring + unused, state)
        executables, waiting = self.ends.setup.executables, moves.waiting
        held_bytes = 0 if waiting is None else self._most_bytes(executables, waiting)
        most = max(plan.peak_bytes, held_bytes)
        return most + plan.resident_bytes + beyond + ring

    def _most_bytes(self, executables: Executables, waiting: Waiting) -> int:
        """Memory of programs at its most, gradients that wait for the last included."""
        calls = self.plan.calls
        used = calls.call_bytes(compiled_temp_bytes(self.plan, executables))
        most, held = 0, 0
        for call, num_bytes in zip(calls.calls, used, strict=True):
            most = max(most, held + num_bytes)
            held += sum(
                call.program.output_bytes[i]
                for piece, i in call.gradients
                if not {piece, Piece(piece.leaf)} & waiting.on_drive.keys()
            )
        return max(most, held)


def _found(dry: Dry, planned: _Planned) -> DryRun:
    ends, store_bytes = planned.ends, dry.store_bytes
    fitted, plan = planned.fitted, planned.plan
    values = value_bytes(plan, fitted.tiers(plan.calls))
    traffic, waiting_bytes, commit_bytes = ends.moved(fitted, plan, values)
    num_parts = ends.setup.options.num_runs
    return DryRun(
        plan.without_graph(),
        ends.setup.options.memory_bytes,
        store_bytes if dry.is_there else 0,
        store_bytes + waiting_bytes,
        traffic,
        commit_bytes,
        num_parts * ends.moves(fitted, plan).params_bytes,
        dry,
        planned,
    )


class LeastMemory:
    """The least memory of steps by estimates: nothing is compiled.

    Args:
      loss_fn: As for `jaxinf.stream`, without aux.
      params: Tree of arrays, or of shapes and dtypes.
      batch: As the loss function takes it.
      micro_batches: Number of parts of the batch.
      update: Returns the optimizer, traced, for steps that may have tables in blocks of
        rows; None for those that may not.

    Raises:
      StreamError: The loss function cannot be streamed.
    """

    def __init__(
        self,
        loss_fn: Callable[..., jax.Array],
        params: PyTree,
        batch: PyTree,
        micro_batches: int = 1,
        update: Callable[[], UpdateProgram] | None = None,
    ) -> None:
        self._ready = prepare(loss_fn, params, first_part(batch, micro_batches))
        self._micro_batches, self._update = micro_batches, update

    @property
    def known(self) -> Known:
        """What a step of the same need not trace again."""
        return Known(self._ready, None if self._update is None else self._update())

    @cached_property
    def whole_bytes(self) -> int:
        """Params, values and temporaries if the program runs as a whole."""
        cuts = 0, len(self._ready.lifetimes.forward)
        return int(_WHOLE * self._ready.plan_of(cuts, "keep").peak_bytes)

    def of(
        self,
        policy: Policy,
        order: Order = "parts",
        resident_bytes: int = 0,
        *,
        has_device: bool = False,
        num_drives: int = 1,
    ) -> tuple[int, int]:
        """Returns the least memory of the host, and of a device with its own, or 0.

        Args:
          policy: As for `jaxinf.stream`.
          order: The order in which segments run for parts.
          resident_bytes: Params that stay.
          has_device: Whether the JAX device has memory of its own.
          num_drives: Drives that values may wait on.
        """
        num_parts = self._micro_batches if order == "layers" else 1
        return min(
            self._least(
                replace(way, num_parts=num_parts),
                policy,
                resident_bytes,
                has_device,
                num_drives,
            )
            for way in self._ways
        )

    @cached_property
    def _ways(self) -> list[Prepared]:
        """The program, and if that may be, the same with tables in blocks of rows."""
        ready, update = self._ready, self._update
        if update is None:
            return [ready]

        def whole(leaves: frozenset[int]) -> Container[int]:
            return needed_whole(update(), leaves)

        grids = [choose_grid(one.shape) for one in ready.traced.params]
        rows = [next(iter(grid.chunk_shape), 1) for grid in grids]
        made = tables_in_rows(ready, rows.__getitem__, whole=whole)
        return [ready] if made is None else [ready, made]

    def _least(
        self,
        ready: Prepared,
        policy: Policy,
        resident_bytes: int,
        has_device: bool,
        num_drives: int,
    ) -> tuple[int, int]:
        smallest = ready.smallest_bytes(policy)
        programs = int(_STREAMED * smallest) + resident_bytes + ready.given_bytes
        sizes = ready.lifetimes.sizes
        gradient = max((sizes[piece] for piece in ready.gradient_pieces), default=0)
        limit = DeviceLimit(_MOST_BYTES, is_host=False) if has_device else DeviceLimit()
        leaves = may_leave(policy, ready.num_parts)
        beside = writing_bytes(num_drives) if leaves else 0
        needed = NUM_STAGED * gradient if has_device else programs

        def suffices(memory_bytes: int) -> bool:
            try:
                division = divide(memory_bytes, 0, gradient, limit)
            except BudgetError:
                return False
            host_bytes = division.staged if has_device else division.programs
            return host_bytes >= needed + beside

        least, most = 0, 1
        while not suffices(most * _MIB):
            least, most = most, 2 * most
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if suffices(middle * _MIB) else (middle, most)
        return most * _MIB, programs + gradient if has_device else 0
