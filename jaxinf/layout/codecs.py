"""Codecs that keep float32 state in fewer bits, in NumPy.

Invariant: the numbers are those of ``native/cpp/codecs.hpp``, bit for bit;
docs/format.md, "Codecs", defines them. A chunk's scales are one chunk of an array of
their own, in whole pages, so that a run of them that starts on a page can be read
directly.
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

    Without a key values are rounded to nearest, which gives decoded values their codes
    again. With remainders decoding is exact. Without a companion only codes are stored.
    """

    codes: Array  # ``(n,)``: uint8 with scales, bfloat16 without
    companion: Array | None = None  # float32, a scale for 256 codes; int16 remainders
    key: int | None = 0  # seed of the random bits that decide the rounding
    first: int = 0  # number of the first element in its chunk

    @property
    def remainders(self) -> Array | None:
        is_split = self.companion is not None and self.companion.dtype == np.int16
        return self.companion if is_split else None

    @property
    def scales(self) -> Array | None:
        return self.companion if self.remainders is None else None

    def decode(self) -> Array:
        """Returns ``(n,)`` float32; of int8 codes, with denormals flushed to zero."""
        if self.companion is None:
            return self.codes.astype(np.float32)
        decode = decode_int8 if self.remainders is None else decode_split
        return decode(self.codes, self.companion)

    def encode(self, values: Array) -> None:
        """Writes ``(n,)`` floats of at most 32 bits to its arrays, piece by piece."""
        for start in range(0, values.size, _PIECE_ELEMENTS):
            part = slice(start, start + _PIECE_ELEMENTS)
            self[part]._encode(values[part].astype(np.float32, copy=False))

    def _encode(self, values: Array) -> None:
        if self.companion is None:
            self.codes[...] = encode_bf16(values, self.key, self.first)
        elif self.remainders is None:
            encode_int8(values, self.codes, self.companion, self.key, self.first)
        else:
            encode_split(values, self.codes, self.companion)

    def __getitem__(self, part: slice) -> "CodedSlot":
        """Returns views of some elements, from a multiple of 256 on."""
        start, stop, companion = part.start, part.stop, self.companion
        if companion is not None:
            per_entry = CODE_BLOCK if self.remainders is None else 1
            companion = companion[start // per_entry : -(-stop // per_entry)]
        return CodedSlot(
            self.codes[start:stop], companion, self.key, self.first + start
        )


def encode_int8(
    values: Array, codes: Array, scales: Array, key: int | None, first: int
) -> None:
    """Quantises ``(n,)`` float32 in blocks of 256 by their largest magnitude.

    Writes ``(n,)`` uint8 codes and ``(ceil(n / 256),)`` float32 scales: the largest
    magnitude, negative where a value of the block is; NaN where one is not finite or
    above 2^126.
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
        unsigned = np.where(blocks > 0, np.maximum(_codes_of(y, up, 128, 8), 1), 0)
        signed = np.maximum(_codes_of(y, up, 64, 7), 0)
        signed = np.where(blocks < 0, -signed, signed)
        result = np.where(is_signed[:, None], signed, unsigned)
    result[is_bad | (largest == 0)] = 0
    codes[...] = result.astype(np.uint8).reshape(-1)[: values.size]


def decode_int8(codes: Array, scales: Array) -> Array:
    of_unsigned, of_signed = _decode_tables()
    scale = np.repeat(scales, CODE_BLOCK)[: codes.size]
    values = np.where(scale < 0, of_signed[codes], of_unsigned[codes]) * np.abs(scale)
    values[np.abs(values) < _TINY] = 0
    return values


def encode_bf16(values: Array, key: int | None, first: int) -> Array:
    """Rounds ``(n,)`` float32 to bfloat16, stochastically; to nearest without a key."""
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
    """Rounds ``(n,)`` float32 to the nearest bfloat16, ties away from zero.

    Writes the codes, and as int16 remainders the bits of `values` less theirs. A NaN
    keeps the upper half of its bits, made quiet; any other value is decoded to the same
    bits.
    """
    bits = values.view(np.uint32)
    is_nan = np.isnan(values)
    rounded = (bits + np.uint32(0x8000)) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    codes.view(np.uint16)[...] = np.where(is_nan, quiet, rounded)
    remainders.view(np.uint16)[...] = np.where(is_nan, 0, bits & np.uint32(0xFFFF))


def decode_split(codes: Array, remainders: Array) -> Array:
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


def _codes_of(y: Array, up: Array, top: int, num_decades: int) -> Array:
    """Returns the codes of `y`, from 0 to 1, in a table of `top` in the first decade.

    `up` is added before a code is rounded down.
    """
    factor = np.ones_like(y)
    count = np.full(y.shape, top, np.int32)
    for decade in range(1, num_decades):
        below = y <= np.float32(f"1e-{decade}")
        factor[below] = np.float32(f"1e{decade}")
        count[below] = top >> decade
    steps = (y * factor - np.float32(0.1)) * np.float32(1.1111112)
    place = steps * count.astype(np.float32) + up
    # Below its first number a decade continues with the last number of the next.
    code = count - 1 + place.astype(np.int32)
    return np.minimum(code, 2 * count - 1)


@cache
def _decode_tables() -> tuple[Array, Array]:
    of_unsigned, of_signed = np.zeros(256), np.zeros(256)
    for table, decades in ((of_unsigned, 8), (of_signed, 7)):
        for decade in range(decades):
            count = 1 << (decades - 1 - decade)
            j = np.arange(count)
            table[count + j] = (0.1 + 0.9 * (j + 1) / count) * float(f"1e-{decade}")
    of_signed[129:] = -of_signed[127:0:-1]
    return of_unsigned.astype(np.float32), of_signed.astype(np.float32)


def rounding_of_chunk(leaf: int, chunk: int, step: int) -> int:
    """Returns a key of 32 bits that differs between chunks and between steps."""
    key = leaf
    for part in (chunk, step):
        key = (key * 0x9E3779B1 + part + 0x7F4A7C15) & 0xFFFFFFFF
        key ^= key >> 15
    return (key * 0x85EBCA6B) & 0xFFFFFFFF


def scales_length(grid: LeafGrid) -> int:
    """Returns the elements of a chunk of scales: whole pages of float32."""
    num_scales = -(-math.prod(grid.chunk_shape) // CODE_BLOCK)
    return -(-num_scales // _SCALES_A_PAGE) * _SCALES_A_PAGE


@lru_cache(maxsize=1 << 12)
def scale_chunks(grid: LeafGrid) -> tuple[Chunk, ...]:
    """Returns the chunks of scales, one for each chunk of the leaf, in its order."""
    length = scales_length(grid)
    chunks = []
    for number, chunk in enumerate(grid.chunks()):
        count = -(-chunk.num_elements // CODE_BLOCK)
        chunks.append(Chunk((number,), (number * length,), (count,), count, length))
    return tuple(chunks)
