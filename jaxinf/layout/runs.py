"""Boxes and runs of a leaf's elements: in arrays, and in the files of its chunks.

Invariant: element i of a run is element `offset_elements + i` of the chunk's file. A
chunk is contiguous in its file, but a strided block of an array that spans more shards.
The portions of a leaf partition it, and each is one run of one chunk's file.
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
    """Returns a run of a chunk from an array that holds it.

    Args:
      block_source: array of any dtype and layout that contains the whole chunk.
      origin: leaf index of `block_source[0, …, 0]`.
      offset_elements: start of the run within the chunk.
      num_elements: length of the run.

    Returns:
      1-D array: a view of `block_source` where the run is contiguous in it, so that it
      lives and changes with the source; else a copy.
    """
    view = target_view(block_source, chunk, origin, offset_elements, num_elements)
    if view is not None:
        return view
    values = np.empty(num_elements, block_source.dtype)
    block = _block(block_source, chunk, origin)
    for part, own in _parts(block, offset_elements, values):
        own[...] = part
    return values


def scatter(
    block_target: Array,
    chunk: Chunk,
    origin: tuple[int, ...],
    offset_elements: int,
    values: Array,
) -> None:
    """Writes a run of a chunk into an array that holds the chunk; reverse of `gather`.

    Args:
      block_target: writable array that contains the whole chunk.
      chunk, origin, offset_elements: arguments of `gather`.
      values: the run, 1-D, of the target's dtype; copied when this returns.
    """
    assert (values.ndim, values.dtype) == (1, block_target.dtype), chunk
    block = _block(block_target, chunk, origin)
    for part, own in _parts(block, offset_elements, values):
        part[...] = own


def target_view(
    block_target: Array,
    chunk: Chunk,
    origin: tuple[int, ...],
    offset_elements: int,
    num_elements: int,
) -> Array | None:
    """Returns a view of a run, so that it can be produced in place.

    Args:
      block_target: array that contains the whole chunk.
      chunk, origin, offset_elements, num_elements: arguments of `gather`.

    Returns:
      1-D view, or None where the run is not contiguous in the target: then produce it
      elsewhere and `scatter` it.
    """
    block = _block(block_target, chunk, origin)
    return _contiguous_run(block, offset_elements, num_elements)


def _block(array: Array, chunk: Chunk, origin: tuple[int, ...]) -> Array:
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
    """Views the run in the largest contiguous stretch that holds its first element."""
    assert 0 <= offset_elements <= offset_elements + num_elements <= block.size
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
    """Yields views of a strided block's run and of a flat array, by whole rows."""
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


def _portion_shape(grid: LeafGrid, max_elements: int) -> tuple[int, ...]:
    """Returns the largest shape whose boxes divide a grid's chunks into single runs."""
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
    """Returns a leaf's portions, of at most so many elements.

    They come by chunk, and within it in the order of the file.
    """
    result = []
    for box in LeafGrid(grid.shape, _portion_shape(grid, max_elements)).chunks():
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
