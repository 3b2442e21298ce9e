"""Divides a leaf's gradient, chunk by chunk, into elements to send and the rest.

    magnitudes ─► threshold (counted, not sorted) ─► a bit an element ─► indices, values

Invariant: the chunks are the store's, in its order; one chunk's result depends on no
other chunk. `select` returns exactly `k` different indices in ascending order, relative
to the chunk; NaN counts as larger than Inf, and Inf as larger than all other values.
``optax.chain(sparsify(c), tx)`` gives the optimizer the same gradients as
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

from jaxinf.compress.topk import TopK
from jaxinf.layout import Chunk, LeafGrid, choose_grid
from jaxinf.typing import Array, PyTree


@dataclass(frozen=True)
class SparseGradient:
    """A run of a gradient with few elements that are not zero.

    Attributes:
      indices: ``(k,)`` int32, ascending, below `num_elements`.
      values: ``(k,)`` float32, bfloat16 or float16.
      num_elements: length of the run.
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

    def put_into(self, dense: Array) -> None:
        """Writes the values at their indices; other elements do not change."""
        dense[self.indices] = self.values


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
      shape: shape of the leaf or the shard.
      indices: ``(k,)`` int32: those of the first chunk, then of the second, ….
      values: ``(k,)``, in the same order.
      counts: number of elements sent of each chunk.
      lengths: length of each chunk at the time of the compression.
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
        last = int(self._ends[number])
        own = slice(last - self.counts[number], last)
        return SparseGradient(self.indices[own], self.values[own], self.lengths[number])


# Low bits of the threshold that stay undecided: 2**15 of 2**23 is 0.4 %.
_TOLERANCE = 1 << 15
# Shorter blocks are sorted, because a threshold would be no faster.
_MIN_SEARCHED = 1 << 14
_NUM_SAMPLED = 1 << 13
_WORD = 32
_LARGEST = 0x7FFFFFFF


def select(block: jax.Array, k: int) -> jax.Array:
    """Returns indices of the `k` largest magnitudes; of a long block, nearly.

    The bits of non-negative floats, as integers, have the order of the floats. So a
    threshold is found by bisecting an interval of integers, with one count in each
    step: a few passes over memory instead of a sort.

    Returns:
      ``(k,)`` int32, rising.
    """
    if block.size < _MIN_SEARCHED:
        return jnp.sort(lax.top_k(jnp.abs(block), k)[1])
    padding = -block.size % _WORD
    magnitudes = lax.bitcast_convert_type(jnp.abs(block), jnp.int32)
    magnitudes = jnp.minimum(magnitudes, _LARGEST - 1)
    low, high = _threshold(magnitudes, k)
    # -1 is below every threshold.
    magnitudes = jnp.pad(magnitudes, (0, padding), constant_values=-1)
    above = _packed(magnitudes >= high)
    near = _packed((magnitudes >= low) & (magnitudes < high))
    num_above = jnp.sum(lax.population_count(above).astype(jnp.int32))
    chosen = above | _first_bits(near, k - num_above)
    return _positions(chosen, jnp.arange(k, dtype=jnp.int32))


def _threshold(magnitudes: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Finds bounds: fewer than `k` elements from `high` on, at least `k` from `low`.

    They are closer than the tolerance. A sample gives the starting point; it affects
    only the number of counts.
    """
    stride = magnitudes.size // _NUM_SAMPLED
    sample = jnp.sort(magnitudes[:: max(1, stride)])
    share = sample.size * k / magnitudes.size
    ranks = [int(0.8 * share) - 8, int(1.2 * share) + 8]

    def narrowed(bounds: tuple[jax.Array, jax.Array], at: jax.Array) -> tuple:
        low, high = bounds
        enough = jnp.sum(magnitudes >= at, dtype=jnp.int32) >= k
        return jnp.where(enough, at, low), jnp.where(enough, high, at)

    def halved(bounds: tuple[jax.Array, jax.Array]) -> tuple:
        return narrowed(bounds, bounds[0] + (bounds[1] - bounds[0]) // 2)

    bounds = (jnp.int32(0), jnp.int32(_LARGEST))
    for rank in ranks:
        if 0 <= rank < sample.size:
            guess = jnp.clip(sample[sample.size - 1 - rank], *bounds)
            bounds = narrowed(bounds, guess)
    return lax.while_loop(lambda b: b[1] - b[0] > _TOLERANCE, halved, bounds)


def _packed(flags: jax.Array) -> jax.Array:
    """Packs 32 flags into a word, the first in the lowest bit."""
    bits = flags.reshape(-1, _WORD).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(_WORD, dtype=jnp.uint32), 1, dtype=jnp.uint32)


def _first_bits(words: jax.Array, number: jax.Array) -> jax.Array:
    """Clears all set bits after the first `number`, which is at least 1."""
    last = _positions(words, (number - 1)[None])[0]
    starts = jnp.arange(words.size, dtype=jnp.int32) * _WORD
    kept = jnp.clip(last + 1 - starts, 0, _WORD).astype(jnp.uint32)
    all_bits = jnp.uint32(0xFFFFFFFF)
    shift = jnp.minimum(_WORD - kept, _WORD - 1)  # a shift by 32 is undefined
    return jnp.where(kept == 0, jnp.uint32(0), words & (all_bits >> shift))


def _positions(words: jax.Array, ranks: jax.Array) -> jax.Array:
    """Returns the positions of the set bits with these numbers, counted from 0."""
    counts = lax.population_count(words).astype(jnp.int32)
    ends = jnp.cumsum(counts)
    chosen = jnp.searchsorted(ends, ranks, side="right").astype(jnp.int32)
    chosen = jnp.minimum(chosen, words.size - 1)
    left = ranks - (ends[chosen] - counts[chosen])
    word, position = words[chosen], jnp.zeros_like(ranks)
    for width in (16, 8, 4, 2, 1):  # choose the half that has the bit
        lower = word & jnp.uint32((1 << width) - 1)
        in_lower = lax.population_count(lower).astype(jnp.int32)
        is_upper = left >= in_lower
        left = jnp.where(is_upper, left - in_lower, left)
        word = jnp.where(is_upper, word >> width, lower)
        position += jnp.where(is_upper, width, 0)
    return chosen * _WORD + position


# --- of a leaf -----------------------------------------------------------------------


def compress_leaf(
    gradient: jax.Array,
    grid: LeafGrid,
    top_k: TopK,
    feedback: jax.Array | None = None,
) -> tuple[SparseLeaf, jax.Array | None]:
    """Selects the elements to send; traceable.

    Args:
      gradient: the leaf, or a JAX device's shard of it.
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
            indices = select(block, k)
            exact = block[indices]
            values = _rounded(exact, top_k.value_dtype(dtype))
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
    values = _joined([piece[1] for piece in pieces], top_k.value_dtype(dtype))
    lengths = tuple(chunk.num_elements for chunk in chunks)
    sent = SparseLeaf(tuple(gradient.shape), indices, values, counts, lengths)
    if feedback is None:
        return sent, None
    return sent, _assembled(total, chunks, [piece[2] for piece in pieces])


def dense_leaf(sent: SparseLeaf, like: jax.Array, grid: LeafGrid) -> jax.Array:
    """Returns the dense gradient that the CSDs use, with zeros between sent elements.

    `like` is the leaf, for its shape and dtype.
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
    """Zeroes the elements that a compression does not send; for runs in memory."""

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
