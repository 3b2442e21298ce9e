"""Compresses the gradients of a streamed step, before they go to the CSDs.

Invariant: the elements sent are those that `jaxinf.smart_update` sends of the same
gradient, since both select chunk by chunk.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinf.compress import SparseLeaf, TopK, compress_leaf
from jaxinf.engine import Engine, StoreShape, keeps_feedback, read_feedback
from jaxinf.layout import LeafGrid
from jaxinf.streaming.program.units import Unit
from jaxinf.typing import Array


class Compressor:
    """Compresses gradients of units.

    Args:
      jit: `jax.jit` with the options of compilation.
    """

    def __init__(
        self, engine: Engine, compression: TopK, shape: StoreShape, jit: Any
    ) -> None:
        self._engine, self._compression, self._jit = engine, compression, jit
        self._leaves = shape.directory.manifest.leaves
        self._has_feedback = keeps_feedback(compression)
        self._compiled: dict[Any, Any] = {}

    def compile(self, units: Iterable[Unit]) -> int:
        """Compiles the selections; returns the memory of the largest."""
        memories = [self._executable(unit).memory_analysis() for unit in units]
        return max(
            m.temp_size_in_bytes + m.output_size_in_bytes + m.argument_size_in_bytes
            for m in memories
        )

    def __call__(
        self, unit: Unit, gradient: Array, step: int
    ) -> tuple[Array | SparseLeaf, Array | None]:
        """Returns a gradient as it is sent, and the new error feedback; blocks.

        Args:
          gradient: Its gradient, of the unit's extent.
        """
        if step < self._compression.warmup_steps:
            return gradient, None
        arrays = [jnp.asarray(gradient)]
        if self._has_feedback:
            feedback = np.empty(unit.extent, np.float32)
            read_feedback(self._engine.opened, unit.leaf, feedback, unit.origin)
            arrays.append(jnp.asarray(feedback))
        sent, left = self._executable(unit)(*arrays)
        sent = jax.tree.map(np.asarray, sent)
        return sent, None if left is None else np.asarray(left)

    def _executable(self, unit: Unit) -> Any:
        grid = LeafGrid(unit.extent, self._leaves[unit.leaf].grid.chunk_shape)
        key = grid.shape, grid.chunk_shape, unit.dtype
        if key not in self._compiled:
            avals = [jax.ShapeDtypeStruct(unit.extent, unit.dtype)]
            if self._has_feedback:
                avals.append(jax.ShapeDtypeStruct(unit.extent, jnp.float32))

            def select(gradient: jax.Array, feedback: jax.Array | None = None) -> Any:
                return compress_leaf(gradient, grid, self._compression, feedback)

            self._compiled[key] = self._jit(select).lower(*avals).compile()
        return self._compiled[key]
