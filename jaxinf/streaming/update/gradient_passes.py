"""Runs passes over gradients: what kernels take beside state, such as norms.

    begin ─► add, for each gradient ─► advance ─► add … ─► advance ─► of_leaf ─► finish

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


class GradientPasses:
    """Runs the passes of steps. Its calls come one after another, from any thread.

    Args:
      passes: Passes of a step, for gradients in the pieces that will arrive.
      jit: `jax.jit` with the options of compilation.
    """

    def __init__(
        self, engine: Engine, program: UpdateProgram, passes: Passes, jit: Any = jax.jit
    ) -> None:
        self._engine, self._program, self._passes = engine, program, passes
        self._jit, self._keys = jit, Keys()
        self._compiled: dict[Any, Any] = {}
        self._part_keys: dict[PassComputation, str] = {}
        self._between = [jit(part) for part in passes.before]
        self._env: dict[Value, Any] = {}
        self._kernel_scalars: dict[Value, Array] = {}
        self._given: set[int] = set()
        self._number = 0
        self._reader: StateReader | None = None

    def compile(self, params: Sequence[Any], pieces: Iterable[Piece]) -> int:
        """Compiles all parts; returns the memory of the largest beside its gradient.

        Args:
          params: Shapes and dtypes of the leaves.
          pieces: Pieces of which gradients will arrive.
        """
        needed = 0
        for piece in pieces:
            shape, depth = params[piece.leaf].shape, len(piece.index)
            if piece.leaf not in self._passes.whole:
                shape = (*(1,) * depth, *shape[depth:])
            itemsize = self._program.leaves[piece.leaf].info.dtype.itemsize
            for part in self._passes.of_leaf(piece.leaf):
                memory = self._executable(part, shape).memory_analysis()
                size = memory.temp_size_in_bytes + memory.output_size_in_bytes
                size += memory.argument_size_in_bytes - math.prod(shape) * itemsize
                needed = max(needed, size)
        return needed

    # --- a step --------------------------------------------------------------------

    def begin(self, extra_args: Mapping[str, Any]) -> None:
        """Begins the first pass of a step.

        Args:
          extra_args: Further arguments of the optimizer's update; of those that are
            known late, any value.
        """
        self.close()
        self._env = {}
        self.give(extra_args)
        self._start(0)

    def give(self, extra_args: Mapping[str, Any]) -> None:
        """Takes the values of arguments that are known after the first pass."""
        record = self._engine.files.finished
        state = [jnp.asarray(scalar.value) for scalar in record.scalar_state]
        self._env |= self._program.numbers(state, extra_args)

    def add(self, piece: Piece, gradient: jax.Array | Array) -> None:
        """Computes the numbers of a gradient in this pass; blocks until they are there.

        Args:
          piece: The piece of the params; whole, unless its leaf may come in slices.
        """
        part = self._passes.parts.get((self._number, piece.leaf))
        if part is None:
            return
        if part.is_sliced and piece.index:
            gradient = gradient.reshape((1,) * len(piece.index) + gradient.shape)
        self._note(part, self._run(part, gradient, None))

    def advance(self) -> None:
        """Ends a pass and begins the next one."""
        self._start(self._number + 1)

    def of_leaf(
        self, leaf: int, gradient: jax.Array | Array, params: Array | None
    ) -> LeafInputs:
        """Returns the inputs of a leaf's kernel, in the last pass; blocks.

        Args:
          gradient: Gradient of the leaf; a slice if nothing is computed of it.
          params: Params of the leaf on the device, if they are in memory.
        """
        part, known = self._passes.parts.get((self._number, leaf)), self._kernel_scalars
        if part is not None:
            outputs, num = self._run(part, gradient, params), len(part.exports)
            self._note(part, outputs[:num])
            names, own = (*part.scalars, *part.arrays), map(np.asarray, outputs[num:])
            known = known | dict(zip(names, own, strict=True))
        wanted = self._passes.prologue.leaves[leaf]
        return LeafInputs(
            tuple(known[value] for value in wanted.scalars),
            tuple(known[value] for value in wanted.arrays),
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

    def _start(self, number: int) -> None:
        """Computes the numbers and the kernels' scalars before a pass."""
        self._number, self._given = number, set()
        part = self._passes.before[number]
        found = self._between[number](*(self._env[value] for value in part.inputs))
        num = len(part.exports)
        self._env.update(zip(part.exports, found[:num], strict=True))
        # A value may be of both, and has the kernel's dtype here.
        own = map(np.asarray, found[num:])
        self._kernel_scalars = dict(zip(part.scalars, own, strict=True))

    def _note(self, part: PassComputation, found: Sequence[jax.Array]) -> None:
        if part.leaf in self._given:
            found = part.gather([self._env[v] for v in part.exports], found)
        self._given.add(part.leaf)
        self._env.update(zip(part.exports, found, strict=True))

    def _run(
        self, part: PassComputation, gradient: jax.Array | Array, params: Array | None
    ) -> Sequence[jax.Array]:
        executable = self._executable(part, tuple(gradient.shape))
        arrays = [
            gradient
            if value is self._passes.gradients[part.leaf]
            else self._stored(part.leaf, value, params)
            for value in part.own
        ]
        numbers = [self._env[value] for value in part.numbers]
        return jax.block_until_ready(executable(*map(jnp.asarray, arrays), *numbers))

    def _stored(self, leaf: int, value: Value, params: Array | None) -> Array:
        """Returns a leaf's params, or its slot that a value is; reads it if need be."""
        files, info = self._engine.files, self._program.leaves[leaf].info
        recalled, origin = self._passes.recalled.get(value), (0,) * len(info.shape)
        if recalled is None and params is not None:
            return params.reshape(info.shape)
        dtype = info.dtype if recalled is None else recalled[1].dtype
        array = allocate_array(info.shape, dtype)
        if recalled is not None:
            request = StateRequest(leaf, recalled[1].name, origin, array)
            self._engine.steps.recall(files.finished.step, request)
            return array
        if self._reader is None:
            self._reader = StateReader(files, READER_BYTES)
        self._reader.read(leaf, array, origin, 0)
        return array

    def _executable(self, part: PassComputation, shape: tuple[int, ...]) -> Any:
        """Returns a part's program, compiled once for all leaves with equal ones."""
        if part not in self._part_keys:
            key = self._keys.program(part.inputs, part.nodes, part.outputs)
            self._part_keys[part] = f"{key} {part.is_sliced}"
        info, recalled = self._program.leaves[part.leaf].info, self._passes.recalled
        own = [
            (
                shape if value is self._passes.gradients[part.leaf] else info.shape,
                recalled[value][1].dtype if value in recalled else info.dtype,
            )
            for value in part.own
        ]
        forms = (*own, *((value.shape, value.dtype) for value in part.numbers))
        key = self._part_keys[part], *forms
        if key not in self._compiled:
            avals = [jax.ShapeDtypeStruct(*form) for form in forms]
            self._compiled[key] = self._jit(part).lower(*avals).compile()
        return self._compiled[key]
