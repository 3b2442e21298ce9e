"""Binds a step of a store to batches of one shape: its plan, its memory, its threads.

Invariant: what a bound step takes stays within the memory of the options.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import optax

from jaxinf.engine import Store, StoreShape
from jaxinf.io import ByteCounts
from jaxinf.program import effect_of_nonfinite
from jaxinf.store import plans_folder
from jaxinf.streaming.base import Bound
from jaxinf.streaming.budgets import planned_within
from jaxinf.streaming.fitting import Basis, Fitted, Fitting
from jaxinf.streaming.move.fetch import make_fetcher
from jaxinf.streaming.move.params import StoreParams
from jaxinf.streaming.move.resident import Resident
from jaxinf.streaming.move.source import StoreSource, version_of
from jaxinf.streaming.move.spill import Spill
from jaxinf.streaming.move.values import Values, make_values
from jaxinf.streaming.options import Options
from jaxinf.streaming.plan.calls import Call, Calls
from jaxinf.streaming.plan.memory import READER_BYTES, Division
from jaxinf.streaming.plan.plan import Plan, Prepared
from jaxinf.streaming.plan.reads import Fetch, Reading, host_bytes, reused_bytes
from jaxinf.streaming.plan.resident import ResidentUnits
from jaxinf.streaming.plan.saved import save_plan
from jaxinf.streaming.plan.tiers import Tiers, beside_values, check_tiers, plan_tiers
from jaxinf.streaming.program.units import Unit
from jaxinf.streaming.replanning import Replanner, offload_planned
from jaxinf.streaming.run import Executables, Runner
from jaxinf.streaming.update.deferred import Deferred
from jaxinf.streaming.update.micro_batches import Accumulation
from jaxinf.streaming.update.sink import Sink
from jaxinf.streaming.update.store_sink import StoreSink
from jaxinf.streaming.update.traffic import Waiting, planned_traffic, spilled_bytes
from jaxinf.typing import PyTree

__all__ = ["Binder", "StoreBound"]


@dataclass(frozen=True)
class _Frame:
    """What runs a step and does not depend on the order of its calls.

    Attributes:
      basis: What was planned.
      units: Units that stay.
      division: Memory, without theirs.
      deferred: Gradients that wait for the last one; None if none does.
      sums: Sums of gradients over parts of a batch; None for one part.
      host_bytes: Memory of the host for values that leave a device with memory of its
        own: what is not for params on their way there.
    """

    basis: Basis
    units: ResidentUnits
    division: Division
    deferred: Deferred | None
    sums: Spill | None
    host_bytes: int

    @property
    def spilled(self) -> int:
        """Memory for gradients that wait for the last one."""
        return 0 if self.deferred is None else self.deferred.spill.capacity_bytes

    @cached_property
    def gives(self) -> frozenset[Unit]:
        """Units that stay, and that updates can take."""
        return frozenset(filter(self.basis.takes_resident, self.units.units))

    def tiers(self, calls: Calls) -> Tiers | None:
        """Where values wait; None if the device's memory is the host's."""
        return plan_tiers(calls, self.host_bytes) if self.division.staged else None

    def reading(self, plan: Plan) -> Reading:
        """The reads of a step."""
        division = beside_values(self.division, self.tiers(plan.calls))
        return self.basis.fetches(plan, division, self.units.units)

    def fetched(self, plan: Plan, calls: Calls, peak_bytes: int) -> Mapping[int, int]:
        """Returns the bytes that are read for each call, by its number."""
        found: dict[int, int] = {}
        plan = replace(plan, calls=calls, peak_bytes=peak_bytes)
        for fetch in self.reading(plan).fetches:
            found[fetch.first] = found.get(fetch.first, 0) + fetch.unit.num_bytes
        return found


@dataclass(frozen=True, kw_only=True)
class StoreBound(Bound):
    """As `Bound`, and what does not depend on the order of the calls."""

    frame: _Frame


class Binder:
    """Binds steps of one store.

    Args:
      store: The store; its training is bound to the optimizer.
      tx: The optimizer.
      options: Memory, policy and so on.
      executables: As for `compile_plan`.
    """

    def __init__(
        self,
        store: Store,
        tx: optax.GradientTransformationExtraArgs,
        options: Options,
        executables: Executables,
    ) -> None:
        self._store = store
        self._options = options
        self._executables = executables
        self._fitting = Fitting(store, tx, options, executables)

    @property
    def is_host(self) -> bool:
        """Whether the JAX device's memory is the host's."""
        return self._fitting.device_limit.is_host

    @cached_property
    def resident(self) -> Resident:
        """Params that stay between steps; those of all shapes of batches."""
        return Resident(self._fitting.device, is_host=self.is_host)

    def bind(self, ready: Prepared, params: PyTree) -> StoreBound:
        """Plans, compiles and divides the memory; blocks.

        Args:
          ready: The loss function, traced for the batch.
          params: Abstract values of the params.

        Raises:
          StreamError: The program cannot be cut to fit, or the saved plan is another's.
        """
        fitting = self._fitting
        basis = fitting.basis(ready, params, self._store.training.opened)
        fitted = planned_within(
            self._options.budgets, partial(fitting.fitted, ready, basis)
        )
        if not fitted.is_saved:
            save_plan(self._store.path, ready, fitted.plan)
        frame = self._frame(basis, fitted)
        plan, replanner = offload_planned(
            fitted.plan,
            ready.lifetimes.graph,
            frame.division.programs,
            self._executables,
            self._options,
            self._drives(),
            frame.tiers,
            partial(frame.fetched, fitted.plan),
        )
        return self._bound(frame, plan, replanner)

    def rebind(self, bound: StoreBound) -> StoreBound:
        """Returns the same bound to what its planner has chosen; closes the old one.

        No step may be under way, nor its commit.
        """
        assert bound.replanner is not None, "only a planned step changes"
        bound.close_calls()
        return self._bound(bound.frame, bound.replanner.plan, bound.replanner)

    def check(
        self, ready: Prepared, params: PyTree, shape: StoreShape
    ) -> Callable[[Mapping[str, int]], object]:
        """Returns what plans for a store that need not be there, and writes nothing.

        Args:
          ready, params: As for `bind`.
          shape: The store's chunks.
        """
        basis = self._fitting.basis(ready, params, shape)
        return partial(self._fitting.fitted, ready, basis)

    def close(self) -> None:
        """Frees the params that stay; the bound steps are closed."""
        self.resident.drop()

    # --- inside --------------------------------------------------------------------

    def _frame(self, basis: Basis, fitted: Fitted) -> _Frame:
        """Makes room for gradients that wait, in half of theirs, and for sums."""
        training, division = self._store.training, fitted.division
        stays = fitted.units.units
        deferred = sums = None
        if basis.is_deferred:
            deferred = Deferred(
                basis.program,
                self._spill(division.gradients // 2),
                is_checked=training.options.rewrites_steps,
            )
        if self._options.micro_batches > 1:
            sums = self._spill(division.gradients // 4)
        return _Frame(
            basis,
            fitted.units,
            division,
            deferred,
            sums,
            host_bytes(fitted.plan, basis.places, division, stays),
        )

    def _spill(self, capacity_bytes: int) -> Spill:
        meters = self._store.training.opened.meters
        return Spill(self._folder(), capacity_bytes, meters)

    def _bound(
        self, frame: _Frame, plan: Plan, replanner: Replanner | None
    ) -> StoreBound:
        """Makes what runs a plan's calls, from what does not depend on them."""
        training = self._store.training
        tiers = frame.tiers(plan.calls)
        division = beside_values(frame.division, tiers)
        values = self._values(frame, plan, tiers)
        reading = frame.reading(plan)
        params, unused_bytes = self._params(frame, reading, division)
        fetches, calls = reading.fetches, plan.calls.calls
        record = partial(training.opened.timeline.add, "program")
        watch = None if replanner is None else replanner.watch
        reused = reused_bytes(fetches, calls, frame.basis.places)
        return StoreBound(
            Runner(plan, self._executables, record, values, watch),
            params,
            self._sink(frame, division, params),
            replanner,
            self._traffic(frame, calls, fetches, values.num_bytes),
            self._options.micro_batches * reused,
            division.ring + unused_bytes,
            frame=frame,
        )

    def _sink(self, frame: _Frame, division: Division, params: StoreParams) -> Sink:
        basis, copies = frame.basis, not self.is_host
        sink = StoreSink(
            self._store.training,
            basis.program,
            basis.numbers,
            basis.compressor,
            basis.places,
            min(division.gradients - frame.spilled, division.leaving),
            params,
            frame.deferred,
            effect_of_nonfinite(
                self._options.nonfinite, is_guarded=basis.program.is_guarded
            ),
            copies=copies,
        )
        sums = frame.sums
        if sums is None:
            return sink
        capacity_bytes = min(sums.capacity_bytes, frame.division.leaving)
        count = self._options.micro_batches
        return Accumulation(sink, count, sums, capacity_bytes, copies=copies)

    def _values(self, frame: _Frame, plan: Plan, tiers: Tiers | None) -> Values:
        if tiers is not None:
            check_tiers(tiers, frame.host_bytes)
        meters = self._store.training.opened.meters
        return make_values(plan, tiers, self._drives(), meters)

    def _params(
        self, frame: _Frame, reading: Reading, division: Division
    ) -> tuple[StoreParams, int]:
        """Returns the params of a step, and the memory that no param needs."""
        training, units = self._store.training, frame.units
        source = StoreSource(training, READER_BYTES, reading.num_first)
        fetcher, unused_bytes = make_fetcher(
            source, reading, division, self._fitting.device
        )
        params = StoreParams(
            frame.basis.places,
            fetcher,
            source,
            self.resident,
            stays=units.units,
            in_place=units.in_place,
            gives=frame.gives,
            version=lambda: version_of(training),
        )
        return params, unused_bytes

    def _traffic(
        self,
        frame: _Frame,
        calls: Sequence[Call],
        fetches: Sequence[Fetch],
        value_bytes: int,
    ) -> ByteCounts:
        """Bytes that a step moves on the drive."""
        basis, num_early = frame.basis, self._options.micro_batches - 1
        pieces = [piece for call in calls for piece, _ in call.gradients]
        moved = (1 + num_early) * value_bytes
        if frame.sums is not None:
            summed = [basis.sum_bytes[piece] for piece in pieces]
            moved += num_early * spilled_bytes(summed, frame.sums.capacity_bytes)
        written = read = moved
        if frame.deferred is not None:
            given = [basis.gradient_bytes[piece] for piece in pieces]
            on_drive = spilled_bytes(given, frame.spilled)
            written += on_drive
            read += on_drive * max(1, basis.passes.num_passes - 1)
        return planned_traffic(
            self._store.training.opened,
            (*(_early(fetches) * num_early), *fetches),
            basis.units,
            basis.program,
            basis.passes,
            Waiting(written=written, read=read),
            frame.gives,
        )

    def _folder(self) -> Path:
        return plans_folder(self._store.path)

    def _drives(self) -> list[Path]:
        """A folder on each of the store's drives."""
        directory = self._store.training.opened.directory
        if not directory.manifest.csds:
            return [self._folder()]
        return [directory.csd_directory(csd) for csd in range(directory.num_csds)]


def _early(fetches: Sequence[Fetch]) -> tuple[Fetch, ...]:
    """The same reads for parts of a batch without updates."""
    return tuple(replace(fetch, gradient=None) for fetch in fetches)
