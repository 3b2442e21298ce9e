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
    """A kernel's inputs beside state and gradient, from the prologue; a pytree.

    Its arrays are JAX's, or NumPy's on the host.

    Attributes:
      scalars: 0-d: float32, int32, uint32 or bool, as ``Kernel.scalar_dtypes``.
      arrays: of the leaf's shape, or 1-D as long as a subgroup; almost always none.
    """

    scalars: tuple[Any, ...] = ()
    arrays: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class Prologue:
    """A graph, and which of its values are wanted; made by `make_prologue`.

    Attributes:
      scalar_state: The new scalar state.
      leaves: The body of each leaf, which takes its `scalars` and `arrays`.
      outputs: All that is wanted: the scalar state, and what the leaves take.
    """

    nodes: tuple[Node, ...]
    inputs: Sequence[Value]
    scalar_state: Sequence[Value]
    leaves: Sequence[BodyBuilder]
    outputs: Sequence[Value]

    @property
    def read(self) -> set[Value]:
        """The values, inputs among them, on which an output depends."""
        return {v for node in self.nodes for v in node.inputs}.union(self.outputs)

    def __call__(
        self, inputs: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], list[LeafInputs]]:
        """Computes the new scalar state and the kernels' inputs; traceable."""
        env: dict[Value, Any] = dict(zip(self.inputs, inputs, strict=True))
        results = evaluate(self.nodes, self.outputs, env)
        found = dict(zip(self.outputs, results, strict=True))
        shared = dict.fromkeys(value for leaf in self.leaves for value in leaf.scalars)
        scalars = {value: as_scalar(found[value], value) for value in shared}
        leaves = []
        for leaf in self.leaves:
            shape = leaf.info.shape
            arrays = tuple(jnp.broadcast_to(found[v], shape) for v in leaf.arrays)
            leaves.append(LeafInputs(tuple(scalars[v] for v in leaf.scalars), arrays))
        return [jnp.asarray(found[value]) for value in self.scalar_state], leaves


def make_prologue(
    nodes: Sequence[Node],
    inputs: Sequence[Value],
    scalar_state: Sequence[Value],
    leaves: Sequence[BodyBuilder],
) -> Prologue:
    """Returns the nodes that scalar state and bodies need, without those of bodies."""
    taken = (value for leaf in leaves for value in (*leaf.scalars, *leaf.arrays))
    outputs = [*scalar_state, *taken]
    return Prologue(prune(nodes, outputs), inputs, scalar_state, leaves, outputs)


def as_scalar(found: Any, value: Value) -> jax.Array:
    """Returns the array of a prologue's value as a scalar that a kernel takes."""
    return jnp.reshape(found, ()).astype(scalar_dtype(value.dtype))


def key_data(value: jax.Array) -> jax.Array:
    """Returns the numbers of typed PRNG keys; other arrays as they are."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(value)
    return value


def typed_like(value: Any, like: Any) -> jax.Array:
    """Reverses `key_data`, for keys like others, or like their shape."""
    is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    if not is_key or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    kinds: list[Any] = []  # only a key itself tells, if it is traced
    aval = jax.ShapeDtypeStruct(like.shape, like.dtype)
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), aval)
    return jax.random.wrap_key_data(jnp.asarray(value), impl=kinds[0])
