"""The computations of passes over gradients: on one leaf, and on numbers alone.

Invariant: a part reads arrays of one leaf only. A combination reads none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinf.program.graph import Node, Value, bind, evaluate
from jaxinf.program.prologue import as_array, as_scalar

TOTALS: Mapping[str, Callable[..., jax.Array]] = {
    "reduce_sum": jnp.add,
    "reduce_max": jnp.maximum,
    "reduce_min": jnp.minimum,
    "reduce_and": jnp.logical_and,
    "reduce_or": jnp.logical_or,
}
"""Reductions of slices, and how their results are combined."""


@dataclass(frozen=True, eq=False)
class LeafPart:
    """The computation of one pass on one leaf.

    Attributes:
      leaf: The leaf's number.
      shape: Its shape.
      own: The leaf's inputs: gradient, params, recalled slots.
      numbers: Further inputs, known before the pass.
      nodes: The computation.
      exports: Numbers for later passes.
      scalars, arrays: Inputs of the leaf's kernel.
      is_sliced: Whether slices of the gradient are enough; `gather` then combines what
        each gives.
    """

    leaf: int
    shape: tuple[int, ...]
    own: tuple[Value, ...]
    numbers: tuple[Value, ...]
    nodes: tuple[Node, ...]
    exports: tuple[Value, ...]
    scalars: tuple[Value, ...]
    arrays: tuple[Value, ...]
    is_sliced: bool

    @property
    def inputs(self) -> tuple[Value, ...]:
        """All inputs, in the order of a call."""
        return self.own + self.numbers

    @property
    def outputs(self) -> tuple[Value, ...]:
        """All results, in the order of a call."""
        return self.exports + self.scalars + self.arrays

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        """Computes the results; traceable. A slice keeps its leading axes."""
        env: dict[Value, Any] = dict(zip(self.inputs, arrays, strict=True))

        def compute(node: Node, operands: Sequence[Any]) -> Sequence[Any]:
            if self.is_sliced and node.is_spread:  # as long as the slice
                return [lax.broadcast(operands[0], env[self.own[0]].shape)]
            return bind(node, operands)

        found = iter(evaluate(self.nodes, self.outputs, env, compute))
        return [
            *(as_array(next(found)) for _ in self.exports),
            *(as_scalar(next(found), value) for value in self.scalars),
            *(jnp.broadcast_to(next(found), self.shape) for _ in self.arrays),
        ]

    def gather(
        self, some: Sequence[jax.Array], more: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Combines the exports of two slices."""
        made = {value: node for node in self.nodes for value in node.outputs}
        return [
            TOTALS[made[value].name](one, other)
            for value, one, other in zip(self.exports, some, more, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Combination:
    """The computation between two passes, on numbers alone."""

    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    numbers: tuple[Value, ...]
    scalars: tuple[Value, ...]

    def __call__(self, *arrays: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """Computes the results; traceable."""
        env: dict[Value, Any] = dict(zip(self.inputs, arrays, strict=True))
        found = iter(evaluate(self.nodes, (*self.numbers, *self.scalars), env))
        return (
            [as_array(next(found)) for _ in self.numbers],
            [as_scalar(next(found), value) for value in self.scalars],
        )
