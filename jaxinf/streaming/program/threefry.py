"""The random bits of `jax.random`, element by element.

On a CPU, JAX computes Threefry in a loop over whole arrays, which takes three times the
memory of its result. Written out, XLA fuses it with the operations that follow, and
nothing but the result is in memory; it may be a block. Compilation takes longer.

Invariant: the bits are those of `jax.random.bits`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxinf.compat import counts_elements

# Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 4.2.
_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_NUM_GROUPS = 5
_DTYPES = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def can_fuse(key: Any, bit_width: int, shape: Sequence[int]) -> bool:
    """Whether `fused_bits` gives the bits that JAX does.

    Args:
      shape: Shape of the result for each key.
    """
    return (
        bit_width in _DTYPES
        and math.prod(shape) < 1 << 32
        and counts_elements(key.dtype)
    )


def fused_bits(
    key: jax.Array,
    shape: Sequence[int],
    bit_width: int = 32,
    *,
    axis: int = 0,
    start: Any = 0,
    length: int | None = None,
) -> jax.Array:
    """The bits of ``jax.random.bits(key, shape)`` for each key, or a block of them.

    Args:
      key: The keys; their axes are the first of the result.
      shape: Shape of the whole result for each key.
      bit_width: Bits of an element: 8, 16 or 32.
      axis: Axis of `shape` that the block is a part of.
      start: First position of the block on it, an int32.
      length: The block's length; by default all of it.

    Returns:
      Unsigned integers.
    """
    own = list(shape)
    if length is not None:
        own[axis] = length
    count = jnp.uint32(0)  # the upper half is 0
    for dim in range(len(shape)):
        at = jax.lax.broadcasted_iota(jnp.uint32, own, dim)
        if dim == axis:
            at = at + jnp.asarray(start, jnp.uint32)
        count = count + at * jnp.uint32(math.prod(shape[dim + 1 :]))
    data = jax.random.key_data(key)
    each = (*key.shape, *(1 for _ in own))
    first, second = data[..., 0].reshape(each), data[..., 1].reshape(each)
    keys = (first, second, first ^ second ^ jnp.uint32(_PARITY))
    x = jnp.broadcast_to(keys[0], (*key.shape, *own))
    y = count + keys[1]
    for group in range(_NUM_GROUPS):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = _rotated(y, distance) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return (x ^ y).astype(_DTYPES[bit_width])


def _rotated(x: jax.Array, distance: int) -> jax.Array:
    return (x << distance) | (x >> (32 - distance))
