"""The largest elements of a block by magnitude, on the JAX device.

    magnitudes ─► threshold (counted, not sorted) ─► a bit an element ─► indices

Invariant: `select` gives exactly `k` different indices in rising order; NaN counts as
larger than Inf, and Inf than all else.

A non-negative float's bits, as an integer, are ordered as the floats are; so a
threshold can be searched by halving an interval of integers, each step being a count.
That is a few passes over memory instead of a sort.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinf.compress.topk import Selection

__all__ = ["select"]

# Bits of a float32 that are left undecided: 2**15 of 2**23 is 0.4 % of a magnitude.
_TOLERANCE = 1 << 15
# Blocks shorter than this are sorted: there is nothing to win.
_MIN_SEARCHED = 1 << 14
_NUM_SAMPLED = 1 << 13
_WORD = 32
_LARGEST = 0x7FFFFFFF


def select(block: jax.Array, k: int, selection: Selection) -> jax.Array:
    """Indices of the `k` largest magnitudes, to the precision that is asked for.

    Args:
      block: ``(n,)`` float32.
      k: at most n; static.
      selection: see `jaxinf.top_k`.

    Returns:
      ``(k,)`` int32, rising.
    """
    if selection == "exact" or block.size < _MIN_SEARCHED:
        return jnp.sort(lax.top_k(jnp.abs(block), k)[1])
    padding = -block.size % _WORD
    magnitudes = lax.bitcast_convert_type(jnp.abs(block), jnp.int32)
    magnitudes = jnp.minimum(magnitudes, _LARGEST - 1)
    low, high = _threshold(magnitudes, k)
    # -1 is below every threshold.
    magnitudes = jnp.pad(magnitudes, (0, padding), constant_values=-1)
    above = _packed(magnitudes >= high)
    near = _packed((magnitudes >= low) & (magnitudes < high))
    return _set_bits(above | _first_bits(near, k - _num_bits(above)), k)


def _threshold(magnitudes: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Bounds with fewer than `k` elements from `high` on, and at least `k` from `low`.

    They are closer than the tolerance. A sample tells where to begin; it decides
    nothing but how many counts it takes.
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
    """32 flags a word, the first in the lowest bit."""
    bits = flags.reshape(-1, _WORD).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(_WORD, dtype=jnp.uint32), 1, dtype=jnp.uint32)


def _num_bits(words: jax.Array) -> jax.Array:
    return jnp.sum(lax.population_count(words).astype(jnp.int32))


def _first_bits(words: jax.Array, number: jax.Array) -> jax.Array:
    """The words with all set bits after so many cleared; `number` is at least 1."""
    last = _positions(words, (number - 1)[None])[0]
    starts = jnp.arange(words.size, dtype=jnp.int32) * _WORD
    kept = jnp.clip(last + 1 - starts, 0, _WORD).astype(jnp.uint32)
    all_bits = jnp.uint32(0xFFFFFFFF)
    shift = jnp.minimum(_WORD - kept, _WORD - 1)  # a shift by 32 is undefined
    return jnp.where(kept == 0, jnp.uint32(0), words & (all_bits >> shift))


def _set_bits(words: jax.Array, k: int) -> jax.Array:
    """Positions of the `k` bits that are set."""
    return _positions(words, jnp.arange(k, dtype=jnp.int32))


def _positions(words: jax.Array, ranks: jax.Array) -> jax.Array:
    """Of the set bits with these numbers, counted from 0, the positions."""
    counts = lax.population_count(words).astype(jnp.int32)
    ends = jnp.cumsum(counts)
    chosen = jnp.searchsorted(ends, ranks, side="right").astype(jnp.int32)
    chosen = jnp.minimum(chosen, words.size - 1)
    left = ranks - (ends[chosen] - counts[chosen])
    word, position = words[chosen], jnp.zeros_like(ranks)
    for width in (16, 8, 4, 2, 1):  # which half of what is left has the bit
        lower = word & jnp.uint32((1 << width) - 1)
        in_lower = lax.population_count(lower).astype(jnp.int32)
        is_upper = left >= in_lower
        left = jnp.where(is_upper, left - in_lower, left)
        word = jnp.where(is_upper, word >> width, lower)
        position += jnp.where(is_upper, width, 0)
    return chosen * _WORD + position
