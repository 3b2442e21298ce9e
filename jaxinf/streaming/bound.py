"""Binds a streamed step to batches of one shape: its plan, its memory, its threads.

Invariant: what a bound step takes stays within the memory of the options.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import optax

from jaxinf.compress import TopK
from jaxinf.engine import Store, StoreShape
from jaxinf.io import ByteCounts
from jaxinf.program import (
    NonFinitePolicy,
    Passes,
    UpdateProgram,
    effect_of_nonfinite,
)
from jaxinf.store import plans_folder
from jaxinf.streaming.budgets import planned_within
from jaxinf.streaming.move.cache import writing_bytes
from jaxinf.streaming.move.fetch import FetchCounts, Fetcher
from jaxinf.streaming.move.params import Supply
from jaxinf.streaming.move.resident import Resident
from jaxinf.streaming.move.scratch import Scratch
from jaxinf.streaming.move.source import StoreSource, version_of
from jaxinf.streaming.move.spill import Spill
from jaxinf.streaming.move.values import Offloaded, Tiered, Values
from jaxinf.streaming.move.windows import Window, make_window
from jaxinf.streaming.plan.calls import Call, Calls, Policy
from jaxinf.streaming.plan.forms import Form
from jaxinf.streaming.plan.memory import (
    READER_BYTES,
    DeviceLimit,
    Division,
    device_limit,
    divide,
)
from jaxinf.streaming.plan.plan import Plan, Prepared
from jaxinf.streaming.plan.reads import (
    Fetch,
    Reading,
    host_bytes,
    planned_fetches,
    reused_bytes,
)
from jaxinf.streaming.plan.resident import Keep, Keeper, Keeping, beside
from jaxinf.streaming.plan.saved import keep_plan, kept_plan
from jaxinf.streaming.plan.search import Problem
from jaxinf.streaming.plan.sequence import Targets
from jaxinf.streaming.plan.tiers import (
    Tiers,
    beside_values,
    check_leaving,
    check_tiers,
    plan_tiers,
)
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.meshes import default_device
from jaxinf.streaming.program.units import Places, Unit
from jaxinf.streaming.replanning import Planned
from jaxinf.streaming.run import (
    CompiledMemory,
    Executables,
    Runner,
    compiled_bytes,
    compiled_temp_bytes,
)
from jaxinf.streaming.update.compressing import Compressor
from jaxinf.streaming.update.deferred import Deferred
from jaxinf.streaming.update.micro_batches import Accumulation, sum_bytes
from jaxinf.streaming.update.optimizer import passes_for, trace_optimizer
from jaxinf.streaming.update.passes import PassRunner
from jaxinf.streaming.update.store_sink import Updates
from jaxinf.streaming.update.traffic import (
    Waiting,
    is_parted,
    planned_traffic,
    reads_params,
    spilled_bytes,
)
from jaxinf.typing import PyTree

__all__ = ["Binder", "Bound", "Options"]


@dataclass(frozen=True)
class Options:
    """Options of `jaxinf.stream` that a step keeps."""

    memory_bytes: int
    device_memory_bytes: int | None
    has_aux: bool
    policy: Policy
    replan: bool
    nonfinite: NonFinitePolicy | None
    keep: Keep = None
    micro_batches: int = 1
    compress: TopK | None = None
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    activations: Form | None = None
    endurance_tbw: float | None = None

    @property
    def limits(self) -> Mapping[str, int]:
        """The budgets that are given, by argument."""
        limits = {"memory_bytes": self.memory_bytes}
        if self.device_memory_bytes is not None:
            limits["device_memory_bytes"] = self.device_memory_bytes
        return limits


@dataclass(frozen=True)
class Bound:
    """The plan and runner for batches of one shape.

    Attributes:
      runner: Runs the plan.
      supply: Params.
      updates: Updates them.
      sums: Adds up gradients of the parts of a batch.
      reused_bytes: See `jaxinf.streaming.move.fetch.reused_bytes`.
      traffic: Of a step, on the drive.
      store_bytes: Memory for the store's buffers.
      frame: What does not depend on the order of the calls.
      planned: With `"plan"`, what plans the step.
    """

    runner: Runner
    supply: Supply
    updates: Updates
    sums: Accumulation
    reused_bytes: int
    traffic: ByteCounts
    store_bytes: int
    frame: "_Frame"
    planned: Planned | None

    def begin(self) -> None:
        """Begins to measure a step."""
        self.supply.counts = FetchCounts()
        self.runner.values.counts()
        if self.planned is not None:
            self.planned.begin()

    def close(self) -> None:
        """Frees memory and files; idempotent."""
        self.close_calls()
        self.sums.close()
        self.updates.close()
        if self.planned is not None:
            self.planned.close()

    def close_calls(self) -> None:
        """Frees what depends on the order of the calls; idempotent."""
        self.runner.values.close()
        self.supply.close()


@dataclass(frozen=True)
class _Basis:
    """What is planned, whatever the memory.

    Attributes:
      ready: The loss function.
      shape: The store's chunks.
      numbers_bytes: Memory of the device for numbers of gradients.
      gathered_bytes: Memory of the host to gather shards.
    """

    ready: Prepared
    shape: StoreShape
    program: UpdateProgram
    passes: Passes
    numbers: PassRunner
    places: Places
    units: Set[Unit]
    compressor: Compressor
    takers: "_Takers"
    numbers_bytes: int
    gathered_bytes: int


class _Fitted(NamedTuple):
    """A plan that fits.

    Attributes:
      plan: The plan, without what stays.
      keeping: What stays.
      division: Memory, without that of what stays.
      is_kept: Whether the store has the plan already.
    """

    plan: Plan
    keeping: Keeping
    division: Division
    is_kept: bool


@dataclass(frozen=True)
class _Frame:
    """What runs a step and does not depend on the order of its calls.

    Attributes:
      division: Memory, without that of params that stay.
      gradient_bytes, sum_bytes: Bytes of each gradient, and of its sum over parts of a
        batch.
      host_bytes: Memory of the host for values that leave a device with memory of its
        own: what is not for params on their way there.
    """

    program: UpdateProgram
    passes: Passes
    numbers: PassRunner
    places: Places
    units: Set[Unit]
    compressor: Compressor
    division: Division
    deferred: Deferred | None
    takers: "_Takers"
    keeping: Keeping
    sums: Accumulation
    gradient_bytes: Mapping[Piece, int]
    sum_bytes: Mapping[Piece, int]
    host_bytes: int

    @property
    def spilled(self) -> int:
        """Memory for gradients that wait for the last one."""
        return 0 if self.deferred is None else self.deferred.spill.capacity_bytes

    @cached_property
    def gives(self) -> frozenset[Unit]:
        """Units that stay, and that updates can take."""
        return frozenset(filter(self.takers.from_memory, self.keeping.units))


class Binder:
    """Binds steps of one store.

    Args:
      store: The store; its training is bound to the optimizer.
      tx: The optimizer.
      options: Memory, policy and so on.
    """

    def __init__(
        self,
        store: Store,
        tx: optax.GradientTransformationExtraArgs,
        options: Options,
    ) -> None:
        self._store = store
        self._tx = tx
        self._options = options
        self._executables: Executables = {}

    @cached_property
    def device(self) -> Any:
        """The JAX device that programs run on; on a mesh, one like all of them."""
        return default_device()

    @cached_property
    def device_limit(self) -> DeviceLimit:
        """The limit of the JAX device's memory."""
        return device_limit(self.device, self._options.device_memory_bytes)

    @cached_property
    def resident(self) -> Resident:
        """Params that stay between steps; those of all shapes of batches."""
        return Resident(self.device, is_host=self.device_limit.is_host)

    def bind(self, ready: Prepared, params: PyTree) -> Bound:
        """Plans, compiles and divides the memory; blocks.

        Args:
          ready: The loss function, traced for the batch.
          params: Abstract values of the params.

        Raises:
          StreamError: The program cannot be cut to fit, or the kept plan is another's.
        """
        basis = self._basis(ready, params, self._store.training.opened)
        fitted = planned_within(self._options.limits, partial(self._fitted, basis))
        if not fitted.is_kept:
            keep_plan(self._store.path, ready, fitted.plan)
        frame, plan = self._frame(basis, fitted), fitted.plan
        if not plan.is_offloaded:
            return self._bound(frame, plan)
        memory = CompiledMemory(
            plan,
            self._executables,
            frame.division.programs,
            self._options.activations,
        )
        if self._options.policy == "offload":
            return self._bound(frame, memory.fitted())
        problem = self._problem(ready.lifetimes.graph, frame, plan, memory)
        planned = Planned(plan, problem, self._options.micro_batches, self._drives())
        return self._bound(frame, planned.plan, planned)

    def rebind(self, bound: Bound) -> Bound:
        """Returns the same bound to what its planner has chosen; closes the old one.

        No step may be under way, nor its commit.
        """
        assert bound.planned is not None, "only a planned step changes"
        bound.close_calls()
        found = self._bound(bound.frame, bound.planned.plan, bound.planned)
        bound.planned.is_changed = False
        return found

    def _problem(
        self, targets: Targets, frame: "_Frame", plan: Plan, memory: CompiledMemory
    ) -> Problem:
        """What there is to choose for a plan with these programs."""

        def fetched(calls: Calls, peak_bytes: int) -> Mapping[int, int]:
            found: dict[int, int] = {}
            for fetch in self._reading(
                frame, replace(plan, calls=calls, peak_bytes=peak_bytes)
            ).fetches:
                size = fetch.unit.num_bytes
                found[fetch.first] = found.get(fetch.first, 0) + size
            return found

        return Problem(
            targets,
            plan.programs,
            frame.division.programs,
            memory.call_bytes,
            frame.keeping.pieces,
            memory.admits,
            fetched,
            self._options.activations,
            partial(_tiers, frame),
        )

    def _reading(self, frame: "_Frame", plan: Plan) -> Reading:
        return planned_fetches(
            plan,
            frame.places,
            beside_values(frame.division, _tiers(frame, plan.calls)),
            frame.takers.from_read,
            frame.keeping.units,
        )

    def check(
        self, ready: Prepared, params: PyTree, shape: StoreShape
    ) -> Callable[[Mapping[str, int]], object]:
        """Returns what plans for a store that need not be there, and writes nothing.

        Args:
          ready, params: As for `bind`.
          shape: The store's chunks.
        """
        return partial(self._fitted, self._basis(ready, params, shape))

    def _basis(self, ready: Prepared, params: PyTree, shape: StoreShape) -> _Basis:
        training, options = self._store.training, self._options
        shapes = [leaf.shape for leaf in ready.traced.params]
        program = trace_optimizer(self._tx, params, options.extra_args)
        passes = passes_for(program, ready.gradient_pieces)
        places = self._places(ready, passes, shape)
        numbers = PassRunner(training, program, passes)
        units = {places.unit(piece) for piece in ready.gradient_pieces}
        compressor = Compressor(training, options.compress, shape)
        arrivals = _arrivals(ready.gradient_pieces, shapes, passes.whole)
        return _Basis(
            ready,
            shape,
            program,
            passes,
            numbers,
            places,
            units,
            compressor,
            _Takers(shape, program, passes, is_deferred=self._is_deferred(passes)),
            max(numbers.compile(arrivals), compressor.compile(units)),
            self._gathered_bytes(ready, places, passes),
        )

    def _fitted(self, basis: _Basis, limits: Mapping[str, int]) -> _Fitted:
        """Divides the memory, then cuts the program to fit its part; writes nothing."""
        options, places = self._options, basis.places
        division = self._division(basis, limits).without(
            basis.numbers_bytes, "computing numbers of its gradients", is_on_device=True
        )
        division = division.without(
            basis.gathered_bytes,
            "moving shards of params that are not stored alone",
        )
        if options.policy in ("offload", "plan"):
            num_drives = max(1, basis.shape.directory.num_csds)
            division = division.without(
                writing_bytes(num_drives), "writing its values to drives"
            )
        keeper = self._keeper(places, basis.units, division, basis.takers)
        plan = self._kept(basis.ready, division, keeper.peak_bytes)
        is_kept = plan is not None
        plan = plan or basis.ready.plan(
            division.programs, options.policy, keeper.peak_bytes, division.limit
        )
        plan, keeping = keeper.applied(plan)
        division = beside(division, keeping)
        if division.staged:
            self._check_staged(basis, plan, keeping, division)
        return _Fitted(plan, keeping, division, is_kept)

    def _check_staged(
        self, basis: _Basis, plan: Plan, keeping: Keeping, division: Division
    ) -> None:
        """Refuses a host without room for what is on its way to or from the device."""
        if plan.is_offloaded:
            temps = compiled_temp_bytes(plan, self._executables)
            check_leaving(
                plan.ways,
                division.programs,
                lambda calls: calls.call_bytes(temps),
                host_bytes(plan, basis.places, division, keeping.units),
            )
        planned_fetches(
            plan, basis.places, division, basis.takers.from_read, keeping.units
        )

    def _frame(self, basis: _Basis, fitted: _Fitted) -> "_Frame":
        ready, places = basis.ready, basis.places
        division, keeping = fitted.division, fitted.keeping
        avals = {p: v.aval for p, v in ready.lifetimes.graph.gradients.items()}
        return _Frame(
            basis.program,
            basis.passes,
            basis.numbers,
            places,
            basis.units,
            basis.compressor,
            division,
            self._deferred(basis.program, basis.passes, division),
            basis.takers,
            keeping,
            self._sums(division),
            {piece: ready.lifetimes.sizes[piece] for piece in avals},
            {piece: sum_bytes(aval) for piece, aval in avals.items()},
            host_bytes(fitted.plan, places, division, keeping.units),
        )

    def _keeper(
        self, places: Places, units: Set[Unit], division: Division, takers: "_Takers"
    ) -> Keeper:
        return Keeper(
            self._options.keep,
            places,
            units,
            division,
            lambda plan, part: (
                planned_fetches(plan, places, part, takers.from_read).fetches
            ),
            takers.reads,
            partial(compiled_bytes, executables=self._executables),
        )

    def _places(self, ready: Prepared, passes: Passes, shape: StoreShape) -> Places:
        params = ready.traced.params

        def can_move(leaf: int, origin: Sequence[int], extent: Sequence[int]) -> bool:
            return leaf not in passes.whole and shape.can_move(leaf, origin, extent)

        return Places(
            params,
            can_move,
            range(len(params)) if self._options.compress else passes.computed,
        )

    def _gathered_bytes(self, ready: Prepared, places: Places, passes: Passes) -> int:
        """Memory to gather shards: one unit that is read, and one that is updated."""
        units = {places.unit(piece) for piece in ready.lifetimes.sizes}
        rewrites = self._store.training.options.rewrites_steps
        waits = passes.num_passes > 1 or rewrites or self._options.micro_batches > 1
        apart = [unit for unit in units if len(unit.shards) > 1]
        undivided = [unit.num_bytes for unit in apart if not unit.is_divided]
        updated = [unit.num_bytes for unit in apart] if waits else undivided
        return max(undivided, default=0) + 2 * max(updated, default=0)

    def _division(self, basis: _Basis, limits: Mapping[str, int]) -> Division:
        device = self.device_limit
        if "device_memory_bytes" in limits:
            device = replace(device, num_bytes=limits["device_memory_bytes"])
        return divide(
            limits["memory_bytes"],
            basis.shape.least_memory_bytes,
            max((unit.num_bytes for unit in basis.units), default=0),
            device,
        )

    def _bound(
        self, frame: "_Frame", plan: Plan, planned: Planned | None = None
    ) -> Bound:
        """Makes what runs a plan's calls, from what does not depend on them."""
        training, options = self._store.training, self._options
        tiers = _tiers(frame, plan.calls)
        division = beside_values(frame.division, tiers)
        values = self._values(frame, plan, tiers)
        reading = self._reading(frame, plan)
        window, unused_bytes = make_window(reading, division, self.device)
        supply = self._supply(frame, reading, window)
        updates = Updates(
            training,
            frame.program,
            frame.numbers,
            frame.compressor,
            frame.places,
            min(division.gradients - frame.spilled, division.leaving),
            supply,
            frame.deferred,
            effect_of_nonfinite(options.nonfinite, is_guarded=frame.program.is_guarded),
        )
        fetches, calls = reading.fetches, plan.calls.calls
        record = partial(training.opened.timeline.add, "program")
        watch = None if planned is None else planned.watch
        return Bound(
            Runner(plan, self._executables, record, values, watch),
            supply,
            updates,
            frame.sums,
            options.micro_batches * reused_bytes(fetches, calls, frame.places),
            self._traffic(frame, calls, fetches, values.num_bytes),
            division.ring + unused_bytes,
            frame,
            planned,
        )

    def _values(self, frame: "_Frame", plan: Plan, tiers: Tiers | None) -> Values:
        if not plan.is_offloaded:
            return Values()
        if tiers is not None:
            check_tiers(tiers, frame.host_bytes)
        scratch = Scratch(self._drives(), self._store.training.opened.meters)
        if tiers is None:
            return Offloaded(plan.calls, scratch)
        return Tiered(plan.calls, scratch, tiers)

    def _supply(self, frame: "_Frame", reading: Reading, window: Window) -> Supply:
        training, keeping = self._store.training, frame.keeping
        source = StoreSource(training, READER_BYTES, reading.num_first)
        early = Fetcher(source, _early(reading.fetches), window)
        return Supply(
            frame.places,
            Fetcher(source, reading.fetches, window),
            source,
            self.resident,
            early=early if self._options.micro_batches > 1 else None,
            stays=keeping.units,
            in_place=keeping.in_place,
            gives=frame.gives,
            version=lambda: version_of(training),
        )

    def _traffic(
        self,
        frame: "_Frame",
        calls: Sequence[Call],
        fetches: Sequence[Fetch],
        value_bytes: int,
    ) -> ByteCounts:
        """Bytes that a step moves on the drive."""
        num_early = self._options.micro_batches - 1
        pieces = [piece for call in calls for piece, _ in call.gradients]
        given = [frame.gradient_bytes[piece] for piece in pieces]
        deferred = frame.deferred
        on_drive = 0 if deferred is None else spilled_bytes(given, frame.spilled)
        on_drive_reads = on_drive * max(1, frame.passes.num_passes - 1)
        summed = [frame.sum_bytes[piece] for piece in pieces]
        moved = (1 + num_early) * value_bytes
        moved += num_early * spilled_bytes(summed, frame.sums.capacity_bytes)
        return planned_traffic(
            self._store.training.opened,
            (*(_early(fetches) * num_early), *fetches),
            frame.units,
            frame.program,
            frame.passes,
            Waiting(written=moved + on_drive, read=moved + on_drive_reads),
            frame.gives,
        )

    def close(self) -> None:
        """Frees the params that stay; the bound steps are closed."""
        self.resident.drop()

    def _is_deferred(self, passes: Passes) -> bool:
        """Whether gradients wait for the last one."""
        return passes.num_passes > 1 or self._store.training.options.rewrites_steps

    def _deferred(
        self, program: UpdateProgram, passes: Passes, division: Division
    ) -> Deferred | None:
        """Makes room for gradients that wait for the last one; None if none waits."""
        training = self._store.training
        if not self._is_deferred(passes):
            return None
        capacity = division.gradients // 2
        spill = Spill(self._folder(), capacity, training.opened.meters)
        return Deferred(program, spill, is_checked=training.options.rewrites_steps)

    def _sums(self, division: Division) -> Accumulation:
        """Makes room for sums of gradients, half of that for gradients which wait."""
        opened = self._store.training.opened
        count = self._options.micro_batches
        capacity = division.gradients // 4 if count > 1 else 0
        spill = Spill(self._folder(), capacity, opened.meters)
        return Accumulation(count, spill, min(capacity, division.leaving))

    def _folder(self) -> Path:
        return plans_folder(self._store.path)

    def _drives(self) -> list[Path]:
        """A folder on each of the store's drives."""
        directory = self._store.training.opened.directory
        if not directory.manifest.csds:
            return [self._folder()]
        return [directory.csd_directory(csd) for csd in range(directory.num_csds)]

    def _kept(
        self, ready: Prepared, division: Division, measure: Callable[[Plan], int]
    ) -> Plan | None:
        """The store's plan, if there is one and it is to be used."""
        if self._options.replan:
            return None
        return kept_plan(
            self._store.path,
            ready,
            division.programs,
            self._options.policy,
            measure,
            division.limit,
        )


