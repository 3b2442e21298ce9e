"""The prologue: the part of a program that stays in JAX.

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
    """A kernel's inputs from the prologue; a pytree of JAX's or NumPy's arrays.

    Attributes:
      scalars: 0-d: float32, int32, uint32 or bool, as ``Kernel.scalar_dtypes``.
      arrays: Of the leaf's shape, or 1-D as long as a subgroup; almost always none.
    """

    scalars: tuple[Any, ...] = ()
    arrays: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class Prologue:
    """A graph and its outputs; made by `make_prologue`.

    Attributes:
      leaves: The body of each leaf, which takes its `scalars` and `arrays`.
      outputs: The new scalar state and all that the bodies take.
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
        arrays_of = dict(zip(self.outputs, results, strict=True))
        shared = dict.fromkeys(value for leaf in self.leaves for value in leaf.scalars)
        scalars = {value: as_scalar(arrays_of[value], value) for value in shared}
        leaves = []
        for leaf in self.leaves:
            shape = leaf.info.shape
            arrays = tuple(jnp.broadcast_to(arrays_of[v], shape) for v in leaf.arrays)
            leaves.append(LeafInputs(tuple(scalars[v] for v in leaf.scalars), arrays))
        return [jnp.asarray(arrays_of[value]) for value in self.scalar_state], leaves


def make_prologue(
    nodes: Sequence[Node],
    inputs: Sequence[Value],
    scalar_state: Sequence[Value],
    leaves: Sequence[BodyBuilder],
) -> Prologue:
    """Returns the nodes that scalar state and bodies need, without those of bodies."""
    inputs_of_bodies = (v for leaf in leaves for v in (*leaf.scalars, *leaf.arrays))
    outputs = [*scalar_state, *inputs_of_bodies]
    return Prologue(prune(nodes, outputs), inputs, scalar_state, leaves, outputs)


def as_scalar(array: Any, value: Value) -> jax.Array:
    """Converts the array of a prologue's value to a scalar that a kernel takes."""
    return jnp.reshape(array, ()).astype(scalar_dtype(value.dtype))


def key_data(value: jax.Array) -> jax.Array:
    """Returns the numbers of typed PRNG keys; other arrays as they are."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(value)
    return value


def typed_like(value: Any, like: Any) -> jax.Array:
    """Reverses `key_data`; `like` is an array or an aval of the original dtype."""
    is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    if not is_key or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    implementations: list[Any] = []  # only a traced key tells its own
    aval = jax.ShapeDtypeStruct(like.shape, like.dtype)
    jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), aval)
    return jax.random.wrap_key_data(jnp.asarray(value), impl=implementations[0])
