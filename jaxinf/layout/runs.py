"""Runs of a chunk seen in an array that holds the leaf, or one shard of it.

Invariant: element i of a run is element `offset_elements + i` of the chunk's file. A
chunk is contiguous in its file, but a strided block of an array that spans more shards.
"""

import math
import operator

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

    Raises:
      ValueError: if the array does not hold the chunk, or the chunk not the run.
    """
    block = _block(block_source, chunk, origin, offset_elements, num_elements)
    view = _contiguous_run(block, offset_elements, num_elements)
    if view is not None:
        return view
    values = np.empty(num_elements, block_source.dtype)
    _copy_run(block, offset_elements, values, to_block=False)
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

    Raises:
      ValueError: if the array does not hold the chunk, or the chunk not the run.
      TypeError: if the dtypes differ.
    """
    if values.ndim != 1 or values.dtype != block_target.dtype:
        raise TypeError(
            f"run of chunk {chunk.key}: expected 1-D values of {block_target.dtype}, "
            f"found {values.ndim}-D {values.dtype}; convert them first"
        )
    num_elements = values.shape[0]
    block = _block(block_target, chunk, origin, offset_elements, num_elements)
    _copy_run(block, offset_elements, values, to_block=True)


def target_view(
    block_target: Array,
    chunk: Chunk,
    origin: tuple[int, ...],
    offset_elements: int,
    num_elements: int,
) -> Array | None:
    """Returns a writable view of a run, so that it can be produced in place.

    Args:
      block_target: array that contains the whole chunk.
      chunk, origin, offset_elements, num_elements: as for `gather`.

    Returns:
      1-D view, or None where the run is not contiguous in the target: then produce it
      elsewhere and `scatter` it.

    Raises:
      ValueError: if the array is read-only or does not hold the chunk, or the chunk not
        the run.
    """
    if not block_target.flags.writeable:
        raise ValueError(f"target of chunk {chunk.key}: expected a writable array")
    block = _block(block_target, chunk, origin, offset_elements, num_elements)
    return _contiguous_run(block, offset_elements, num_elements)


def _block(
    array: Array,
    chunk: Chunk,
    origin: tuple[int, ...],
    offset_elements: int,
    num_elements: int,
) -> Array:
    if not array.ndim == len(origin) == len(chunk.start):
        raise ValueError(
            f"{_where(chunk)}: expected array and origin of {len(chunk.start)} "
            f"dimensions, found shape {array.shape} at origin {tuple(origin)}"
        )
    starts = tuple(map(operator.sub, chunk.start, origin))
    ends = tuple(map(operator.add, starts, chunk.extent))
    if min(starts, default=0) < 0 or any(map(operator.gt, ends, array.shape)):
        raise ValueError(
            f"{_where(chunk)}: is not inside the array of shape {array.shape} at "
            f"origin {tuple(origin)}; pass the shard that holds the chunk"
        )
    if offset_elements < 0 or not 0 <= num_elements <= (
        chunk.num_elements - offset_elements
    ):
        raise ValueError(
            f"{_where(chunk)}: run of {num_elements} elements at {offset_elements} is "
            f"not inside the chunk's {chunk.num_elements} elements"
        )
    if chunk.extent == array.shape:
        return array
    return array[(*map(slice, starts, ends), ...)]


def _where(chunk: Chunk) -> str:
    return f"chunk {chunk.key} at {chunk.start} of extent {chunk.extent}"


def _contiguous_run(
    block: Array, offset_elements: int, num_elements: int
) -> Array | None:
    """Views the run in the largest contiguous stretch that holds its first element."""
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


def _copy_run(
    block: Array, offset_elements: int, flat: Array, *, to_block: bool
) -> None:
    """Copies between a strided block's run and a flat array: whole rows at once."""
    num_elements = flat.shape[0]
    if num_elements == 0:
        return
    view = _contiguous_run(block, offset_elements, num_elements)
    if view is not None:
        target, source = (view, flat) if to_block else (flat, view)
        target[...] = source
        return
    inner = math.prod(block.shape[1:])
    row, skipped = divmod(offset_elements, inner)
    done = min(-skipped % inner, num_elements)
    if done:
        _copy_run(block[row], skipped, flat[:done], to_block=to_block)
        row += 1
    num_rows = (num_elements - done) // inner
    if num_rows:
        rows = block[row : row + num_rows]
        part = flat[done : done + num_rows * inner].reshape(rows.shape)
        target, source = (rows, part) if to_block else (part, rows)
        target[...] = source
    done += num_rows * inner
    if done < num_elements:
        _copy_run(block[row + num_rows], 0, flat[done:], to_block=to_block)
