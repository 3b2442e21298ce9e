"""The random bits of `jax.random`, element by element.

On a CPU, JAX computes Threefry in a loop over whole arrays, which takes three times the
memory of its result. Written out, XLA fuses it with the operations that follow, and
nothing but the result is in memory. Compilation takes longer.

Invariant: the bits are those of `jax.random.bits`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxinf.compat import counts_elements

__all__ = ["can_fuse", "fused_bits"]

# Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 4.2.
_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_NUM_GROUPS = 5


def can_fuse(key: Any, bit_width: int, shape: Sequence[int]) -> bool:
    """Whether `fused_bits` gives the bits that JAX does.

    Args:
      key: Abstract value of the random key.
      bit_width: Bits of an element.
      shape: Shape of the result.
    """
    return (
        key.shape == ()
        and bit_width == 32
        and math.prod(shape) < 1 << 32
        and counts_elements(key.dtype)
    )


def fused_bits(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The bits of ``jax.random.bits(key, shape)``, uint32."""
    first, second = jax.random.key_data(key)
    keys = (first, second, first ^ second ^ jnp.uint32(_PARITY))
    x = jnp.full(shape, keys[0])  # the upper half of the count is 0
    y = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + keys[1]
    for group in range(_NUM_GROUPS):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = _rotated(y, distance) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x ^ y


def _rotated(x: jax.Array, distance: int) -> jax.Array:
    return (x << distance) | (x >> (32 - distance))
