"""Stored state as the numbers that it stands for, whatever its codec.

Invariant: read-only; one buffer of a piece at a time beside what the caller keeps.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from jaxinf.io import BufferPool, read_into
from jaxinf.kernels import CodedSlot
from jaxinf.layout import Chunk, scale_chunks, scatter
from jaxinf.store import LeafRecord, StateRecord, dtype_of
from jaxinf.typing import Array

__all__ = ["decoded_pieces", "read_decoded"]

_PIECE_ELEMENTS = 1 << 20


def read_decoded(step: Path, record: LeafRecord, state: StateRecord) -> Array:
    """A whole array of a leaf's shape: float32 where it is coded; blocks.

    Args:
      step: a slot, a checkpoint or a snapshot.
      record: the leaf.
      state: one of its states that belongs to no other.

    Raises:
      StoreIOError: a chunk is missing, too short, or the drive failed.
    """
    out = np.empty(record.shape, dtype_of(state.decoded().dtype))
    origin = (0,) * len(record.shape)
    for chunk, start, values in decoded_pieces(step, record, state):
        scatter(out, chunk, origin, start, values)
    return out


def decoded_pieces(
    step: Path, record: LeafRecord, state: StateRecord
) -> Iterator[tuple[Chunk, int, Array]]:
    """An array's elements, chunk by chunk, at most 1 Mi at a time.

    Yields:
      The leaf's chunk, where in it the piece starts, and its elements, which are valid
      until the next one is asked for.
    """
    chunks = record.grid.chunks()
    beside = record.beside(state)
    own_chunks = chunks
    if beside is not None and beside.codec == "scale":
        own_chunks = scale_chunks(record.grid, chunks)
    with closing(BufferPool(2 * _PIECE_ELEMENTS * dtype_of(state.dtype).itemsize)) as p:
        for chunk, own in zip(chunks, own_chunks, strict=True):
            for start in range(0, chunk.num_elements, _PIECE_ELEMENTS):
                stop = min(start + _PIECE_ELEMENTS, chunk.num_elements)
                with _run(p, step, record, state, chunk, start, stop) as codes:
                    if not state.codec:
                        yield chunk, start, codes
                    elif beside is None:
                        yield chunk, start, CodedSlot.of(codes).decode()
                    else:
                        # Of scales, those of whole blocks.
                        first, last = map(beside.num_elements, (start, stop))
                        with _run(p, step, record, beside, own, first, last) as rest:
                            yield chunk, start, CodedSlot.of(codes, rest).decode()


@contextmanager
def _run(
    pool: BufferPool,
    step: Path,
    record: LeafRecord,
    state: StateRecord,
    chunk: Chunk,
    start: int,
    stop: int,
) -> Iterator[Array]:
    """Elements of a chunk of an array, valid as long as the context."""
    num_bytes = (stop - start) * state.itemsize
    with pool.acquire(num_bytes) as buffer:
        file = step / record.array_name(state.name) / chunk.key
        read_into(file, buffer.array, start * state.itemsize, num_bytes)
        yield buffer.array[:num_bytes].view(dtype_of(state.dtype))
