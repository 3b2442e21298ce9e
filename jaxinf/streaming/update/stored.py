"""What a step takes and moves whose gradients are updated in a store.

Invariant: it depends on the store's chunks alone, so a step can be planned before its
store is made.
"""

from collections.abc import Mapping, Sequence

from jaxinf.csd import is_idle
from jaxinf.engine import (
    Assignment,
    Store,
    StoreShape,
    SubgroupLayout,
    engine_of,
)
from jaxinf.program import Kernel, UpdateProgram
from jaxinf.store import plans_folder
from jaxinf.streaming.move.scratch import PART_BYTES, Scratch
from jaxinf.streaming.move.spill import Waiting, file_bytes, waiting
from jaxinf.streaming.plan.fit import Prepared
from jaxinf.streaming.plan.memory import Division, divide
from jaxinf.streaming.plan.options import Options
from jaxinf.streaming.plan.planned import Planned
from jaxinf.streaming.program.graph import aval_bytes
from jaxinf.streaming.program.units import SHARED, StoreUnits, Unit, shared_bytes
from jaxinf.streaming.update.assigning import (
    asked_interval,
    assignment,
    check_alone,
    layouts_of,
    without_updates,
)
from jaxinf.streaming.update.compressing import Compressor
from jaxinf.streaming.update.near_storage import (
    Updates,
    bytes_to_gather,
    deferred_bytes,
    idle_leaves,
    step_bytes,
    takes_read,
)
from jaxinf.streaming.update.on_device import DeviceUpdater
from jaxinf.streaming.update.optimizer import arrivals_of, passes_for
from jaxinf.streaming.update.passes import PassRunner
from jaxinf.streaming.update.sink import Sink, drive_bytes
from jaxinf.transfer import ByteCounts


class Stored(Sink):
    """A sink whose gradients are updated in a store. Making it compiles its programs.

    Args:
      store: The store; its training is bound to the optimizer when it is used.
      ready: The loss function, traced for the batch.
      program: The optimizer.
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
        is_alone = options.together.group.is_alone
        passes = passes_for(program, pieces, is_alone=is_alone)

        def can_move(leaf: int, origin: Sequence[int], extent: Sequence[int]) -> bool:
            return leaf not in passes.whole and shape.divides(leaf, origin, extent)

        undivided = range(len(params)) if options.compress else passes.computed
        self._store_units = StoreUnits(params, can_move, undivided)
        super().__init__(options, store, self._store_units)
        self._engine, self._program = engine_of(store), program
        self._updates = Updates(program, passes, shape)
        self._units = {self._store_units.unit(piece) for piece in pieces}
        self.num_drives = max(1, shape.directory.num_csds)
        self.keeps_plans_in = store.path
        bits = {"is_deterministic": options.deterministic}
        self._passes = PassRunner(self._engine, program, passes, **bits)
        self._compressor = Compressor(self._engine, options.compress, shape, **bits)
        arrivals = arrivals_of(pieces, [leaf.shape for leaf in params], passes.whole)
        self._numbers_bytes = max(
            self._passes.compile(arrivals), self._compressor.compile(self._units)
        )
        is_host = options.limit.is_host
        self._updater = DeviceUpdater(options.device, is_host=is_host, **bits)
        asked = options.device_updates
        self._every = asked_interval(asked, store, replan=options.replan)
        self._layouts: Sequence[tuple[SubgroupLayout, Kernel]] = ()
        if asked == "auto" or self._every:
            check_alone(shape, ready.traced.mesh)
            most = 1 if asked == "auto" else self._every or 1
            self._layouts = layouts_of(self._updates, self._assigned(most))
        self._idle = idle_leaves(program, passes)
        self._gradient_bytes = {
            piece: 0 if piece.leaf in self._idle else aval_bytes(value.aval)
            for piece, value in ready.lifetimes.graph.gradients.items()
        }

    def _assigned(self, every: int) -> Assignment:
        is_auto = self.options.device_updates == "auto"
        return assignment(self._updates, self._updater, every, is_auto=is_auto)

    def divided(self, ready: Prepared, budgets: Mapping[str, int]) -> Division:
        shape = self._updates.shape
        division = divide(
            budgets["memory_bytes"] - shape.export_bytes,
            shape.least_memory_bytes,
            max((unit.num_bytes for unit in self._units), default=0),
            self.options.limit_within(budgets, ready.traced.mesh),
        )
        division = without_updates(division, self._layouts, self._gradient_bytes)
        purpose = "computing numbers of its gradients"
        division = division.without(self._numbers_bytes, purpose, is_on_device=True)
        purpose = "moving shards of params that are not stored alone"
        read = {self._store_units.unit(piece) for piece in ready.lifetimes.sizes}
        num_bytes = bytes_to_gather(read, waits=self._updates.are_deferred)
        division = division.without(num_bytes, purpose)
        division = division.without(shared_bytes(self._units), SHARED)
        purpose = "writing gradients to several drives at once"
        return division.without(self._written_together(), purpose)

    def _written_together(self) -> int:
        """Memory of the threads that write a gradient that waits, beside one's own."""
        if not self._updates.are_deferred:
            return 0
        largest = max(self._gradient_bytes.values(), default=0)
        return min((self.num_drives - 1) * PART_BYTES, largest)

    def is_frozen(self, unit: Unit) -> bool:
        return is_idle(self._program.leaves[unit.leaf].kernel)

    def takes_read(self, unit: Unit) -> bool:
        return takes_read(self._updates, unit)

    def waiting(self, planned: Planned) -> Waiting | None:
        if not self._updates.are_deferred:
            return None
        calls, passes = planned.plan.calls, self._updates.passes
        sizes = deferred_bytes(calls, passes.whole, self._gradient_bytes)
        room_bytes = planned.division.gradients // 2
        return waiting(sizes, room_bytes, max(1, passes.num_passes - 1))

    def traffic(self, planned: Planned) -> ByteCounts:
        """As `Sink.traffic`.

        An optimizer that leaves state alone in some steps moves fewer in those. Of
        state that stays in a memory, what commits alone write is divided among their
        steps; with ``durability="checkpoint"``, where no one knows these, it does not
        count.
        """
        waits, waiting_bytes = self.waiting(planned), drive_bytes(self, planned)
        again_bytes = (waits.num_reads - 1) * file_bytes(waits) if waits else 0
        read, written = step_bytes(self._updates, planned, self._units)
        return ByteCounts(
            drive_read_bytes=read + waiting_bytes + again_bytes,
            drive_write_bytes=written + waiting_bytes,
        )

    def scratch(self, content: str) -> Scratch:
        opened = self._engine.opened
        directory = opened.directory
        folders = [plans_folder(directory.path)]
        if directory.manifest.csds:
            csds = range(directory.num_csds)
            folders = [directory.csd_directory(n) for n in csds]
        return Scratch(folders, opened.meters, content=content)
