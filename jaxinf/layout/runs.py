"""Runs and boxes of a leaf's elements, in arrays and in the files of its chunks.

Invariant: element i of a run is element `offset_elements + i` of the chunk's file. A
chunk is contiguous in its file, but may be a strided block of an array. The portions of
a leaf partition it, and each is one run of one chunk's file.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxinf.layout.grid import Chunk, LeafGrid, box_slices, divisors, ravel
from jaxinf.typing import Array


def gather(
    block_source: Array,
    chunk: Chunk,
    origin: tuple[int, ...],
    offset_elements: int,
    num_elements: int,
) -> Array:
    """Returns a run of a chunk from an array that holds the chunk.

    Args:
      block_source: Array of any dtype and layout that contains the whole chunk.
      origin: Leaf index of `block_source[0, …, 0]`.
      offset_elements: Start of the run within the chunk.

    Returns:
      1-D array: a view of the source where the run is contiguous in it, else a copy.
    """
    view = target_view(block_source, chunk, origin, offset_elements, num_elements)
    if view is not None:
        return view
    values = np.empty(num_elements, block_source.dtype)
    block = _block(block_source, chunk, origin)
    for block_part, value_part in _parts(block, offset_elements, values):
        value_part[...] = block_part
    return values


def scatter(
    block_target: Array,
    chunk: Chunk,
    origin: tuple[int, ...],
    offset_elements: int,
    values: Array,
) -> None:
    """Writes a run of a chunk, 1-D, into an array that holds it: reverses `gather`."""
    assert (values.ndim, values.dtype) == (1, block_target.dtype), chunk
    block = _block(block_target, chunk, origin)
    for block_part, value_part in _parts(block, offset_elements, values):
        block_part[...] = value_part


def target_view(
    block_target: Array,
    chunk: Chunk,
    origin: tuple[int, ...],
    offset_elements: int,
    num_elements: int,
) -> Array | None:
    """Returns a 1-D view of a run, as `gather`; None where the run is not contiguous.

    A run is produced in place there, and elsewhere written by `scatter`.
    """
    block = _block(block_target, chunk, origin)
    return _contiguous_run(block, offset_elements, num_elements)


def _block(array: Array, chunk: Chunk, origin: tuple[int, ...]) -> Array:
    """Returns the view of a chunk in an array that holds it."""
    assert array.ndim == len(origin) == len(chunk.start), (chunk, array.shape, origin)
    if chunk.extent == array.shape and chunk.start == tuple(origin):
        return array
    starts = tuple(map(operator.sub, chunk.start, origin))
    block = array[(*map(slice, starts, map(operator.add, starts, chunk.extent)), ...)]
    is_inside = min(starts, default=0) >= 0 and block.shape == chunk.extent
    assert is_inside, (chunk, array.shape, origin)
    return block


def _contiguous_run(
    block: Array, offset_elements: int, num_elements: int
) -> Array | None:
    """Returns a view of a run, or None where it is not contiguous in the block."""
    assert 0 <= offset_elements <= offset_elements + num_elements <= block.size
    # The largest contiguous stretch that holds the run's first element.
    stretch, offset = block, offset_elements
    while not stretch.flags.c_contiguous:
        # A 0-d array is contiguous, so there is a first dimension to index.
        inner = math.prod(stretch.shape[1:])
        if offset // inner >= stretch.shape[0]:
            return stretch[:0].reshape(-1)  # an empty run at the chunk's end
        stretch, offset = stretch[offset // inner, ...], offset % inner
    if offset + num_elements > stretch.size:
        return None
    return stretch.reshape(-1)[offset : offset + num_elements]


def _parts(
    block: Array, offset_elements: int, flat: Array
) -> Iterator[tuple[Array, Array]]:
    """Yields views of the same elements in a block's run and in a flat array."""
    view = _contiguous_run(block, offset_elements, flat.size)
    if view is not None:
        yield view, flat
        return
    inner = math.prod(block.shape[1:])
    row, skipped = divmod(offset_elements, inner)
    done = min(-skipped % inner, flat.size)
    if done:
        yield from _parts(block[row], skipped, flat[:done])
        row += 1
    num_rows = (flat.size - done) // inner
    end = done + num_rows * inner
    rows = block[row : row + num_rows]
    yield rows, flat[done:end].reshape(rows.shape)
    if end < flat.size:
        yield from _parts(block[row + num_rows], 0, flat[end:])


@dataclass(frozen=True)
class ChunkBox:
    """A box of a leaf that is one run of a chunk's file."""

    chunk: int  # the chunk's position in `LeafGrid.chunks()`
    start: tuple[int, ...]  # leaf index of the box's first element
    extent: tuple[int, ...]
    offset_elements: int  # start of the run in the chunk's file

    @property
    def num_elements(self) -> int:
        return math.prod(self.extent)

    @property
    def slices(self) -> tuple[slice, ...]:
        return box_slices(self.start, self.extent)


def _portion_shape(grid: LeafGrid, max_elements: int) -> tuple[int, ...]:
    """Returns the largest shape of boxes that are single runs of a grid's chunks."""
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


def cut_portions(grid: LeafGrid, max_elements: int) -> list[ChunkBox]:
    """Cuts a leaf into portions of at most so many elements.

    They come chunk by chunk, and within a chunk in the order of the file.
    """
    portions = []
    for box in LeafGrid(grid.shape, _portion_shape(grid, max_elements)).chunks():
        places = list(map(divmod, box.start, grid.chunk_shape))
        chunk = ravel([index for index, _ in places], grid.grid_shape)
        offset = ravel([inside for _, inside in places], grid.chunk_shape)
        portions.append(ChunkBox(chunk, box.start, box.extent, offset))
    return sorted(portions, key=lambda box: (box.chunk, box.offset_elements))


def box_runs(
    shape: Sequence[int], start: Sequence[int], extent: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yields the contiguous runs of a box in an array of a shape, in C order.

    Yields:
      The offset of a run's first element in the array, and the run's length, both in
      elements.
    """
    if 0 in extent:
        return
    spanned = len(shape)  # the box spans all dimensions from this one on
    while spanned and extent[spanned - 1] == shape[spanned - 1]:
        spanned -= 1
    outer = max(0, spanned - 1)  # a run is a range of the dimension before
    length = math.prod(extent[outer:])
    for index in itertools.product(*map(range, extent[:outer])):
        first = [s + i for s, i in zip(start[:outer], index, strict=True)]
        yield ravel([*first, *start[outer:]], shape), length
