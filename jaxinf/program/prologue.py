"""The part of a program that stays in JAX.

Invariant: only nodes that the outputs need are computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinf.program.graph import Node, Value, evaluate, prune
from jaxinf.program.kernel import scalar_dtype
from jaxinf.program.split import BodyBuilder


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LeafInputs:
    """The prologue's inputs for one leaf's kernel; a pytree.

    Attributes:
      scalars: 0-d: float32, int32, uint32 or bool, as ``Kernel.scalar_dtypes``.
      arrays: Arrays of the leaf's shape.
    """

    scalars: tuple[jax.Array, ...]
    arrays: tuple[jax.Array, ...]


@dataclass(frozen=True, eq=False)
class _Wanted:
    """The values that one leaf's kernel reads."""

    shape: tuple[int, ...]
    scalars: tuple[Value, ...]
    arrays: tuple[Value, ...]

    @property
    def values(self) -> tuple[Value, ...]:
        return self.scalars + self.arrays


@dataclass(frozen=True, eq=False)
class Prologue:
    """A pruned graph, and which of its values are the outputs."""

    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    scalar_state: tuple[Value, ...]
    leaves: tuple[_Wanted, ...]

    @classmethod
    def of(
        cls,
        nodes: Sequence[Node],
        inputs: Sequence[Value],
        scalar_state: Sequence[Value],
        leaves: Sequence[BodyBuilder],
    ) -> "Prologue":
        """Prunes `nodes` to those that the new scalar state and the bodies need."""
        own = tuple(
            _Wanted(leaf.info.shape, tuple(leaf.scalars), tuple(leaf.arrays))
            for leaf in leaves
        )
        wanted = [*scalar_state, *(value for leaf in own for value in leaf.values)]
        return cls(prune(nodes, wanted), tuple(inputs), tuple(scalar_state), own)

    @property
    def outputs(self) -> list[Value]:
        """All results: the new scalar state, then the inputs of each body."""
        own = (value for leaf in self.leaves for value in leaf.values)
        return [*self.scalar_state, *own]

    @property
    def read(self) -> set[Value]:
        """The values, inputs among them, on which an output depends."""
        return {v for node in self.nodes for v in node.inputs}.union(self.outputs)

    def __call__(
        self, inputs: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], list[LeafInputs]]:
        """Computes the new scalar state and the kernels' inputs; traceable."""
        env: dict[Value, Any] = dict(zip(self.inputs, inputs, strict=True))
        found = iter(evaluate(self.nodes, self.outputs, env))
        scalar_state = [jnp.asarray(next(found)) for _ in self.scalar_state]
        known: dict[Value, jax.Array] = {}  # leaves share scalars
        leaves = []
        for leaf in self.leaves:
            for value in leaf.scalars:
                one = next(found)
                if value not in known:
                    known[value] = as_scalar(one, value)
            arrays = (jnp.broadcast_to(next(found), leaf.shape) for _ in leaf.arrays)
            scalars = tuple(known[value] for value in leaf.scalars)
            leaves.append(LeafInputs(scalars, tuple(arrays)))
        return scalar_state, leaves


def as_scalar(found: Any, value: Value) -> jax.Array:
    """Returns a number as a kernel takes it, from that of a prologue's value."""
    return jnp.reshape(found, ()).astype(scalar_dtype(value.dtype))


def key_data(value: jax.Array) -> jax.Array:
    """Returns the numbers of typed PRNG keys; other arrays as they are."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(value)
    return value


def typed_like(value: Any, like: Any) -> jax.Array:
    """The reverse of `key_data`, for keys like others, or like their shape."""
    if not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    kinds: list[Any] = []  # only a key itself tells, if it is traced
    aval = jax.ShapeDtypeStruct(like.shape, like.dtype)
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), aval)
    return jax.random.wrap_key_data(jnp.asarray(value), impl=kinds[0])
