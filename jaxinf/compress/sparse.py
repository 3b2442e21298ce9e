"""A leaf's gradient as the elements that are sent and the rest, chunk by chunk.

    total = gradient + error feedback
      ├─► sent: of each chunk the largest elements, as indices and rounded values
      └─► new error feedback: total - what was sent

Invariant: the chunks are the store's, in its order; one chunk's result depends on no
other chunk. ``optax.chain(sparsify(c), tx)`` gives the optimizer the same gradients as
``smart_update(tx, store, compress=c)``: bit for bit if they are float32, otherwise
rounded to their own dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxinf.compress.selection import select_largest
from jaxinf.compress.topk import TopK
from jaxinf.layout import Chunk, LeafGrid, choose_grid
from jaxinf.typing import Array, PyTree


@dataclass(frozen=True)
class SparseGradient:
    """A run of a gradient with few elements that are not zero.

    Attributes:
      indices: ``(k,)`` int32, ascending, below `num_elements`.
      values: ``(k,)`` float32, bfloat16 or float16.
      num_elements: Length of the run.
    """

    indices: Array
    values: Array
    num_elements: int

    @property
    def nbytes(self) -> int:
        """Bytes on the link."""
        return self.indices.nbytes + self.values.nbytes

    def part(self, start: int, stop: int) -> "SparseGradient":
        """Returns the elements from `start` to `stop`, with indices from `start` on."""
        if (start, stop) == (0, self.num_elements):
            return self
        first, last = np.searchsorted(self.indices, (start, stop))
        indices = self.indices[first:last] - np.int32(start)
        return SparseGradient(indices, self.values[first:last], stop - start)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("indices", "values"),
    meta_fields=("shape", "counts", "lengths"),
)
@dataclass(frozen=True)
class SparseLeaf:
    """A leaf's gradient, or a shard's, as a JAX device sends it; a pytree.

    Its arrays are JAX's on the JAX device and NumPy's on the host.

    Attributes:
      indices: ``(k,)`` int32: those of the first chunk, then of the second, ….
      values: ``(k,)``, in the same order.
      counts: Number of elements sent of each chunk.
      lengths: Length of each chunk at the time of the compression.
    """

    shape: tuple[int, ...]
    indices: Any
    values: Any
    counts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the link."""
        return self.indices.nbytes + self.values.nbytes

    @cached_property
    def _ends(self) -> Array:
        return np.cumsum(self.counts)

    def chunk(self, number: int) -> SparseGradient:
        """Returns the elements sent of a chunk, by its number in the leaf or shard."""
        stop = int(self._ends[number])
        sent = slice(stop - self.counts[number], stop)
        indices, values = self.indices[sent], self.values[sent]
        return SparseGradient(indices, values, self.lengths[number])


def compress_leaf(
    gradient: jax.Array,
    grid: LeafGrid,
    compression: TopK,
    feedback: jax.Array | None = None,
) -> tuple[SparseLeaf, jax.Array | None]:
    """Selects the elements to send; traceable.

    Args:
      gradient: The leaf, or a JAX device's shard of it.
      feedback: float32 of the leaf's shape, the sum of elements not sent before.

    Returns:
      The elements to send, and the new feedback; None without `feedback`.
    """
    dtype = np.dtype(gradient.dtype)
    value_dtype = compression.value_dtype(dtype)
    total = gradient.astype(jnp.float32)
    if feedback is not None:
        total = total + feedback
    chunks = grid.chunks()
    counts = tuple(compression.num_kept(chunk.num_elements, dtype) for chunk in chunks)
    results: list[tuple[jax.Array, ...]] = []  # of each chunk
    for k, blocks in _stack_equal_chunks(total, chunks, counts):
        compress = partial(
            _compress_block, k=k, dtype=value_dtype, has_feedback=feedback is not None
        )
        if blocks.shape[0] == 1:
            results.append(compress(blocks[0]))
        else:
            stacked = lax.map(compress, blocks)
            results += [tuple(x[i] for x in stacked) for i in range(blocks.shape[0])]
    sent = SparseLeaf(
        tuple(gradient.shape),
        indices=_concatenate([result[0] for result in results], jnp.int32),
        values=_concatenate([result[1] for result in results], value_dtype),
        counts=counts,
        lengths=tuple(chunk.num_elements for chunk in chunks),
    )
    if feedback is None:
        return sent, None
    return sent, _assemble(total, chunks, [result[2] for result in results])


