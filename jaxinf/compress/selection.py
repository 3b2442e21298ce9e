"""Selects the largest elements of a block without sorting it.

    magnitudes ─► threshold (counted, not sorted) ─► a bit an element ─► indices

Invariant: exactly `k` different indices are returned, in ascending order. NaN counts as
larger than Inf, and Inf as larger than all other values.
"""

import jax
import jax.numpy as jnp
from jax import lax

# Low bits of the threshold that stay undecided: 2**15 of 2**23 is 0.4 %.
_TOLERANCE = 1 << 15
# Shorter blocks are sorted, because a threshold would be no faster.
_MIN_SEARCHED = 1 << 14
_NUM_SAMPLED = 1 << 13
_WORD_BITS = 32
_LARGEST = 0x7FFFFFFF


def select_largest(block: jax.Array, k: int) -> jax.Array:
    """Returns the indices of the `k` largest magnitudes; of a long block, nearly.

    The bits of non-negative floats, as integers, have the order of the floats. So a
    threshold is found by bisecting an interval of integers, with one count in each
    step: a few passes over memory instead of a sort. All elements above it are chosen,
    and the first ones near it.

    Returns:
      ``(k,)`` int32, ascending.
    """
    if block.size < _MIN_SEARCHED:
        return jnp.sort(lax.top_k(jnp.abs(block), k)[1])
    padding = -block.size % _WORD_BITS
    magnitudes = lax.bitcast_convert_type(jnp.abs(block), jnp.int32)
    magnitudes = jnp.minimum(magnitudes, _LARGEST - 1)
    low, high = _find_threshold(magnitudes, k)
    # -1 is below every threshold.
    magnitudes = jnp.pad(magnitudes, (0, padding), constant_values=-1)
    above = _pack_bits(magnitudes >= high)
    near = _pack_bits((magnitudes >= low) & (magnitudes < high))
    num_above = jnp.sum(lax.population_count(above).astype(jnp.int32))
    chosen = above | _keep_first_bits(near, k - num_above)
    return _find_set_bits(chosen, jnp.arange(k, dtype=jnp.int32))


def _find_threshold(magnitudes: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Finds bounds: fewer than `k` elements from `high` on, at least `k` from `low`.

    They are closer than the tolerance. A sample gives the starting point; it affects
    only the number of counts.
    """
    stride = magnitudes.size // _NUM_SAMPLED
    sample = jnp.sort(magnitudes[:: max(1, stride)])
    sample_k = sample.size * k / magnitudes.size

    def narrowed(bounds: tuple[jax.Array, jax.Array], guess: jax.Array) -> tuple:
        low, high = bounds
        is_low = jnp.sum(magnitudes >= guess, dtype=jnp.int32) >= k
        return jnp.where(is_low, guess, low), jnp.where(is_low, high, guess)

    def halved(bounds: tuple[jax.Array, jax.Array]) -> tuple:
        return narrowed(bounds, bounds[0] + (bounds[1] - bounds[0]) // 2)

    bounds = (jnp.int32(0), jnp.int32(_LARGEST))
    for rank in (int(0.8 * sample_k) - 8, int(1.2 * sample_k) + 8):
        if 0 <= rank < sample.size:
            guess = jnp.clip(sample[sample.size - 1 - rank], *bounds)
            bounds = narrowed(bounds, guess)
    return lax.while_loop(lambda b: b[1] - b[0] > _TOLERANCE, halved, bounds)


def _pack_bits(flags: jax.Array) -> jax.Array:
    """Packs 32 flags into a word, the first in the lowest bit."""
    bits = flags.reshape(-1, _WORD_BITS).astype(jnp.uint32)
    return jnp.sum(
        bits << jnp.arange(_WORD_BITS, dtype=jnp.uint32), 1, dtype=jnp.uint32
    )


def _keep_first_bits(words: jax.Array, count: jax.Array) -> jax.Array:
    """Clears all set bits after the first `count`, which is at least 1."""
    last = _find_set_bits(words, (count - 1)[None])[0]
    starts = jnp.arange(words.size, dtype=jnp.int32) * _WORD_BITS
    kept = jnp.clip(last + 1 - starts, 0, _WORD_BITS).astype(jnp.uint32)
    all_bits = jnp.uint32(0xFFFFFFFF)
    shift = jnp.minimum(_WORD_BITS - kept, _WORD_BITS - 1)  # a shift by 32 is undefined
    return jnp.where(kept == 0, jnp.uint32(0), words & (all_bits >> shift))


def _find_set_bits(words: jax.Array, ranks: jax.Array) -> jax.Array:
    """Returns the positions of the set bits of these ranks, counted from 0."""
    counts = lax.population_count(words).astype(jnp.int32)
    ends = jnp.cumsum(counts)
    number = jnp.searchsorted(ends, ranks, side="right").astype(jnp.int32)
    number = jnp.minimum(number, words.size - 1)
    rank_in_word = ranks - (ends[number] - counts[number])
    word, position = words[number], jnp.zeros_like(ranks)
    for width in (16, 8, 4, 2, 1):  # choose the half that has the bit
        lower = word & jnp.uint32((1 << width) - 1)
        in_lower = lax.population_count(lower).astype(jnp.int32)
        is_upper = rank_in_word >= in_lower
        rank_in_word = jnp.where(is_upper, rank_in_word - in_lower, rank_in_word)
        word = jnp.where(is_upper, word >> width, lower)
        position += jnp.where(is_upper, width, 0)
    return number * _WORD_BITS + position
