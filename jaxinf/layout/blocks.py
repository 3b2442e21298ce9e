"""Scales of coded state: one for each block of a chunk's elements.

Invariant: a chunk's scales are one chunk of their own array, as many whole pages, so
that any run of whole blocks' scales that starts on a page can be read directly.
"""

import math
from collections.abc import Sequence

from jaxinf.layout.grid import Chunk, LeafGrid

CODE_BLOCK = 256
"""Elements that share a scale."""

_SCALES_A_PAGE = 4096 // 4

SCALES_ALIGNMENT_ELEMENTS = CODE_BLOCK * _SCALES_A_PAGE
"""Subgroups of a leaf with scales start at multiples of this many elements."""


def scales_length(grid: LeafGrid) -> int:
    """Elements of a chunk of scales: whole pages of float32."""
    num_scales = -(-math.prod(grid.chunk_shape) // CODE_BLOCK)
    return -(-num_scales // _SCALES_A_PAGE) * _SCALES_A_PAGE


def scale_chunks(grid: LeafGrid, chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """The chunks of the scales' array, one for each chunk of the leaf, in its order."""
    length = scales_length(grid)
    found = []
    for number, chunk in enumerate(chunks):
        count = -(-chunk.num_elements // CODE_BLOCK)
        found.append(Chunk((number,), (number * length,), (count,), count, length))
    return tuple(found)
