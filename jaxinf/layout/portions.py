"""Leaves cut into boxes that fit a memory budget, and boxes into runs of a file.

Invariant: the portions of a leaf partition it, and each is one contiguous run of one
chunk's file.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxinf.layout.choose import divisors
from jaxinf.layout.grid import LeafGrid, box_slices, ravel


@dataclass(frozen=True)
class ChunkBox:
    """A box of a leaf that lies in one chunk, without a gap.

    Attributes:
      chunk: the chunk's position in `LeafGrid.chunks()`.
      start: leaf index of the box's first element.
      extent: shape of the box.
      offset_elements: the box's start in the chunk's file.
    """

    chunk: int
    start: tuple[int, ...]
    extent: tuple[int, ...]
    offset_elements: int

    @property
    def num_elements(self) -> int:
        """Elements of the box."""
        return math.prod(self.extent)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the whole leaf."""
        return box_slices(self.start, self.extent)


def portion_shape(grid: LeafGrid, max_elements: int) -> tuple[int, ...]:
    """Returns the largest chunk shape of a regular grid that divides a grid's chunks.

    Args:
      grid: the grid whose chunks are divided.
      max_elements: most elements of a portion, at least 1.

    Returns:
      A shape, each length at least 1, whose boxes are contiguous runs of the chunks.
    """
    result, room = [1] * len(grid.shape), max_elements
    for dim in reversed(range(len(grid.shape))):
        length = max(1, min(grid.chunk_shape[dim], grid.shape[dim]))
        if length > room:
            is_one_chunk = grid.chunk_shape[dim] >= grid.shape[dim]
            fitting = [n for n in divisors(length) if n <= room]
            result[dim] = room if is_one_chunk else fitting[-1]
            break
        result[dim] = length
        room //= length
    return tuple(result)


def portions(grid: LeafGrid, max_elements: int) -> list[ChunkBox]:
    """Returns a leaf's portions by chunk, and within it in the order of the file."""
    result = []
    for box in LeafGrid(grid.shape, portion_shape(grid, max_elements)).chunks():
        both = list(map(divmod, box.start, grid.chunk_shape))
        chunk = ravel([index for index, _ in both], grid.grid_shape)
        offset = ravel([inside for _, inside in both], grid.chunk_shape)
        result.append(ChunkBox(chunk, box.start, box.extent, offset))
    return sorted(result, key=lambda p: (p.chunk, p.offset_elements))


def box_runs(
    shape: Sequence[int], start: Sequence[int], extent: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yields the contiguous runs of a box in an array of a shape, in C order.

    Yields:
      For each run the offset of its first element in the array, and its length, both in
      elements. The n-th element of all runs is the box's n-th element in C order.
    """
    if 0 in extent:
        return
    whole = len(shape)
    while whole and extent[whole - 1] == shape[whole - 1]:
        whole -= 1
    # The box spans the dimensions from `whole` on; a run is a range of the one before.
    outer = max(0, whole - 1)
    length = math.prod(extent[outer:])
    for index in itertools.product(*map(range, extent[:outer])):
        place = [s + i for s, i in zip(start[:outer], index, strict=True)]
        yield ravel([*place, *start[outer:]], shape), length
