"""What updates near storage take and move, of an optimizer and a store's chunks.

Invariant: it depends on the store's chunks alone, which need not be there. What is
refused is refused before a store is made or changed.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cache, cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxinf.compress import SparseLeaf, TopK, compress_leaf
from jaxinf.csd import is_idle
from jaxinf.engine import (
    Engine,
    Move,
    SubgroupTable,
    can_use_params,
    keeps_feedback,
    list_moves,
    read_feedback,
)
from jaxinf.errors import UnsupportedTransformError
from jaxinf.layout import LeafGrid
from jaxinf.program import (
    InitProgram,
    LeafInputs,
    Passes,
    UpdateProgram,
    key_data,
    trace_update,
)
from jaxinf.store import ScalarState, encode_path, required_bytes
from jaxinf.streaming.move.params import AT_ONCE
from jaxinf.streaming.move.scratch import PART_BYTES, writing_bytes
from jaxinf.streaming.move.spill import beyond_memory, file_bytes
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.memory import MemoryNeed, StepNeeds
from jaxinf.streaming.plan.options import Options
from jaxinf.streaming.program.graph import Piece, aval_bytes
from jaxinf.streaming.program.lifetimes import OrderedProgram
from jaxinf.streaming.program.units import SHARED, ParamUnit, shared_bytes, units_of
from jaxinf.streaming.update.device_updates import device_share, needs_of_share
from jaxinf.streaming.update.gradient_passes import GradientPasses
from jaxinf.transfer import ByteCounts
from jaxinf.typing import FLOAT32, Array, PyTree

Compress: TypeAlias = Callable[
    [ParamUnit, Array, int], tuple[Array | SparseLeaf, Array | None]
]
"""Returns a unit's gradient as a step of that number sends it, and the new error
feedback; blocks."""

_PARAMS = 0  # the first of a leaf's states
# Arguments of an optimizer's update that are known after the first pass: the loss.
_LATE = frozenset({"value"})

# --- an optimizer that streaming can run ---------------------------------------------


def trace_optimizer(
    tx: optax.GradientTransformation,
    params: PyTree,
    extra_args: Mapping[str, Any] | None = None,
) -> UpdateProgram:
    """Traces an optimizer that may read all stored state; see `trace_update`."""
    return trace_update(tx, params, extra_args, may_recall="all")


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


def initial_inputs(
    program: InitProgram, leaves: Sequence[jax.ShapeDtypeStruct]
) -> tuple[list[ScalarState], list[LeafInputs]]:
    """Returns the first scalar state, and the inputs of each leaf's initial state."""
    check_init(program)
    scalars, inputs = program.compute(leaves)
    paths = map(encode_path, program.layout.scalar_keys)
    state = [
        ScalarState.of(path, np.array(key_data(value)))
        for path, value in zip(paths, scalars, strict=True)
    ]
    return state, [LeafInputs(tuple(map(np.asarray, own.scalars))) for own in inputs]


def check_init(program: InitProgram) -> None:
    """Refuses a first state that depends on all params: UnsupportedTransformError."""
    if program.needed_params or any(one.kernel.array_dtypes for one in program.leaves):
        raise UnsupportedTransformError(
            "jaxinf.stream: expected an optimizer whose first state is made leaf by "
            "leaf, found one that computes something of all params first; use "
            "jaxinf.smart_update"
        )


# --- its updates ---------------------------------------------------------------------


