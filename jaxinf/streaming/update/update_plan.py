"""Counts what updates near storage take and move; nothing moves here.

Invariant: the counts depend on the optimizer and on how a store is divided, which need
not exist. An optimizer is refused before a store is made or changed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxinf.csd import is_idle
from jaxinf.engine import Engine, Move, SubgroupTable, can_use_params, list_moves
from jaxinf.errors import UnsupportedTransformError
from jaxinf.program import InitProgram, LeafInputs, Passes, UpdateProgram, key_data
from jaxinf.store import ScalarState, encode_path, required_bytes
from jaxinf.streaming.move.params import WRITTEN_THROUGH
from jaxinf.streaming.move.scratch import MAX_RUN_BYTES, writing_bytes
from jaxinf.streaming.move.spill import beyond_memory, file_bytes
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.memory import MemoryNeed, StepNeeds
from jaxinf.streaming.plan.options import Options
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.lifetimes import OrderedProgram
from jaxinf.streaming.program.units import (
    ASSEMBLING,
    ParamUnit,
    assembly_bytes,
    units_of,
)
from jaxinf.streaming.update.device_updates import (
    device_assignment,
    needs_of_assignment,
)
from jaxinf.streaming.update.gradient_passes import PassRunner
from jaxinf.streaming.update.gradients import compressor
from jaxinf.transfer import ByteCounts

_PARAMS = 0  # number of the state
# Arguments of an optimizer's update that are known after the first pass: the loss.
_LATE = frozenset({"value"})

# --- an optimizer that streaming can run ---------------------------------------------


def passes_for(
    program: UpdateProgram, pieces: Iterable[Piece] = (), *, is_alone: bool = True
) -> Passes:
    """Returns an optimizer's passes over gradients of pieces, or of whole leaves.

    Raises:
      UnsupportedTransformError: It needs too much of all leaves, or too many passes;
        or it needs whole leaves, of which other processes have chunks.
    """
    sliced: Set[int] = {piece.leaf for piece in pieces if piece.index}
    passes = program.passes(sliced=sliced, late=_LATE)
    stored = {*passes.params, *passes.prologue_state}
    for number, leaf in enumerate(() if is_alone else program.leaves):
        if any(stored.intersection(x.leaf_inputs) for x in passes.of_leaf(number)):
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
    """Returns the first scalar state, and the inputs of each leaf's first state."""
    check_init(program)
    scalars, inputs = program.compute(leaves)
    paths = map(encode_path, program.layout.scalar_keys)
    state = [
        ScalarState.of(path, np.array(key_data(value)))
        for path, value in zip(paths, scalars, strict=True)
    ]
    return state, [LeafInputs(tuple(map(np.asarray, x.scalars))) for x in inputs]


def check_init(program: InitProgram) -> None:
    """Refuses a first state that depends on all params: UnsupportedTransformError."""
    if program.needed_params or any(x.kernel.array_dtypes for x in program.leaves):
        raise UnsupportedTransformError(
            "jaxinf.stream: expected an optimizer whose first state is made leaf by "
            "leaf, found one that computes something of all params first; use "
            "jaxinf.smart_update"
        )


# --- its updates ---------------------------------------------------------------------


