"""A step whose params are read from a store, and whose gradients are updated there.

Invariant: what is planned takes no more than the budgets, and depends on the store's
chunks alone, so a step can be planned before its store is made.
"""

import math
from collections.abc import Mapping, Sequence

from jaxinf.engine import (
    Store,
    StoreShape,
    SubgroupLayout,
    can_take,
    engine_of,
    moved_states,
)
from jaxinf.io import ByteCounts
from jaxinf.layout import Subgroup
from jaxinf.program import UpdateProgram, effect_of_nonfinite
from jaxinf.store import MASTER_PARAMS, csd_shares, plans_folder
from jaxinf.streaming.bound import Ends, Fitted
from jaxinf.streaming.move.params import StoreParams, StoreReader
from jaxinf.streaming.move.scratch import PART_BYTES, Folder, Scratch
from jaxinf.streaming.move.spill import Spill, Waiting, file_bytes, waiting
from jaxinf.streaming.options import Options
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.fit import Prepared
from jaxinf.streaming.plan.memory import READER_BYTES, Division, divide
from jaxinf.streaming.plan.reads import Reading, plan_reads, reused_bytes, staged_bytes
from jaxinf.streaming.plan.saved import save_plan
from jaxinf.streaming.program.graph import aval_bytes
from jaxinf.streaming.program.units import SHARED, StoreUnits, Unit, shared_bytes
from jaxinf.streaming.update.assigning import Assigning
from jaxinf.streaming.update.compressing import Compressor
from jaxinf.streaming.update.on_device import DeviceUpdater
from jaxinf.streaming.update.optimizer import arrivals_of, passes_for
from jaxinf.streaming.update.passes import PassRunner
from jaxinf.streaming.update.store_sink import StoreSink, deferred_bytes, idle_leaves

_PARAMS = 0  # the first of a leaf's states


class StoreParamsEnds(Ends):
    """A store as params source."""

    reads_params = True

    def __init__(
        self, store: Store, store_units: StoreUnits, options: Options, *, average: bool
    ) -> None:
        super().__init__(options)
        self._store, self._engine = store, engine_of(store)
        self._store_units, self._average = store_units, average

    def passing_bytes(self, plan: Plan) -> int:
        return staged_bytes(self._store_units, plan)

    def reading(self, plan: Plan, division: Division) -> Reading:
        return plan_reads(plan, self._store_units, division, self._takes_read)

    def _takes_read(self, unit: Unit) -> bool:
        """Whether a unit's update can take what was read for a program."""
        return False

    def source(self, fitted: Fitted) -> StoreParams:
        reading = fitted.reading
        return StoreParams(
            self._store_units,
            StoreReader(
                self._engine, READER_BYTES, reading.num_first, average=self._average
            ),
            reading,
            self.options.device,
            self.options.together,
        )