class UpdatePlan:
    """The updates of a loss function's steps: what they compute, take and move.

    Their programs are compiled when it is made.

    Args:
      engine: The store's; it is bound to the optimizer when a step runs.
      program: The optimizer.
      subgroups: Subgroups of the store, which need not be there.

    Attributes:
      passes: The optimizer's passes over gradients, which `inputs` computes.
      inputs_bytes: Memory of what computes `inputs`, and compresses.
      compress: Compresses gradients; None if they are sent whole.
      share: The updates that the JAX device computes.
      read: Units that programs read.
      trained: Units that have gradients.
      idle: Leaves that stay as they are, whose gradients need not wait.
      gradient_bytes: Bytes of each gradient, 0 for those of `idle` leaves.
    """

    def __init__(
        self,
        engine: Engine,
        ready: OrderedProgram,
        program: UpdateProgram,
        subgroups: SubgroupTable,
        options: Options,
    ) -> None:
        self.engine, self.options = engine, options
        self.program, self.subgroups = program, subgroups
        gradients, params = ready.graph.gradients, ready.traced.params
        pieces, is_alone = tuple(gradients), engine.group.is_alone
        self.passes = passes = passes_for(program, pieces, is_alone=is_alone)
        kernels = [leaf.kernel for leaf in program.leaves]

        def can_move(leaf: int, origin: Sequence[int], extent: Sequence[int]) -> bool:
            return leaf not in passes.whole and subgroups.has_whole_chunks(
                leaf, origin, extent
            )

        undivided = range(len(params)) if options.compress else passes.computed
        self.unit_of = units_of(params, can_move, undivided)
        self.read = frozenset(map(self.unit_of, ready.sizes))
        self.trained = frozenset(map(self.unit_of, pieces))
        later = range(min(1, passes.num_passes - 1), passes.num_passes)
        self.idle = frozenset(
            leaf
            for leaf, kernel in enumerate(kernels)
            if is_idle(kernel) and not any((n, leaf) in passes.parts for n in later)
        )
        self.gradient_bytes = {
            piece: 0 if piece.leaf in self.idle else aval_bytes(value.aval)
            for piece, value in gradients.items()
        }
        self.inputs = GradientPasses(engine, program, passes, options.jit)
        self.inputs_bytes = self.inputs.compile(params, pieces)
        self.compress: Compress | None = None
        if options.compress is not None:
            self.compress, own_bytes = compressor(self, options.compress)
            self.inputs_bytes = max(self.inputs_bytes, own_bytes)
        mesh = ready.traced.mesh
        self.share = device_share(subgroups, kernels, options, mesh, is_alone=is_alone)

    @property
    def are_deferred(self) -> bool:
        """Whether updates wait for the last gradient."""
        return self.passes.num_passes > 1 or self.subgroups.options.rewrites_steps

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest gradient."""
        return max(self.gradient_bytes.values(), default=0)

    def name(self, leaf: int) -> str:
        return self.program.leaves[leaf].info.name

    def disk_bytes(self) -> int:
        """Returns the bytes of the store with both slots."""
        return required_bytes(self.subgroups.directory).total()

    @cached_property
    def needs(self) -> StepNeeds:
        """What a step takes beside its programs."""
        subgroups, units, waits = self.subgroups, self.trained, self.are_deferred
        # One unit that is read, and one that is updated, whose gradient may wait whole.
        apart = [unit for unit in self.read if unit.is_apart]
        undivided = [unit.whole_bytes for unit in apart if not unit.is_divided]
        updated = [unit.whole_bytes for unit in apart] if waits else undivided
        apart_bytes = max(undivided, default=0) + 2 * max(updated, default=0)
        num_drives = len(subgroups.directory.csd_directories)
        # Of threads that write a gradient that waits, beside one's own.
        threads_bytes = min((num_drives - 1) * PART_BYTES, self.largest_bytes)
        moving = "moving shards of params that are not stored alone"
        writing = "writing gradients to several drives at once"
        numbers = "computing numbers of its gradients"
        others = (
            MemoryNeed(apart_bytes, moving),
            MemoryNeed(shared_bytes(units), SHARED),
            MemoryNeed(threads_bytes * waits, writing),
            *needs_of_share(subgroups, self.share, self.largest_bytes),
            MemoryNeed(self.inputs_bytes, numbers, is_on_device=True),
        )
        leaves = enumerate(self.program.leaves)
        return StepNeeds(
            unit_of=self.unit_of,
            frozen=frozenset(number for number, leaf in leaves if is_idle(leaf.kernel)),
            handed=frozenset(filter(self._takes_read, units)),
            state_bytes=subgroups.least_memory_bytes,
            gradient_bytes=max((unit.num_bytes for unit in units), default=0),
            export_bytes=subgroups.export_bytes,
            others=others,
            writing_bytes=writing_bytes(num_drives),
        )

    def _takes_read(self, unit: ParamUnit) -> bool:
        """Whether a unit's update can take what was read for a program."""
        if not unit.is_divided or self.are_deferred:
            return False
        passes, leaf = self.passes, unit.leaf
        if not can_use_params(self.subgroups, leaf, unit.dtype):
            return False  # they are not what is stored
        part = passes.parts.get((passes.num_passes - 1, leaf))
        if part is not None and passes.params[leaf] in part.own:
            return True
        return any(_PARAMS in move.loads for move in self._moves(unit))

    def kept_bytes(self, plan: Plan) -> int:
        """Returns the memory for gradients that wait for the last one."""
        return plan.memory.gradients // 2 if self.are_deferred else 0

    def on_drives(self, plan: Plan) -> Mapping[Piece, int] | None:
        """Returns the gradients that wait there for the last one; None if none waits.

        Parts of a leaf that a pass needs whole wait together.
        """
        if not self.are_deferred:
            return None
        sizes: dict[Piece, int] = {}
        for call in plan.calls:
            for piece, _ in call.gradients:
                is_whole = piece.leaf in self.passes.whole
                key = Piece(piece.leaf) if is_whole else piece
                sizes[key] = sizes.pop(key, 0) + self.gradient_bytes[piece]
        return beyond_memory(sizes, self.kept_bytes(plan))

    # --- the bytes that they move --------------------------------------------------

    def traffic(self, plan: Plan) -> ByteCounts:
        """Returns the bytes that a step moves on drives."""
        reading, subgroups, passes = plan.reads, self.subgroups, self.passes
        given = {one.unit for one in reading.fetches if one.gradient is not None}
        read = sum(
            move.layout.file_bytes([_PARAMS])
            for fetch in reading.repeated
            for move in self._moves(fetch.unit)
        )
        moves = list[Move]()
        for unit in self.trained:
            own = [v for part in passes.of_leaf(unit.leaf) for v in part.own]
            recalled = [passes.recalled[v][1].name for v in own if v in passes.recalled]
            is_given = unit in given
            num_reads = 0 if is_given else own.count(passes.params[unit.leaf])
            moved = self._moves(unit, takes_params=is_given, recalled=recalled)
            moves += moved
            for layout, _, _ in moved:
                # Passes read params as programs do, not from memory.
                read += layout.file_bytes([_PARAMS] * num_reads)
                if layout.feedback is not None:  # compression reads it by itself
                    read += layout.file_bytes([layout.feedback])
        every = subgroups.options.steps_per_commit or math.inf
        updates = subgroups.count_moved_bytes(
            moves,
            memory_bytes=plan.store_bytes,
            steps_per_commit=every,
            written_through=AT_ONCE,
        )
        read += updates.drive_read_bytes
        away_bytes, wait_bytes = plan.away_bytes, file_bytes(self.on_drives(plan) or {})
        num_reads = max(1, passes.num_passes - 1)
        return ByteCounts(
            drive_read_bytes=read + away_bytes + num_reads * wait_bytes,
            drive_write_bytes=updates.drive_write_bytes + away_bytes + wait_bytes,
        )

    def _moves(self, unit: ParamUnit, **how: Any) -> list[Move]:
        kernel = self.program.leaves[unit.leaf].kernel
        box = unit.leaf, unit.place.start, unit.place.shape
        return list_moves(self.subgroups, kernel, *box, **how)


