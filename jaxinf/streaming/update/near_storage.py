"""What updates near storage take and move, of an optimizer and a store's chunks.

Invariant: it depends on the store's chunks alone, which need not be there. What is
refused is refused before a store is made or changed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import optax

from jaxinf.csd import is_idle
from jaxinf.engine import (
    Store,
    StoreShape,
    SubgroupLayout,
    can_take,
    engine_of,
    moved_states,
)
from jaxinf.errors import UnsupportedTransformError
from jaxinf.layout import Subgroup
from jaxinf.program import Passes, UpdateProgram, trace_update
from jaxinf.store import MASTER_PARAMS
from jaxinf.streaming.move.scratch import (
    PART_BYTES,
    Waiting,
    file_bytes,
    waiting,
    writing_bytes,
)
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.fit import OrderedProgram
from jaxinf.streaming.plan.memory import Claim, Claims
from jaxinf.streaming.plan.options import Options
from jaxinf.streaming.program.graph import Piece, aval_bytes
from jaxinf.streaming.program.units import SHARED, StoreUnits, Unit, shared_bytes
from jaxinf.streaming.update.compressing import Compressor
from jaxinf.streaming.update.device_updates import claims_of_share, device_share
from jaxinf.streaming.update.passes import PassRunner
from jaxinf.streaming.update.sink import Sink
from jaxinf.transfer import ByteCounts
from jaxinf.typing import PyTree

_PARAMS = 0  # the first of a leaf's states
# Arguments of an optimizer's update that are known after the first pass: the loss.
_LATE = frozenset({"value"})

# --- an optimizer that streaming can run ---------------------------------------------


def trace_optimizer(
    tx: optax.GradientTransformation,
    params: PyTree,
    extra_args: Mapping[str, Any] | None = None,
) -> UpdateProgram:
    """As `jaxinf.program.trace_update`, of one that may read all stored state."""
    return trace_update(tx, params, extra_args, may_recall=True, may_recall_all=True)


def passes_for(
    program: UpdateProgram, pieces: Iterable[Piece] = (), *, is_alone: bool = True
) -> Passes:
    """Returns an optimizer's passes over gradients.

    Args:
      pieces: The parts of params whose gradients arrive; by default whole leaves.
      is_alone: Whether the process has all chunks of the store.

    Raises:
      UnsupportedTransformError: It needs too much of all leaves, or too many passes;
        or it needs whole leaves, of which other processes have chunks.
    """
    sliced: Set[int] = {piece.leaf for piece in pieces if piece.index}
    passes = program.passes(sliced=sliced, late=_LATE)
    stored = {*passes.params, *passes.recalled}
    for number, leaf in enumerate(() if is_alone else program.leaves):
        if any(stored.intersection(part.own) for part in passes.of_leaf(number)):
            raise UnsupportedTransformError(
                "jaxinf.stream: expected an optimizer that computes nothing of whole "
                "params or states in a run of several processes, found one that does "
                f"for {leaf.info.name}, as for a trust ratio; use jaxinf.smart_update, "
                "or one process"
            )
    return passes


# --- its updates ---------------------------------------------------------------------


class NearStorageSink(Sink):
    """What the updates of a step take. Making it compiles their programs.

    Args:
      store: The store; it is bound to the optimizer when a step runs.
      ready: The loss function, traced for the batch.
      program: The optimizer.
      shape: The store's chunks; it need not be there.

    Attributes:
      passes: The optimizer's passes over gradients, which `runner` computes.
      compressor: Compresses gradients; None if they are sent whole.
      share: The updates that the JAX device computes.
      trained: Units that have gradients.
      idle: Leaves that stay as they are, whose gradients need not wait.
      gradient_bytes: Bytes of each gradient, 0 for those of `idle` leaves.
    """

    def __init__(
        self,
        store: Store,
        ready: OrderedProgram,
        program: UpdateProgram,
        shape: StoreShape,
        options: Options,
    ) -> None:
        self.engine, self.options = engine_of(store), options
        pieces, params = tuple(ready.lifetimes.graph.gradients), ready.traced.params
        is_alone = self.engine.group.is_alone
        self.passes = passes = passes_for(program, pieces, is_alone=is_alone)

        def can_move(leaf: int, origin: Sequence[int], extent: Sequence[int]) -> bool:
            return leaf not in passes.whole and shape.divides(leaf, origin, extent)

        undivided = range(len(params)) if options.compress else passes.computed
        self.store_units = StoreUnits(params, can_move, undivided)
        self.program, self.shape = program, shape
        self.trained = frozenset(map(self.store_units.unit, pieces))
        later = range(min(1, passes.num_passes - 1), passes.num_passes)
        self.idle = frozenset(
            number
            for number, leaf in enumerate(program.leaves)
            if is_idle(leaf.kernel) and not any(passes.part(n, number) for n in later)
        )
        self.gradient_bytes: Mapping[Piece, int] = {
            piece: 0 if piece.leaf in self.idle else aval_bytes(value.aval)
            for piece, value in ready.lifetimes.graph.gradients.items()
        }
        self.runner = PassRunner(self.engine, program, passes, options.jit)
        numbers_bytes = self.runner.compile(self._arrivals(params))
        self.compressor: Compressor | None = None
        if options.compress is not None:
            own = self.engine, options.compress, shape, options.jit
            self.compressor = Compressor(*own)
            compressing_bytes = self.compressor.compile(self.trained)
            numbers_bytes = max(numbers_bytes, compressing_bytes)
        kernels = [leaf.kernel for leaf in program.leaves]
        own = shape, kernels, options, ready.traced.mesh
        self.share = device_share(*own, is_alone=is_alone)
        self.claims = self._claims(ready, numbers_bytes)

    @property
    def are_deferred(self) -> bool:
        """Whether updates wait for the last gradient."""
        return self.passes.num_passes > 1 or self.shape.options.rewrites_steps

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest gradient."""
        return max(self.gradient_bytes.values(), default=0)

    def _claims(self, ready: OrderedProgram, numbers_bytes: int) -> Claims:
        """Returns what it takes; `numbers_bytes` are of programs beside updates."""
        shape, units, waits = self.shape, self.trained, self.are_deferred
        # One unit that is read, and one that is updated, whose gradient may wait whole.
        read = {self.store_units.unit(piece) for piece in ready.lifetimes.sizes}
        apart = [unit for unit in read if unit.is_apart]
        undivided = [unit.whole_bytes for unit in apart if not unit.is_divided]
        updated = [unit.whole_bytes for unit in apart] if waits else undivided
        apart_bytes = max(undivided, default=0) + 2 * max(updated, default=0)
        num_drives = max(1, shape.directory.num_csds)
        # Of threads that write a gradient that waits, beside one's own.
        threads_bytes = min((num_drives - 1) * PART_BYTES, self.largest_bytes)
        writing = "writing gradients to several drives at once"
        numbers = "computing numbers of its gradients"
        others = (
            Claim(apart_bytes, "moving shards of params that are not stored alone"),
            Claim(shared_bytes(units), SHARED),
            Claim(threads_bytes if waits else 0, writing),
            *claims_of_share(shape, self.share, self.largest_bytes),
            Claim(numbers_bytes, numbers, is_on_device=True),
        )
        leaves = enumerate(self.program.leaves)
        return Claims(
            self.store_units,
            frozenset(number for number, leaf in leaves if is_idle(leaf.kernel)),
            frozenset(filter(self._takes_read, units)),
            ring_bytes=shape.least_memory_bytes,
            gradient_bytes=max((unit.num_bytes for unit in units), default=0),
            export_bytes=shape.export_bytes,
            others=others,
            writing_bytes=writing_bytes(num_drives),
        )

    def _takes_read(self, unit: Unit) -> bool:
        """Whether a unit's update can take what was read for a program."""
        if not unit.is_divided or self.are_deferred:
            return False
        passes, leaf = self.passes, unit.leaf
        if not can_take(self.shape, leaf, unit.dtype):
            return False  # they are not what is stored
        part = passes.part(passes.num_passes - 1, leaf)
        if part is not None and passes.params[leaf] in part.own:
            return True
        return any(_PARAMS in loads for _, loads, _ in self._moved(unit))

    def waiting(self, plan: Plan) -> Waiting | None:
        """As `Sink.waiting`; parts of a leaf that a pass needs whole wait together."""
        if not self.are_deferred:
            return None
        sizes: dict[Piece, int] = {}
        for call in plan.calls:
            for piece, _ in call.gradients:
                is_whole = piece.leaf in self.passes.whole
                key = Piece(piece.leaf) if is_whole else piece
                sizes[key] = sizes.pop(key, 0) + self.gradient_bytes[piece]
        return waiting(sizes, plan.memory.gradients // 2)

    def _arrivals(self, params: Sequence[Any]) -> Mapping[int, Set[tuple[int, ...]]]:
        """Returns the shapes in which each leaf's gradients are given to the passes."""
        found: dict[int, set[tuple[int, ...]]] = {}
        for piece in self.gradient_bytes:
            shape, depth = params[piece.leaf].shape, len(piece.index)
            if piece.leaf not in self.passes.whole:
                shape = (*(1,) * depth, *shape[depth:])
            found.setdefault(piece.leaf, set()).add(shape)
        return found

    # --- the bytes that they move --------------------------------------------------

    def traffic(self, plan: Plan) -> ByteCounts:
        reading, shape = plan.reading, self.shape
        moved = {
            layout.subgroup
            for unit in self.trained
            for layout, loads, stores in self._moved(unit)
            if loads or stores
        }
        there = shape.staying(plan.store_bytes, moved)
        given = {one.unit for one in reading.fetches if one.gradient is not None}
        own = [
            self._moved_bytes(unit, there, has_params=unit in given)
            for unit in self.trained
        ]
        read = sum(num_bytes for num_bytes, _ in own) + sum(
            shape.file_bytes(layout, [_PARAMS])
            for fetch in reading.repeated
            for layout, _, _ in self._moved(fetch.unit)
        )
        waits, away_bytes = self.waiting(plan), plan.away_bytes
        wait_bytes = 0 if waits is None else file_bytes(waits)
        num_reads = max(1, self.passes.num_passes - 1)
        return ByteCounts(
            drive_read_bytes=read + away_bytes + num_reads * wait_bytes,
            drive_write_bytes=sum(n for _, n in own) + away_bytes + wait_bytes,
        )

    def _moved(
        self, unit: Unit
    ) -> list[tuple[SubgroupLayout, frozenset[int], tuple[int, ...]]]:
        """Returns the subgroups of a unit, and the states that an update moves."""
        kernel = self.program.leaves[unit.leaf].kernel
        layouts = self.shape.layouts(unit.leaf, unit.origin, unit.extent)
        return [(layout, *moved_states(kernel, layout)) for layout in layouts]

    def _moved_bytes(
        self, unit: Unit, there: frozenset[Subgroup], *, has_params: bool
    ) -> tuple[int, int]:
        """Returns bytes of state that a unit's update reads and writes.

        Args:
          there: What stays in memory.
          has_params: Whether it takes params that are in memory.
        """
        shape, names = self.shape, self._read_by_passes(unit, has_params=has_params)
        every = shape.options.steps_per_commit or math.inf
        read, written = 0, 0.0
        for layout, loads, stores in self._moved(unit):
            if layout.feedback is not None:  # compression reads it by itself
                read += shape.file_bytes(layout, [layout.feedback])
            if layout.subgroup not in there:
                loads -= {_PARAMS} if has_params else set()
                read += shape.file_bytes(layout, loads)
                read += shape.file_bytes(layout, map(layout.slots.index, names))
                written += shape.file_bytes(layout, stores)
                continue
            # Passes read master params as programs read params, not from memory.
            read += shape.file_bytes(layout, [_PARAMS] * names.count(MASTER_PARAMS))
            for state in stores:
                by_commits = shape.options.rewrites_steps and state != _PARAMS
                num_bytes = shape.file_bytes(layout, [state])
                written += num_bytes / every if by_commits else num_bytes
        return read, round(written)

    def _read_by_passes(self, unit: Unit, *, has_params: bool) -> list[str]:
        """Returns the states that passes over a gradient read, each time."""
        passes, found = self.passes, list[str]()
        for part in passes.of_leaf(unit.leaf):
            own = (v for v in part.own if v in passes.recalled)
            found += [passes.recalled[v][1].name for v in own]
            if passes.params[unit.leaf] in part.own and not has_params:
                found.append(MASTER_PARAMS)
        return found
