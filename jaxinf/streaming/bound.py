"""Binds a step of a store to batches of one shape: its plan, its memory, its threads.

Invariant: what a bound step takes stays within the memory of the options.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import optax

from jaxinf.engine import Store, StoreShape
from jaxinf.io import ByteCounts
from jaxinf.program import effect_of_nonfinite
from jaxinf.schedule.placement import waiting
from jaxinf.schedule.reads import Fetch
from jaxinf.store import plans_folder
from jaxinf.streaming.base import Bound
from jaxinf.streaming.budgets import planned_within
from jaxinf.streaming.fit import Fitted
from jaxinf.streaming.fitting import Basis, Fitting
from jaxinf.streaming.move.fetch import make_fetcher
from jaxinf.streaming.move.params import StoreParams
from jaxinf.streaming.move.resident import Resident
from jaxinf.streaming.move.source import StoreSource, version_of
from jaxinf.streaming.move.spill import Spill
from jaxinf.streaming.options import Options
from jaxinf.streaming.plan.memory import READER_BYTES, Division
from jaxinf.streaming.plan.plan import Plan, Prepared
from jaxinf.streaming.plan.reads import Reading, reused_bytes
from jaxinf.streaming.plan.saved import save_plan
from jaxinf.streaming.program.units import Unit
from jaxinf.streaming.replanning import Replanner, make_runner, offload_planned
from jaxinf.streaming.run import Executables
from jaxinf.streaming.update.micro_batches import Sums
from jaxinf.streaming.update.store_sink import StoreSink
from jaxinf.streaming.update.traffic import planned_traffic
from jaxinf.typing import PyTree

__all__ = ["Binder", "StoreBound"]


@dataclass(frozen=True)
class _Spills:
    """Where gradients wait.

    Attributes:
      last: Those that wait for the last one; None if none does.
      sums: Sums of gradients over parts of a batch; None for one part.
    """

    last: Spill | None
    sums: Sums | None

    @property
    def num_bytes(self) -> int:
        """Memory for all that wait."""
        sums = None if self.sums is None else self.sums.spill
        spills = [spill for spill in (self.last, sums) if spill is not None]
        return sum(spill.planned.capacity_bytes for spill in spills)


@dataclass(frozen=True, kw_only=True)
class StoreBound(Bound):
    """As `Bound`, and what does not depend on the order of the calls."""

    basis: Basis
    spills: _Spills


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
        basis = fitting.basis(ready, params, self._store._training.opened)
        fitted = planned_within(
            self._options.budgets, partial(fitting.fitted, ready, basis)
        )
        if not fitted.is_saved:
            save_plan(self._store.path, ready, fitted.plan)
        spills = self._spills(basis, fitted)
        plan, replanner = offload_planned(
            fitted,
            ready.lifetimes.graph,
            self._executables,
            self._options,
            self._drives(),
            None if spills.last is None else spills.last.planned,
        )
        return self._bound(basis, fitted, spills, plan, replanner)

    def rebind(self, bound: StoreBound) -> StoreBound:
        """Returns the same bound to what its planner has chosen; closes the old one.

        No step may be under way, nor its commit.
        """
        found = bound.replanner
        assert found is not None, "only a planned step changes"
        bound.close_calls()
        return self._bound(bound.basis, bound.fitted, bound.spills, found.plan, found)

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

    def _spills(self, basis: Basis, fitted: Fitted) -> _Spills:
        """Makes room for gradients that wait, in half of theirs, and for sums."""
        calls, num_bytes = fitted.plan.calls.calls, fitted.division.gradients
        meters = self._store._training.opened.meters
        spill = partial(Spill, self._folder(), meters=meters)
        last, sums, count = None, None, self._options.micro_batches
        if basis.is_deferred:
            sizes, num_reads = basis.deferred_bytes(calls), basis.passes.num_passes - 1
            last = spill(waiting(sizes, num_bytes // 2, max(1, num_reads)))
        if count > 1:
            pieces = [piece for call in calls for piece, _ in call.gradients]
            sizes = {piece: basis.sum_bytes[piece] for piece in pieces}
            sums = Sums(count, spill(waiting(sizes, num_bytes // 4)))
        return _Spills(last, sums)

    def _bound(
        self,
        basis: Basis,
        fitted: Fitted,
        spills: _Spills,
        plan: Plan,
        replanner: Replanner | None,
    ) -> StoreBound:
        """Makes what runs a plan's calls, from what does not depend on them."""
        opened = self._store._training.opened
        runner = make_runner(
            fitted,
            plan,
            self._executables,
            self._drives(),
            replanner,
            opened.meters,
            partial(opened.timeline.add, "program"),
        )
        reading, division = fitted.reading(plan)
        given = basis.given(fitted.units.units)
        params, unused_bytes = self._params(basis, fitted, reading, division, given)
        fetches, calls = reading.fetches, plan.calls.calls
        moved = runner.values.num_bytes
        reused = reused_bytes(fetches, calls, basis.places)
        return StoreBound(
            runner,
            params,
            fitted.without_graph(),
            self._sink(basis, spills, division, params),
            replanner,
            self._traffic(basis, spills, fetches, moved, given),
            self._options.micro_batches * reused,
            division.ring + unused_bytes,
            basis=basis,
            spills=spills,
        )

    def _sink(
        self, basis: Basis, spills: _Spills, division: Division, params: StoreParams
    ) -> StoreSink:
        return StoreSink(
            self._store._training,
            basis.program,
            basis.numbers,
            basis.compressor,
            basis.places,
            min(division.gradients - spills.num_bytes, division.leaving),
            params,
            spills.last,
            spills.sums,
            effect_of_nonfinite(
                self._options.nonfinite, is_guarded=basis.program.is_guarded
            ),
            copies=not self.is_host,
        )

    def _params(
        self,
        basis: Basis,
        fitted: Fitted,
        reading: Reading,
        division: Division,
        given: frozenset[Unit],
    ) -> tuple[StoreParams, int]:
        """Returns the params of a step, and the memory that no param needs."""
        training, units = self._store._training, fitted.units
        source = StoreSource(training, READER_BYTES, reading.num_first)
        fetcher, unused_bytes = make_fetcher(
            source, reading, division, self._fitting.device
        )
        params = StoreParams(
            basis.places,
            fetcher,
            source,
            self.resident,
            stays=units.units,
            in_place=units.in_place,
            gives=given,
            version=lambda: version_of(training),
        )
        return params, unused_bytes

    def _traffic(
        self,
        basis: Basis,
        spills: _Spills,
        fetches: Sequence[Fetch],
        value_bytes: int,
        given: frozenset[Unit],
    ) -> ByteCounts:
        """Bytes that a step moves on the drive."""
        num_early = self._options.micro_batches - 1
        moved = (1 + num_early) * value_bytes
        if spills.sums is not None:
            moved += num_early * spills.sums.spill.planned_bytes
        written = read = moved
        if spills.last is not None:
            written += spills.last.planned_bytes
            read += spills.last.planned.num_reads * spills.last.planned_bytes
        return planned_traffic(
            self._store._training.opened,
            (*(_early(fetches) * num_early), *fetches),
            basis.units,
            basis.program,
            basis.passes,
            ByteCounts(drive_read_bytes=read, drive_write_bytes=written),
            given,
        )

    def _folder(self) -> Path:
        return plans_folder(self._store.path)

    def _drives(self) -> list[Path]:
        """A folder on each of the store's drives."""
        directory = self._store._training.opened.directory
        if not directory.manifest.csds:
            return [self._folder()]
        return [directory.csd_directory(csd) for csd in range(directory.num_csds)]


def _early(fetches: Sequence[Fetch]) -> tuple[Fetch, ...]:
    """The same reads for parts of a batch without updates."""
    return tuple(fetch._replace(gradient=None) for fetch in fetches)
