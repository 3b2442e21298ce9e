"""Divides a leaf's gradient, chunk by chunk, into elements to send and the rest.

Invariant: the chunks are the store's, in its order; one chunk's result depends on no
other chunk. ``optax.chain(sparsify(c), tx)`` gives the optimizer the same gradients as
``smart_update(tx, store, compress=c)``: bit for bit if they are float32, otherwise
rounded to their own dtype.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxinf.compress.select import select
from jaxinf.compress.topk import TopK
from jaxinf.compress.wire import SparseLeaf
from jaxinf.layout import Chunk, LeafGrid, choose_grid
from jaxinf.typing import PyTree


def compress_leaf(
    gradient: jax.Array,
    grid: LeafGrid,
    top_k: TopK,
    feedback: jax.Array | None = None,
) -> tuple[SparseLeaf, jax.Array | None]:
    """Selects the elements to send; traceable.

    Args:
      gradient: the leaf, or a JAX device's shard of it.
      grid: its chunks.
      top_k: the compression.
      feedback: float32 of the leaf's shape, the sum of elements not sent before.

    Returns:
      The elements to send, and the new feedback; None without `feedback`.
    """
    dtype = np.dtype(gradient.dtype)
    total = gradient.astype(jnp.float32)
    if feedback is not None:
        total = total + feedback
    chunks = grid.chunks()
    counts = tuple(top_k.num_kept(chunk.num_elements, dtype) for chunk in chunks)
    pieces: list[tuple[Any, ...]] = []
    for k, blocks in _runs(total, chunks, counts):

        def of_block(block: jax.Array, k: int = k) -> tuple[Any, ...]:
            indices = select(block, k, top_k.selection)
            exact = block[indices]
            values = _rounded(exact, top_k._value_dtype(dtype))
            if feedback is None:
                return indices, values
            left = exact - values.astype(jnp.float32)
            return indices, values, _with(block, indices, left)

        if blocks.shape[0] == 1:
            pieces.append(of_block(blocks[0]))
        else:
            results = lax.map(of_block, blocks)
            pieces += [tuple(r[i] for r in results) for i in range(blocks.shape[0])]
    indices = _joined([piece[0] for piece in pieces], jnp.int32)
    values = _joined([piece[1] for piece in pieces], top_k._value_dtype(dtype))
    lengths = tuple(chunk.num_elements for chunk in chunks)
    sent = SparseLeaf(tuple(gradient.shape), indices, values, counts, lengths)
    if feedback is None:
        return sent, None
    return sent, _assembled(total, chunks, [piece[2] for piece in pieces])


def dense_leaf(sent: SparseLeaf, like: jax.Array, grid: LeafGrid) -> jax.Array:
    """Returns the dense gradient that the CSDs use, with zeros between sent elements.

    Args:
      sent: the elements sent of one leaf.
      like: the leaf, for its shape and dtype.
      grid: its chunks.
    """
    chunks, first, blocks = grid.chunks(), 0, []
    for chunk, count in zip(chunks, sent.counts, strict=True):
        part = slice(first, first + count)
        first += count
        block = jnp.zeros(chunk.num_elements, like.dtype)
        values = sent.values[part].astype(like.dtype)
        blocks.append(_with(block, sent.indices[part], values))
    return _assembled(jnp.zeros(like.shape, like.dtype), chunks, blocks)


def _with(block: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    """Replaces the elements at ascending indices."""
    return block.at[indices].set(values, indices_are_sorted=True, unique_indices=True)


def _runs(
    leaf: jax.Array, chunks: Sequence[Chunk], counts: Sequence[int]
) -> list[tuple[int, jax.Array]]:
    """Groups neighbouring chunks of one length, with the number of elements to send."""
    pairs = zip(chunks, counts, strict=True)
    return [
        (k, jnp.stack([leaf[chunk.slices].reshape(-1) for chunk, _ in group]))
        for (_, k), group in groupby(pairs, key=lambda p: (p[0].num_elements, p[1]))
    ]


def _assembled(
    leaf: jax.Array, chunks: Sequence[Chunk], blocks: Sequence[jax.Array]
) -> jax.Array:
    if len(chunks) == 1:
        return blocks[0].reshape(leaf.shape)
    for chunk, block in zip(chunks, blocks, strict=True):
        leaf = leaf.at[chunk.slices].set(block.reshape(chunk.extent))
    return leaf


def _joined(parts: Sequence[jax.Array], dtype: Any) -> jax.Array:
    return jnp.concatenate(parts) if parts else jnp.zeros((0,), dtype)


def _rounded(values: jax.Array, dtype: np.dtype) -> jax.Array:
    """Rounds to the link's dtype; a finite number stays finite."""
    if dtype != np.float16:
        return values.astype(dtype)
    largest = float(np.finfo(np.float16).max)
    limited = jnp.clip(values, -largest, largest)
    return jnp.where(jnp.isfinite(values), limited, values).astype(dtype)


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
