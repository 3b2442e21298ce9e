"""The same compression with all state in memory: an optax transformation.

Invariant: ``optax.chain(sparsify(c), tx)`` gives the optimizer the same gradients as
  ``smart_update(tx, store, compress=c)``: bit for bit if they are float32, otherwise
  rounded to their own dtype.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxinf.compress.blocks import compress_leaf, dense_leaf
from jaxinf.compress.topk import TopK
from jaxinf.layout import choose_grid
from jaxinf.typing import PyTree


class SparsifyState(NamedTuple):
    """State of `sparsify`.

    Attributes:
      step: int32, updates so far.
      error_feedback: float32 of the leaves' shapes, the sum of elements not sent; empty
        without error feedback.
    """

    step: jax.Array
    error_feedback: PyTree


def sparsify(compression: TopK) -> optax.GradientTransformation:
    """Zeroes the elements that a compression does not send; for runs without a store.

    Args:
      compression: a result of `jaxinf.top_k`.
    """

    def init(params: PyTree) -> SparsifyState:
        feedback = (
            jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)
            if compression.error_feedback
            else ()
        )
        return SparsifyState(jnp.int32(0), feedback)

    def sent(gradients: list[Any], held: list[Any]) -> tuple[list[Any], list[Any]]:
        all_dense, all_left = [], []
        for gradient, before in zip(gradients, held, strict=True):
            grid = choose_grid(tuple(gradient.shape))
            compressed, left = compress_leaf(gradient, grid, compression, before)
            all_dense.append(dense_leaf(compressed, gradient, grid))
            all_left.append(left)
        return all_dense, all_left

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, SparsifyState]:
        del params
        gradients, treedef = jax.tree.flatten(lax.optimization_barrier(updates))
        held = jax.tree.leaves(state.error_feedback) or [None] * len(gradients)
        if compression.warmup_steps:
            is_dense = state.step < compression.warmup_steps
            results = lax.cond(is_dense, lambda *both: both, sent, gradients, held)
        else:
            results = sent(gradients, held)
        # Like a link, this keeps XLA from fusing the optimizer with the selection.
        new, left = lax.optimization_barrier(results)
        feedback = jax.tree.structure(state.error_feedback).unflatten(
            left if compression.error_feedback else []
        )
        return treedef.unflatten(new), SparsifyState(state.step + 1, feedback)

    return optax.GradientTransformation(init, update)