def _compress_block(
    block: jax.Array, *, k: int, dtype: np.dtype, has_feedback: bool
) -> tuple[jax.Array, ...]:
    """Returns a chunk's indices and values to send, and its new feedback if wanted."""
    indices = select_largest(block, k)
    exact = block[indices]
    values = _round_values(exact, dtype)
    if not has_feedback:
        return indices, values
    rounding_errors = exact - values.astype(jnp.float32)
    return indices, values, _scatter(block, indices, rounding_errors)


def dense_leaf(sent: SparseLeaf, like: jax.Array, grid: LeafGrid) -> jax.Array:
    """Returns the dense gradient that the CSDs use, with zeros between sent elements.

    `like` is the leaf, for its shape and dtype.
    """
    chunks, first, blocks = grid.chunks(), 0, []
    for chunk, count in zip(chunks, sent.counts, strict=True):
        part = slice(first, first + count)
        first += count
        zeros = jnp.zeros(chunk.num_elements, like.dtype)
        values = sent.values[part].astype(like.dtype)
        blocks.append(_scatter(zeros, sent.indices[part], values))
    return _assemble(jnp.zeros(like.shape, like.dtype), chunks, blocks)


def _scatter(block: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    """Replaces the elements at ascending indices."""
    return block.at[indices].set(values, indices_are_sorted=True, unique_indices=True)


def _stack_equal_chunks(
    leaf: jax.Array, chunks: Sequence[Chunk], counts: Sequence[int]
) -> list[tuple[int, jax.Array]]:
    """Stacks neighbouring chunks of one length, with the number of elements to send."""
    pairs = zip(chunks, counts, strict=True)
    return [
        (k, jnp.stack([leaf[chunk.slices].reshape(-1) for chunk, _ in group]))
        for (_, k), group in groupby(pairs, key=lambda p: (p[0].num_elements, p[1]))
    ]


def _assemble(
    leaf: jax.Array, chunks: Sequence[Chunk], blocks: Sequence[jax.Array]
) -> jax.Array:
    if len(chunks) == 1:
        return blocks[0].reshape(leaf.shape)
    for chunk, block in zip(chunks, blocks, strict=True):
        leaf = leaf.at[chunk.slices].set(block.reshape(chunk.extent))
    return leaf


def _concatenate(parts: Sequence[jax.Array], dtype: Any) -> jax.Array:
    return jnp.concatenate(parts) if parts else jnp.zeros((0,), dtype)


def _round_values(values: jax.Array, dtype: np.dtype) -> jax.Array:
    """Rounds to the link's dtype; a finite number stays finite."""
    if dtype != np.float16:
        return values.astype(dtype)
    largest = float(np.finfo(np.float16).max)
    limited = jnp.clip(values, -largest, largest)
    return jnp.where(jnp.isfinite(values), limited, values).astype(dtype)


class SparsifyState(NamedTuple):
    """Number of updates, and sums of elements not sent; empty without feedback."""

    step: jax.Array  # int32
    error_feedback: PyTree  # float32, of the leaves' shapes


def sparsify(compression: TopK) -> optax.GradientTransformation:
    """Zeroes the elements that a compression does not send; for runs in memory."""

    def init(params: PyTree) -> SparsifyState:
        if not compression.error_feedback:
            return SparsifyState(jnp.int32(0), ())
        zeros = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)
        return SparsifyState(jnp.int32(0), zeros)

    def compress(gradients: list[Any], feedbacks: list[Any]) -> tuple[Any, Any]:
        dense, new_feedbacks = [], []
        for gradient, feedback in zip(gradients, feedbacks, strict=True):
            grid = choose_grid(tuple(gradient.shape))
            sent, new_feedback = compress_leaf(gradient, grid, compression, feedback)
            dense.append(dense_leaf(sent, gradient, grid))
            new_feedbacks.append(new_feedback)
        return dense, new_feedbacks

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, SparsifyState]:
        del params
        gradients, treedef = jax.tree.flatten(lax.optimization_barrier(updates))
        feedbacks = jax.tree.leaves(state.error_feedback) or [None] * len(gradients)
        if compression.warmup_steps:
            is_dense = state.step < compression.warmup_steps
            results = lax.cond(
                is_dense, lambda *dense: dense, compress, gradients, feedbacks
            )
        else:
            results = compress(gradients, feedbacks)
        # Like a link, this keeps XLA from fusing the optimizer with the selection.
        gradients, feedbacks = lax.optimization_barrier(results)
        structure = jax.tree.structure(state.error_feedback)
        new = structure.unflatten(feedbacks if compression.error_feedback else [])
        return treedef.unflatten(gradients), SparsifyState(state.step + 1, new)

    return optax.GradientTransformation(init, update)