class UpdatePlan:
    """The updates of a loss function's steps: what they compute, take and move.

    Their programs are compiled when it is made. The engine is bound to the optimizer
    when a step runs; the store need not exist before.

    Attributes:
      passes, pass_runner: The optimizer's passes over gradients, and what runs them.
      compress: Compresses gradients; None if they are sent whole.
      assignment: The updates that the JAX device computes.
      units_read, units_trained: Units that programs read, and that have gradients.
      idle_leaves: Leaves that stay as they are, whose gradients need not wait.
      gradient_bytes: Bytes of each gradient, 0 for those of idle leaves.
    """

    def __init__(
        self,
        engine: Engine,
        ordered: OrderedProgram,
        program: UpdateProgram,
        subgroups: SubgroupTable,
        options: Options,
    ) -> None:
        self.engine, self.options = engine, options
        self.program, self.subgroups = program, subgroups
        gradients, params = ordered.graph.gradients, ordered.traced.params
        pieces, is_alone = tuple(gradients), engine.group.is_alone
        self.passes = passes = passes_for(program, pieces, is_alone=is_alone)
        kernels = [leaf.kernel for leaf in program.leaves]

        def can_move(leaf: int, origin: Sequence[int], extent: Sequence[int]) -> bool:
            return leaf not in passes.gathered_leaves and subgroups.has_whole_chunks(
                leaf, origin, extent
            )

        undivided = range(len(params)) if options.compress else passes.last_pass_leaves
        self.unit_of = units_of(params, can_move, undivided)
        self.units_read = frozenset(map(self.unit_of, ordered.sizes))
        self.units_trained = frozenset(map(self.unit_of, pieces))
        later = range(min(1, passes.num_passes - 1), passes.num_passes)
        self.idle_leaves = frozenset(
            leaf
            for leaf, kernel in enumerate(kernels)
            if is_idle(kernel) and not any((n, leaf) in passes.parts for n in later)
        )
        self.gradient_bytes = {
            piece: 0 if piece.leaf in self.idle_leaves else value.num_bytes
            for piece, value in gradients.items()
        }
        self.pass_runner = PassRunner(engine, program, passes, options.jit)
        self._computing_bytes = self.pass_runner.compile(params, pieces)
        self.compress = None
        if options.compress is not None:
            self.compress, num_bytes = compressor(
                options.compress, engine, subgroups, self.units_trained, options.jit
            )
            self._computing_bytes = max(self._computing_bytes, num_bytes)
        mesh = ordered.traced.mesh
        self.assignment = device_assignment(
            subgroups, kernels, options, mesh, is_alone=is_alone
        )

    @property
    def are_deferred(self) -> bool:
        """Whether updates wait for the last gradient."""
        return self.passes.num_passes > 1 or self.subgroups.options.rewrites_steps

    @property
    def largest_gradient_bytes(self) -> int:
        return max(self.gradient_bytes.values(), default=0)

    def name(self, leaf: int) -> str:
        return self.program.leaves[leaf].info.name

    def disk_bytes(self) -> int:
        """Returns the bytes of the store, with both slots."""
        return required_bytes(self.subgroups.directory).total()

    @cached_property
    def needs(self) -> StepNeeds:
        subgroups, units, waits = self.subgroups, self.units_trained, self.are_deferred
        # One unit that is read, and one that is updated, whose gradient may wait whole.
        sharded = [unit for unit in self.units_read if unit.is_sharded]
        whole = [unit.whole_bytes for unit in sharded if not unit.moves_by_shard]
        updated = [unit.whole_bytes for unit in sharded] if waits else whole
        whole_bytes = max(whole, default=0) + 2 * max(updated, default=0)
        num_drives = len(subgroups.directory.csd_directories)
        largest_bytes = self.largest_gradient_bytes
        # Threads of further drives each copy a run of a gradient before they write it.
        threads_bytes = min((num_drives - 1) * MAX_RUN_BYTES, largest_bytes)
        moving = "moving shards of params that are not stored alone"
        writing = "writing gradients to several drives at once"
        numbers = "computing numbers of its gradients"
        others = (
            MemoryNeed(whole_bytes, moving),
            MemoryNeed(assembly_bytes(units), ASSEMBLING),
            MemoryNeed(threads_bytes * waits, writing),
            *needs_of_assignment(subgroups, self.assignment, largest_bytes),
            MemoryNeed(self._computing_bytes, numbers, is_on_device=True),
        )
        leaves = enumerate(self.program.leaves)
        return StepNeeds(
            unit_of=self.unit_of,
            frozen=frozenset(number for number, leaf in leaves if is_idle(leaf.kernel)),
            reusable=frozenset(filter(self._can_update_from_read, units)),
            state_bytes=subgroups.least_memory_bytes,
            gradient_bytes=max((unit.num_bytes for unit in units), default=0),
            export_bytes=subgroups.export_bytes,
            others=others,
            writing_bytes=writing_bytes(num_drives),
        )

    def _can_update_from_read(self, unit: ParamUnit) -> bool:
        """Whether a unit's update can take the params that were read for a program."""
        if not unit.moves_by_shard or self.are_deferred:
            return False
        passes, leaf = self.passes, unit.leaf
        if not can_use_params(self.subgroups, leaf, unit.dtype):
            return False  # they are not what is stored
        computation = passes.parts.get((passes.num_passes - 1, leaf))
        if computation is not None and passes.params[leaf] in computation.leaf_inputs:
            return True
        return any(_PARAMS in move.loads for move in self._moves(unit))

    def kept_bytes(self, plan: Plan) -> int:
        """Returns the memory for gradients that wait for the last one."""
        return plan.memory.gradient_bytes // 2 if self.are_deferred else 0

    def on_drives(self, plan: Plan) -> Mapping[Piece, int] | None:
        """Returns the gradients that wait on drives; None if none waits for the last.

        The slices of a leaf that a pass needs whole wait together.
        """
        if not self.are_deferred:
            return None
        sizes: dict[Piece, int] = {}
        for call in plan.calls:
            for piece, _ in call.gradients:
                is_whole = piece.leaf in self.passes.gathered_leaves
                key = Piece(piece.leaf) if is_whole else piece
                sizes[key] = sizes.pop(key, 0) + self.gradient_bytes[piece]
        return beyond_memory(sizes, self.kept_bytes(plan))

    # --- the bytes that they move --------------------------------------------------

    def traffic(self, plan: Plan) -> ByteCounts:
        subgroups, passes = self.subgroups, self.passes
        stored = passes.prologue_state
        from_reads = {x.unit for x in plan.reads.fetches if x.gradient is not None}
        read = sum(
            move.layout.file_bytes([_PARAMS])
            for fetch in plan.reads.repeated
            for move in self._moves(fetch.unit)
        )
        moves = list[Move]()
        for unit in self.units_trained:
            inputs = [v for x in passes.of_leaf(unit.leaf) for v in x.leaf_inputs]
            names = [stored[value][1].name for value in inputs if value in stored]
            takes = unit in from_reads
            num_reads = 0 if takes else inputs.count(passes.params[unit.leaf])
            unit_moves = self._moves(unit, takes_params=takes, read_first=names)
            moves += unit_moves
            for layout, _, _ in unit_moves:
                # Passes read params as programs do, not from memory.
                read += layout.file_bytes([_PARAMS] * num_reads)
                if layout.feedback is not None:  # compression reads it by itself
                    read += layout.file_bytes([layout.feedback])
        steps_per_commit = subgroups.options.steps_per_commit or math.inf
        updates = subgroups.count_moved_bytes(
            moves,
            memory_bytes=plan.store_bytes,
            steps_per_commit=steps_per_commit,
            written_through=WRITTEN_THROUGH,
        )
        waiting_bytes = file_bytes(self.on_drives(plan) or {})
        read += updates.drive_read_bytes + plan.drive_bytes
        written = updates.drive_write_bytes + plan.drive_bytes + waiting_bytes
        num_reads = max(1, passes.num_passes - 1)
        return ByteCounts(
            drive_read_bytes=read + num_reads * waiting_bytes,
            drive_write_bytes=written,
        )

    def _moves(self, unit: ParamUnit, **how: Any) -> list[Move]:
        kernel = self.program.leaves[unit.leaf].kernel
        box = unit.leaf, unit.place.start, unit.place.shape
        return list_moves(self.subgroups, kernel, *box, **how)