class StoreEnds(StoreParamsEnds):
    """The store as params source and gradient sink.

    Making it compiles the optimizer's programs.

    Args:
      store: The store; its training is bound to the optimizer when it is used.
      ready: The loss function, traced for the batch.
      shape: The store's chunks; it need not be there.
    """

    def __init__(
        self,
        store: Store,
        ready: Prepared,
        program: UpdateProgram,
        shape: StoreShape,
        options: Options,
    ) -> None:
        pieces, params = ready.gradient_pieces, ready.traced.params
        passes = passes_for(program, pieces, is_alone=options.together.group.is_alone)

        def can_move(leaf: int, origin: Sequence[int], extent: Sequence[int]) -> bool:
            return leaf not in passes.whole and shape.can_move(leaf, origin, extent)

        undivided = range(len(params)) if options.compress else passes.computed
        store_units = StoreUnits(params, can_move, undivided)
        super().__init__(store, store_units, options, average=False)
        self._units = {store_units.unit(piece) for piece in pieces}
        self._program, self._passes, self._shape = program, passes, shape
        self.num_drives = max(1, shape.directory.num_csds)
        self.saved_in = None if options.replan else store.path
        bits = {"is_deterministic": options.deterministic}
        self._numbers = PassRunner(self._engine, program, passes, **bits)
        self._compressor = Compressor(self._engine, options.compress, shape, **bits)
        arrivals = arrivals_of(pieces, [leaf.shape for leaf in params], passes.whole)
        self._numbers_bytes = max(
            self._numbers.compile(arrivals), self._compressor.compile(self._units)
        )
        rewrites = self._engine.options.rewrites_steps
        self._is_deferred = passes.num_passes > 1 or rewrites
        self._assigning = Assigning(
            options.device_updates,
            store,
            shape,
            program,
            DeviceUpdater(options.device, is_host=options.limit.is_host, **bits),
            ready.traced.mesh,
            replan=options.replan,
        )
        self._idle = idle_leaves(program, passes)
        self._gradient_bytes = {
            piece: 0 if piece.leaf in self._idle else aval_bytes(value.aval)
            for piece, value in ready.lifetimes.graph.gradients.items()
        }

    # --- planned -------------------------------------------------------------------

    def save(self, ready: Prepared, plan: Plan) -> None:
        save_plan(self._store.path, ready, plan)

    def divided(self, ready: Prepared, budgets: Mapping[str, int]) -> Division:
        division = divide(
            budgets["memory_bytes"] - self._shape.export_bytes,
            self._shape.least_memory_bytes,
            max((unit.num_bytes for unit in self._units), default=0),
            self.options.limit_within(budgets, ready.traced.mesh),
        )
        division = self._assigning.without(division, self._gradient_bytes)
        purpose = "computing numbers of its gradients"
        division = division.without(self._numbers_bytes, purpose, is_on_device=True)
        purpose = "moving shards of params that are not stored alone"
        division = division.without(self._bytes_to_gather(ready), purpose)
        purpose = "writing gradients to several drives at once"
        division = division.without(shared_bytes(self._units), SHARED)
        return division.without(self._written_together(), purpose)

    def _written_together(self) -> int:
        """Memory of the threads that write a gradient that waits, beside one's own."""
        if not self._is_deferred:
            return 0
        largest = max(self._gradient_bytes.values(), default=0)
        return min((self.num_drives - 1) * PART_BYTES, largest)

    def _bytes_to_gather(self, ready: Prepared) -> int:
        """Memory to gather shards: one unit that is read, and one that is updated."""
        units = {self._store_units.unit(piece) for piece in ready.lifetimes.sizes}
        apart = [unit for unit in units if unit.is_apart]
        undivided = [unit.whole_bytes for unit in apart if not unit.is_divided]
        waits = [unit.whole_bytes for unit in apart]
        updated = waits if self._is_deferred else undivided
        return max(undivided, default=0) + 2 * max(updated, default=0)

    def _takes_read(self, unit: Unit) -> bool:
        if not unit.is_divided or self._is_deferred:
            return False
        shape, passes, leaf = self._shape, self._passes, unit.leaf
        if not can_take(shape, leaf, unit.dtype):
            return False  # they are not what is stored
        part = passes.part(passes.num_passes - 1, leaf)
        if part is not None and passes.params[leaf] in part.own:
            return True
        kernel = self._program.leaves[leaf].kernel
        loads = (moved_states(kernel, layout)[0] for layout in self._layouts(unit))
        return any(_PARAMS in own for own in loads)

    # --- bound ---------------------------------------------------------------------

    def scratch(self, content: str) -> Scratch:
        opened = self._engine.opened
        directory = opened.directory
        folders = [Folder(plans_folder(self._store.path))]
        if directory.manifest.csds:
            shares = enumerate(csd_shares(directory.manifest))
            folders = [Folder(directory.csd_directory(n), share) for n, share in shares]
        return Scratch(folders, opened.meters, content=content)

    def sink(self, fitted: Fitted) -> StoreSink:
        options, division = self.options, fitted.division
        waits, spill, room_bytes = self.waiting(fitted), None, division.gradients
        if waits is not None:
            spill = Spill(self.scratch("gradients"), waits)
            room_bytes -= waits.capacity_bytes
        return StoreSink(
            self._engine,
            self._program,
            self._numbers,
            self._compressor,
            self._store_units,
            self._idle,
            self.options.together,
            min(room_bytes, division.leaving),
            spill,
            effect_of_nonfinite(options.nonfinite, is_guarded=self._program.is_guarded),
            self._assigning.chosen(division.gradients),
            copies=not self.options.limit.is_host,
            carry=options.carry,
        )

    def waiting(self, fitted: Fitted) -> Waiting | None:
        if not self._is_deferred:
            return None
        calls, passes = fitted.plan.calls, self._passes
        sizes = deferred_bytes(calls, passes.whole, self._gradient_bytes)
        room_bytes = fitted.division.gradients // 2
        return waiting(sizes, room_bytes, max(1, passes.num_passes - 1))

    # --- counted -------------------------------------------------------------------

    def reused_bytes(self, fitted: Fitted) -> int:
        fetches, calls = fitted.reading.fetches, fitted.plan.calls
        return reused_bytes(fetches, calls, self._store_units)

    def waiting_bytes(self, fitted: Fitted) -> int:
        last = self.waiting(fitted)
        return super().waiting_bytes(fitted) + (0 if last is None else file_bytes(last))

    def traffic(self, fitted: Fitted) -> ByteCounts:
        """As `Ends.traffic`.

        An optimizer that leaves state alone in some steps moves fewer in those. Of
        state that stays in a memory, what commits alone write is divided among their
        steps; with ``durability="checkpoint"``, where no one knows these, it does not
        count.
        """
        fetches = fitted.reading.fetches
        read = written = self.waiting_bytes(fitted)
        read += sum(self._params_bytes(one.unit) for one in fetches)
        if (last := self.waiting(fitted)) is not None:
            read += (last.num_reads - 1) * file_bytes(last)
        given = {one.unit for one in fetches if one.gradient is not None}
        staying = self._staying(fitted)
        for unit in self._units:
            own = self._moved_by_update(unit, staying, has_params=unit in given)
            read, written = read + own[0], written + own[1]
        return ByteCounts(drive_read_bytes=read, drive_write_bytes=written)

    def _staying(self, fitted: Fitted) -> frozenset[Subgroup]:
        """Returns what stays in the memory that the store has while steps run."""
        moved = {
            layout.subgroup
            for unit in self._units
            for layout in self._layouts(unit)
            if any(moved_states(self._program.leaves[unit.leaf].kernel, layout))
        }
        store_bytes = fitted.division.ring + fitted.reading.unused_bytes
        return self._shape.staying(store_bytes, moved)

    def _layouts(self, unit: Unit) -> Sequence[SubgroupLayout]:
        return self._shape.layouts(unit.leaf, unit.origin, unit.extent)

    def _params_bytes(self, unit: Unit) -> int:
        """Bytes of a unit's params on drives."""
        return sum(
            self._shape.file_bytes(one, [_PARAMS]) for one in self._layouts(unit)
        )

    def _moved_by_update(
        self, unit: Unit, staying: frozenset[Subgroup], *, has_params: bool
    ) -> tuple[int, int]:
        """Returns bytes of state that a unit's update reads and writes.

        Args:
          staying: What stays in memory.
          has_params: Whether it takes params that are in memory.
        """
        shape, kernel = self._shape, self._program.leaves[unit.leaf].kernel
        names = self._read_by_passes(unit, has_params=has_params)
        every = shape.options.mean_steps_per_commit() or math.inf
        read, written = 0, 0.0
        for layout in self._layouts(unit):
            loads, stores = moved_states(kernel, layout)
            if layout.subgroup not in staying:
                loads -= {_PARAMS} if has_params else set()
                read += shape.file_bytes(layout, loads)
                read += shape.file_bytes(layout, map(layout.slots.index, names))
                written += shape.file_bytes(layout, stores)
                continue
            for state in stores:
                by_commits = shape.options.rewrites_steps and state != _PARAMS
                num_bytes = shape.file_bytes(layout, [state])
                written += num_bytes / every if by_commits else num_bytes
        return read, round(written)

    def _read_by_passes(self, unit: Unit, *, has_params: bool) -> list[str]:
        """Returns the states that passes over a unit's gradient read, each time."""
        passes, found = self._passes, list[str]()
        for number in range(passes.num_passes):
            part = passes.part(number, unit.leaf)
            own = () if part is None else part.own
            found += [passes.recalled[v][1].name for v in own if v in passes.recalled]
            if passes.params[unit.leaf] in own and not has_params:
                found.append(MASTER_PARAMS)
        return found
