"""CRC-32C of buffers, and of a concatenation from the checksums of its parts.

Invariant: `crc32c_combine` of any division into parts is `crc32c` of the whole.
"""

from collections.abc import Iterable
from functools import lru_cache

import crc32c as _crc32c

from jaxinf.typing import Array

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, bits reversed


def crc32c(data: Array | bytes) -> int:
    """Returns the CRC-32C of a contiguous array, or of bytes.

    Uses the processor's instruction, and releases the GIL for all but short ones.
    """
    raw = data if isinstance(data, bytes) else data.reshape(-1).view("u1").data
    return _crc32c.crc32c(raw)


def crc32c_combine(parts: Iterable[tuple[int, int]]) -> int:
    """Returns the CRC-32C of a whole from checksum and bytes of each part, in order."""
    whole = 0
    for checksum, num_bytes in parts:
        whole = _product(_zeros(num_bytes), whole) ^ checksum
    return whole


def _product(a: int, b: int) -> int:
    """Multiplies polynomials over GF(2) modulo Castagnoli's; bit 31 is x to the 0."""
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result


@lru_cache(maxsize=256)
def _zeros(num_bytes: int) -> int:
    """Returns x to the number of bits: what appending so many zeros multiplies by."""
    result, square = 1 << 31, 1 << 23  # 1, and x to the 8
    while num_bytes:
        if num_bytes & 1:
            result = _product(square, result)
        square = _product(square, square)
        num_bytes >>= 1
    return result
