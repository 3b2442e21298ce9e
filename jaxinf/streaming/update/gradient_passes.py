"""Runs passes over gradients: what kernels take beside state, such as norms.

    begin ─► add … ─► advance ─► add … ─► advance ─► kernel_inputs … ─► finish

Invariant: of a leaf, only the arrays of one call are in memory, and what later calls
need of it are numbers. The numbers of a leaf that is computed as a whole have the bits
of jitted optax; of a leaf in slices, the slices' numbers are combined.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinf.engine import Engine, StateReader, StateRequest
from jaxinf.program import (
    LeafInputs,
    PassComputation,
    Passes,
    UpdateProgram,
    Value,
    key_data,
)
from jaxinf.streaming.plan.memory import READER_BYTES
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.keys import Keys
from jaxinf.transfer import allocate_array
from jaxinf.typing import Array


class PassRunner:
    """Runs the passes of steps. Its calls come one after another, from any thread."""

    def __init__(
        self, engine: Engine, program: UpdateProgram, passes: Passes, jit: Any = jax.jit
    ) -> None:
        self._engine, self._program, self._passes = engine, program, passes
        self._jit, self._keys = jit, Keys()
        self._compiled: dict[Any, Any] = {}
        self._text_of: dict[PassComputation, str] = {}
        self._before_pass = [jit(computation) for computation in passes.before]
        self._env: dict[Value, Any] = {}
        self._kernel_scalars: dict[Value, Array] = {}
        self._leaves_added: set[int] = set()  # in this pass
        self._number = 0
        self._reader: StateReader | None = None

    def compile(self, params: Sequence[Any], pieces: Iterable[Piece]) -> int:
        """Compiles the computations of gradients that will arrive; blocks.

        Returns the memory of the largest one beside its gradient.
        """
        needed_bytes = 0
        for piece in pieces:
            shape, depth = params[piece.leaf].shape, len(piece.index)
            if piece.leaf not in self._passes.gathered_leaves:
                shape = (*(1,) * depth, *shape[depth:])
            itemsize = self._program.leaves[piece.leaf].info.dtype.itemsize
            for computation in self._passes.of_leaf(piece.leaf):
                memory = self._executable(computation, shape).memory_analysis()
                num_bytes = memory.temp_size_in_bytes + memory.output_size_in_bytes
                num_bytes += memory.argument_size_in_bytes - math.prod(shape) * itemsize
                needed_bytes = max(needed_bytes, num_bytes)
        return needed_bytes

    # --- a step --------------------------------------------------------------------

    def begin(self, extra_args: Mapping[str, Any]) -> None:
        """Begins a step's first pass; late arguments may have any value."""
        self.close()
        self._env = {}
        self.set_arguments(extra_args)
        self._begin_pass(0)

    def set_arguments(self, extra_args: Mapping[str, Any]) -> None:
        """Sets the update's further arguments; again once late ones are known."""
        record = self._engine.files.finished
        state = [jnp.asarray(scalar.value) for scalar in record.scalar_state]
        self._env |= self._program.shared_inputs(state, extra_args)

    def add(self, piece: Piece, gradient: jax.Array | Array) -> None:
        """Computes the numbers of a gradient in this pass; blocks until they are there.

        The piece is a whole leaf, unless the leaf may come in slices.
        """
        computation = self._passes.parts.get((self._number, piece.leaf))
        if computation is None:
            return
        if computation.is_sliced and piece.index:
            gradient = gradient.reshape((1,) * len(piece.index) + gradient.shape)
        self._add_numbers(computation, self._run(computation, gradient, None))

    def advance(self) -> None:
        self._begin_pass(self._number + 1)

    def kernel_inputs(
        self, leaf: int, gradient: jax.Array | Array, params: Array | None
    ) -> LeafInputs:
        """Returns the inputs of a leaf's kernel, in the last pass; blocks.

        The gradient may be a slice if nothing is computed of it.
        """
        computation = self._passes.parts.get((self._number, leaf))
        values = self._kernel_scalars
        if computation is not None:
            outputs = self._run(computation, gradient, params)
            num = len(computation.exports)
            self._add_numbers(computation, outputs[:num])
            kernel_values = *computation.scalars, *computation.arrays
            arrays = map(np.asarray, outputs[num:])
            values = values | dict(zip(kernel_values, arrays, strict=True))
        wanted = self._passes.prologue.leaves[leaf]
        return LeafInputs(
            tuple(values[value] for value in wanted.scalars),
            tuple(values[value] for value in wanted.arrays),
        )

    def finish(self) -> list[Array]:
        """Returns the new scalar state, after the last pass."""
        self.advance()
        self.close()
        return [
            np.array(key_data(self._env[v]) if v.constant is None else v.constant)
            for v in self._passes.prologue.scalar_state
        ]

    def close(self) -> None:
        """Ends the reads of a step; idempotent."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    # --- inside --------------------------------------------------------------------

    def _begin_pass(self, number: int) -> None:
        self._number, self._leaves_added = number, set()
        before = self._passes.before[number]
        outputs = self._before_pass[number](*(self._env[v] for v in before.inputs))
        num = len(before.exports)
        self._env.update(zip(before.exports, outputs[:num], strict=True))
        # A value may be of both, and has the kernel's dtype here.
        scalars = map(np.asarray, outputs[num:])
        self._kernel_scalars = dict(zip(before.scalars, scalars, strict=True))

    def _add_numbers(
        self, computation: PassComputation, numbers: Sequence[jax.Array]
    ) -> None:
        if computation.leaf in self._leaves_added:
            sums = [self._env[value] for value in computation.exports]
            numbers = computation.combine(sums, numbers)
        self._leaves_added.add(computation.leaf)
        self._env.update(zip(computation.exports, numbers, strict=True))

    def _run(
        self,
        computation: PassComputation,
        gradient: jax.Array | Array,
        params: Array | None,
    ) -> Sequence[jax.Array]:
        leaf = computation.leaf
        executable = self._executable(computation, tuple(gradient.shape))
        arrays = [
            gradient
            if value is self._passes.gradients[leaf]
            else self._stored(leaf, value, params)
            for value in computation.leaf_inputs
        ]
        numbers = [self._env[value] for value in computation.numbers]
        return jax.block_until_ready(executable(*map(jnp.asarray, arrays), *numbers))

    def _stored(self, leaf: int, value: Value, params: Array | None) -> Array:
        """Returns the leaf's params or optimizer slot of a value; may read it."""
        files, info = self._engine.files, self._program.leaves[leaf].info
        _, slot = self._passes.prologue_state.get(value, (leaf, None))
        if slot is None and params is not None:
            return params.reshape(info.shape)
        array = allocate_array(info.shape, info.dtype if slot is None else slot.dtype)
        origin = (0,) * len(info.shape)
        if slot is not None:
            request = StateRequest(leaf, slot.name, origin, array)
            self._engine.steps.read_states(files.finished.step, request)
            return array
        if self._reader is None:
            self._reader = StateReader(files, READER_BYTES)
        self._reader.read(leaf, array, origin, 0)
        return array

    def _executable(self, computation: PassComputation, shape: tuple[int, ...]) -> Any:
        """Returns a computation's program, compiled once for leaves with equal ones."""
        if computation not in self._text_of:
            text = self._keys.program(
                computation.inputs, computation.nodes, computation.outputs
            )
            self._text_of[computation] = f"{text} {computation.is_sliced}"
        leaf, stored = computation.leaf, self._passes.prologue_state
        info = self._program.leaves[leaf].info
        types = [
            (
                shape if value is self._passes.gradients[leaf] else info.shape,
                stored[value][1].dtype if value in stored else info.dtype,
            )
            for value in computation.leaf_inputs
        ]
        types += [(value.shape, value.dtype) for value in computation.numbers]
        key = self._text_of[computation], *types
        if key not in self._compiled:
            avals = [jax.ShapeDtypeStruct(*shape_dtype) for shape_dtype in types]
            self._compiled[key] = self._jit(computation).lower(*avals).compile()
        return self._compiled[key]
