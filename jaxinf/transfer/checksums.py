"""CRC-32C of buffers, and of a concatenation from the checksums of its parts.

Invariant: `crc32c_combine` of any division into parts is `crc32c` of the whole.
"""

from collections.abc import Iterable
from functools import lru_cache

import crc32c as _crc32c

from jaxinf.typing import Array

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, bits reversed
_BITS = range(32)


def crc32c(array: Array) -> int:
    """Returns the CRC-32C of a contiguous array, by the processor's instruction.

    Releases the GIL for all but short arrays. Thread-safe.
    """
    return _crc32c.crc32c(array.reshape(-1).view("u1").data)


def crc32c_combine(parts: Iterable[tuple[int, int]]) -> int:
    """Returns the CRC-32C of a whole from those of its parts.

    Args:
      parts: the CRC-32C and the length in bytes of each part, in order.
    """
    whole = 0
    for checksum, num_bytes in parts:
        whole = _apply(_zeros(num_bytes), whole) ^ checksum
    return whole


_Operator = tuple[int, ...]
"""A linear map of 32 bits, as the images of the single bits."""


def _apply(operator: _Operator, bits: int) -> int:
    result = 0
    for column in operator:
        if bits & 1:
            result ^= column
        bits >>= 1
    return result


@lru_cache(maxsize=256)
def _zeros(num_bytes: int) -> _Operator:
    """Returns the effect on a checksum of appending a number of zero bytes."""
    result: _Operator = tuple(1 << bit for bit in _BITS)
    doubling = _one_zero_bit()
    for _ in range(3):
        doubling = _squared(doubling)
    while num_bytes:
        if num_bytes & 1:
            result = tuple(_apply(doubling, column) for column in result)
        doubling = _squared(doubling)
        num_bytes >>= 1
    return result


def _one_zero_bit() -> _Operator:
    return (_POLYNOMIAL, *(1 << bit for bit in range(31)))


def _squared(operator: _Operator) -> _Operator:
    return tuple(_apply(operator, column) for column in operator)