def _tiers(frame: _Frame, calls: Calls) -> Tiers | None:
    """Where values wait; None if the device's memory is the host's."""
    return plan_tiers(calls, frame.host_bytes) if frame.division.staged else None


def _early(fetches: Sequence[Fetch]) -> tuple[Fetch, ...]:
    """The same reads for parts of a batch without updates."""
    return tuple(replace(fetch, gradient=None) for fetch in fetches)


def _arrivals(
    pieces: Iterable[Piece],
    shapes: Sequence[tuple[int, ...]],
    whole: Set[int],
) -> Mapping[int, list[tuple[int, ...]]]:
    """Returns the shapes in which each leaf's gradients are given to the passes."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for piece in pieces:
        shape, depth = shapes[piece.leaf], len(piece.index)
        if piece.leaf not in whole:
            shape = (*(1,) * depth, *shape[depth:])
        found.setdefault(piece.leaf, []).append(shape)
    return found


class _Takers:
    """The units whose update takes params that are in memory."""

    def __init__(
        self,
        shape: StoreShape,
        program: UpdateProgram,
        passes: Passes,
        *,
        is_deferred: bool,
    ) -> None:
        self._shape = shape
        self._program = program
        self._passes = passes
        self._is_deferred = is_deferred

    def reads(self, unit: Unit) -> bool:
        """Whether a unit's update reads params that could be given to it."""
        return reads_params(self._shape, unit, self._program, self._passes)

    def from_read(self, unit: Unit) -> bool:
        """Whether a unit's update can take what was read for a program."""
        return unit.is_divided and not self._is_deferred and self.reads(unit)

    def from_memory(self, unit: Unit) -> bool:
        """Whether a unit's update can take what stays between steps.

        A chunk that a step overwrites in parts cannot be compared with its checksum.
        """
        rewrites = self._shape.options.rewrites_steps
        is_known = not (rewrites and is_parted(self._shape, unit))
        return unit.is_divided and is_known and self.reads(unit)