# --- compression ---------------------------------------------------------------------


def compressor(updates: UpdatePlan, compression: TopK) -> tuple[Compress, int]:
    """Returns what compresses gradients, and the memory of its largest program.

    The elements sent are those that `jaxinf.smart_update` sends of the same gradient,
    since both select chunk by chunk.
    """
    has_feedback = keeps_feedback(compression)

    @cache
    def compiled(grid: LeafGrid, dtype: np.dtype) -> Any:
        def select(gradient: jax.Array, feedback: jax.Array | None = None) -> Any:
            return compress_leaf(gradient, grid, compression, feedback)

        dtypes = [dtype, FLOAT32][: 1 + has_feedback]
        avals = [jax.ShapeDtypeStruct(grid.shape, own) for own in dtypes]
        return updates.options.jit(select).lower(*avals).compile()

    def of_unit(unit: ParamUnit) -> Any:
        chunk_shape = updates.subgroups.leaves[unit.leaf].grid.chunk_shape
        return compiled(LeafGrid(unit.place.shape, chunk_shape), unit.dtype)

    def compress(
        unit: ParamUnit, gradient: Array, step: int
    ) -> tuple[Array | SparseLeaf, Array | None]:
        if step < compression.warmup_steps:
            return gradient, None
        arrays = [gradient]
        if has_feedback:
            arrays.append(np.empty(unit.place.shape, np.float32))
            files = updates.engine.files
            read_feedback(files, unit.leaf, arrays[1], unit.place.start)
        sent, left = of_unit(unit)(*map(jnp.asarray, arrays))
        return jax.tree.map(np.asarray, (sent, left))

    return compress, max(
        m.temp_size_in_bytes + m.output_size_in_bytes + m.argument_size_in_bytes
        for m in (of_unit(unit).memory_analysis() for unit in updates.trained)
    )
