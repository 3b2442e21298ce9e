"""Codecs for state in fewer bits, in NumPy, and their arrays.

Invariant: the numbers are those of ``native/cpp/codecs.hpp``, bit for bit;
docs/format.md, "Codecs", defines them. A chunk's scales are one chunk of their own
array, as many whole pages, so that any run of whole blocks' scales that starts on a
page can be read directly.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from jaxinf.layout.grid import Chunk, LeafGrid
from jaxinf.typing import BFLOAT16, Array

CODE_BLOCK = 256
"""Elements that share a scale."""

_SCALES_A_PAGE = 4096 // 4

SCALES_ALIGNMENT_ELEMENTS = CODE_BLOCK * _SCALES_A_PAGE
"""Subgroups of a leaf with scales start at multiples of this many elements."""

_PIECE_ELEMENTS = 1 << 16
_LARGEST = np.float32(2.0**126)  # beyond, the inverse is denormal
_TINY = np.finfo(np.float32).tiny


@dataclass(frozen=True, eq=False)
class CodedSlot:
    """The stored form of a kernel's float32 slot, or of the master params.

    Attributes:
      codes: ``(n,)``: uint8 with scales, bfloat16 without.
      beside: the array that is stored beside the codes: float32 scales, one for each
        256 of them; or ``(n,)`` int16 remainders, the differences that rounding to
        them left, so that decoding is exact. None if only the codes are stored,
        rounded stochastically.
      key: seed of the random bits that decide the rounding; None to round to nearest,
        which gives decoded values their codes again.
      first: number of the first element in its chunk.
    """

    codes: Array
    beside: Array | None = None
    key: int | None = 0
    first: int = 0

    @property
    def remainders(self) -> Array | None:
        """The array of remainders; None if there is another beside, or none."""
        is_rest = self.beside is not None and self.beside.dtype == np.int16
        return self.beside if is_rest else None

    @property
    def scales(self) -> Array | None:
        """The array of scales; None if there is another beside, or none."""
        return self.beside if self.remainders is None else None

    def decode(self) -> Array:
        """``(n,)`` float32; of int8 codes, denormals flushed to zero."""
        if self.beside is None:
            return self.codes.astype(np.float32)
        decode = decode_int8 if self.remainders is None else decode_split
        return decode(self.codes, self.beside)

    def encode(self, values: Array) -> None:
        """Stores ``(n,)`` float32, or shorter floats, in pieces: it takes copies."""
        for start in range(0, values.size, _PIECE_ELEMENTS):
            part = slice(start, start + _PIECE_ELEMENTS)
            self[part]._encode(values[part].astype(np.float32, copy=False))

    def _encode(self, values: Array) -> None:
        if self.beside is None:
            self.codes[...] = encode_bf16(values, self.key, self.first)
        elif self.remainders is None:
            encode_int8(values, self.codes, self.beside, self.key, self.first)
        else:
            encode_split(values, self.codes, self.beside)

    def __getitem__(self, part: slice) -> "CodedSlot":
        """Returns elements of it, from a multiple of 256."""
        start, stop = part.start, part.stop
        size = CODE_BLOCK if self.remainders is None else 1
        beside = self.beside
        if beside is not None:
            beside = beside[start // size : -(-stop // size)]
        return CodedSlot(self.codes[start:stop], beside, self.key, self.first + start)


def encode_int8(
    values: Array, codes: Array, scales: Array, key: int | None, first: int
) -> None:
    """Quantises blocks of 256 by their largest magnitude, rounding stochastically.

    Without a key it rounds to nearest.

    Args:
      values: ``(n,)`` float32.
      codes: ``(n,)`` uint8, written.
      scales: ``(ceil(n / 256),)`` float32, written: the largest magnitude, negative
        where a value of the block is; NaN where one is not finite or above 2^126.
    """
    if not values.any():
        codes[...] = 0
        scales[...] = 0
        return
    padded = np.zeros(scales.size * CODE_BLOCK, np.float32)
    padded[: values.size] = values
    blocks = padded.reshape(-1, CODE_BLOCK)
    sizes = np.abs(blocks)
    with np.errstate(all="ignore"):
        largest = sizes.max(axis=1)
        is_signed = np.any(blocks < 0, axis=1)
        is_bad = np.logical_not(largest <= _LARGEST)
        scales[...] = np.where(is_signed, -largest, largest)
        scales[is_bad] = np.nan
        inverse = np.float32(1) / largest
        inverse[(np.abs(inverse) < _TINY) | (largest == 0) | is_bad] = 0
        y = sizes * inverse[:, None]
        up = _uniform(first, y.size, key).reshape(y.shape)
        unsigned = np.where(blocks > 0, np.maximum(_code_of(y, up, 128, 8), 1), 0)
        signed = np.maximum(_code_of(y, up, 64, 7), 0)
        signed = np.where(blocks < 0, -signed, signed)
        result = np.where(is_signed[:, None], signed, unsigned)
    result[is_bad | (largest == 0)] = 0
    codes[...] = result.astype(np.uint8).reshape(-1)[: values.size]


def decode_int8(codes: Array, scales: Array) -> Array:
    """Decodes int8 codes: ``(n,)`` float32, denormals flushed to zero."""
    of_unsigned, of_signed = _tables()
    scale = np.repeat(scales, CODE_BLOCK)[: codes.size]
    values = np.where(scale < 0, of_signed[codes], of_unsigned[codes]) * np.abs(scale)
    values[np.abs(values) < _TINY] = 0
    return values


def encode_bf16(values: Array, key: int | None, first: int) -> Array:
    """Rounds float32 to bfloat16 stochastically, or to nearest without a key.

    Args:
      values: ``(n,)`` float32.
    """
    bits = values.view(np.uint32)
    random: Array | np.uint32 = np.uint32(0x8000)
    if key is not None:
        random = random_bits(_counters(first, values.size), key)
    noisy = (bits + random) >> np.uint32(16)
    is_special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    is_nan = (bits & np.uint32(0x7FFFFF)) != 0
    quiet = (bits >> np.uint32(16)) | np.where(is_nan, np.uint32(0x40), np.uint32(0))
    return np.where(is_special, quiet, noisy).astype(np.uint16).view(BFLOAT16)


def encode_split(values: Array, codes: Array, remainders: Array) -> None:
    """Rounds float32 to the nearest bfloat16, ties away from zero, and keeps the rest.

    Args:
      values: ``(n,)`` float32. A NaN keeps the upper half of its bits, made quiet; all
        else comes back to the bit.
      codes: ``(n,)`` bfloat16, written.
      remainders: ``(n,)`` int16, written: the bits of `values` less those of `codes`.
    """
    bits = values.view(np.uint32)
    is_nan = np.isnan(values)
    rounded = (bits + np.uint32(0x8000)) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    codes.view(np.uint16)[...] = np.where(is_nan, quiet, rounded)
    remainders.view(np.uint16)[...] = np.where(is_nan, 0, bits & np.uint32(0xFFFF))


def decode_split(codes: Array, remainders: Array) -> Array:
    """Restores the argument of `encode_split`: ``(n,)`` float32."""
    high = codes.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return (high + remainders.astype(np.int32).view(np.uint32)).view(np.float32)


def random_bits(counters: Array, key: int) -> Array:
    """Hashes each counter to 16 bits, uint32: two rounds of a multiply-xorshift."""
    key32 = np.uint32(key)
    x = counters ^ key32
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x += key32
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x & np.uint32(0xFFFF)


def _counters(first: int, count: int) -> Array:
    return np.arange(first, first + count, dtype=np.uint64).astype(np.uint32)


def _uniform(first: int, count: int, key: int | None) -> Array:
    """Returns numbers in [0, 1), float32; halves without a key."""
    if key is None:
        return np.full(count, 0.5, np.float32)
    return random_bits(_counters(first, count), key) * np.float32(1 / 65536)


def _code_of(y: Array, up: Array, top: int, decades: int) -> Array:
    factor = np.ones_like(y)
    count = np.full(y.shape, top, np.int32)
    for decade in range(1, decades):
        below = y <= np.float32(f"1e-{decade}")
        factor[below] = np.float32(f"1e{decade}")
        count[below] = top >> decade
    steps = (y * factor - np.float32(0.1)) * np.float32(1.1111112)
    place = steps * count.astype(np.float32) + up
    # Below its first number a decade goes on in the last one of the next.
    code = count - 1 + place.astype(np.int32)
    return np.minimum(code, 2 * count - 1)


@cache
def _tables() -> tuple[Array, Array]:
    of_unsigned, of_signed = np.zeros(256), np.zeros(256)
    for table, decades in ((of_unsigned, 8), (of_signed, 7)):
        for decade in range(decades):
            count = 1 << (decades - 1 - decade)
            j = np.arange(count)
            table[count + j] = (0.1 + 0.9 * (j + 1) / count) * float(f"1e-{decade}")
    of_signed[129:] = -of_signed[127:0:-1]
    return of_unsigned.astype(np.float32), of_signed.astype(np.float32)


def rounding_of_chunk(leaf: int, chunk: int, step: int) -> int:
    """Returns 32 bits that differ between chunks and between steps."""
    key = leaf
    for part in (chunk, step):
        key = (key * 0x9E3779B1 + part + 0x7F4A7C15) & 0xFFFFFFFF
        key ^= key >> 15
    return (key * 0x85EBCA6B) & 0xFFFFFFFF


def scales_length(grid: LeafGrid) -> int:
    """Elements of a chunk of scales: whole pages of float32."""
    num_scales = -(-math.prod(grid.chunk_shape) // CODE_BLOCK)
    return -(-num_scales // _SCALES_A_PAGE) * _SCALES_A_PAGE


@lru_cache(maxsize=1 << 12)
def scale_chunks(grid: LeafGrid) -> tuple[Chunk, ...]:
    """Returns the scales' chunks, one for each chunk of the leaf, in its order."""
    length = scales_length(grid)
    found = []
    for number, chunk in enumerate(grid.chunks()):
        count = -(-chunk.num_elements // CODE_BLOCK)
        found.append(Chunk((number,), (number * length,), (count,), count, length))
    return tuple(found)
