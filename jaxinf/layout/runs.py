"""Runs of a chunk seen in an array that holds the leaf, or one shard of it.

Invariant: element i of a run is element `offset_elements + i` of the chunk's file. A
chunk is contiguous in its file, but a strided block of an array that spans more shards.
"""

import math
import operator
from collections.abc import Iterator

import numpy as np

from jaxinf.layout.grid import Chunk
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
      chunk: the chunk.
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
      chunk, origin, offset_elements: as for `gather`.
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
      chunk, origin, offset_elements, num_elements: as for `gather`.

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
