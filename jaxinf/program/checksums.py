"""CRC-32C of an array as a JAX program, for state that a JAX device has computed.

    elements ─► each one's checksum ─► halves joined, again and again ─► one number

A checksum of two parts is that of the second, and that of the first moved past as many
zero bits as the second has; this move is linear in the checksum's bits.

Invariant: the numbers are those of `jaxinf.transfer.crc32c`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_POLYNOMIAL = 0x82F63B78
_BITS = 32
_ALL = np.uint32(0xFFFFFFFF)


def crc32c(array: jax.Array) -> jax.Array:
    """Returns the CRC-32C of an array's bytes, uint32; traceable.

    It takes temporary memory of 8 bytes an element.

    Args:
      array: Any length; elements of 1, 2 or 4 bytes.
    """
    item_bits = 8 * array.dtype.itemsize
    bits = lax.bitcast_convert_type(array.reshape(-1), f"uint{item_bits}")
    sums = _moved(bits.astype(jnp.uint32), item_bits)
    length = item_bits
    while sums.size > 1:
        if sums.size % 2:  # zeros before all else change nothing
            sums = jnp.concatenate([jnp.zeros(1, jnp.uint32), sums])
        pairs = sums.reshape(-1, 2)
        sums = _moved(pairs[:, 0], length) ^ pairs[:, 1]
        sums = lax.optimization_barrier(sums)  # not each level anew for the next
        length *= 2
    begin = _move_once(int(_ALL), array.size * item_bits)
    return sums.sum(dtype=jnp.uint32) ^ np.uint32(begin) ^ _ALL


def _moved(sums: jax.Array, num_bits: int) -> jax.Array:
    """Moves checksums past so many zero bits."""
    moved = jnp.zeros_like(sums)
    for bit, column in enumerate(_columns(num_bits)):
        chosen = jnp.uint32(0) - ((sums >> bit) & 1)
        moved ^= chosen & np.uint32(column)
    return moved


@functools.cache
def _columns(num_bits: int) -> tuple[int, ...]:
    """Where each bit of a checksum goes on its way past so many zero bits."""
    if num_bits == 1:
        return _POLYNOMIAL, *(1 << bit for bit in range(_BITS - 1))
    half = _columns(num_bits // 2)
    columns = [_applied(half, column) for column in half]
    if num_bits % 2:
        columns = [_applied(_columns(1), column) for column in columns]
    return tuple(columns)


def _move_once(value: int, num_bits: int) -> int:
    return _applied(_columns(num_bits), value) if num_bits else value


def _applied(columns: tuple[int, ...], value: int) -> int:
    result = 0
    for bit, column in enumerate(columns):
        if value >> bit & 1:
            result ^= column
    return result
