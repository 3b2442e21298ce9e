"""Stored state as the numbers that it stands for, whatever its codec.

Invariant: read-only; one buffer of a piece at a time beside what the caller keeps.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxinf.io import BufferPool, read_into
from jaxinf.kernels import CodedSlot
from jaxinf.layout import CODE_BLOCK, Chunk, scale_chunks, scatter
from jaxinf.store import LeafRecord, StateRecord, dtype_of
from jaxinf.typing import Array

__all__ = ["decoded_pieces", "read_decoded"]

_PIECE_ELEMENTS = 1 << 20


def read_decoded(step: Path, record: LeafRecord, state: StateRecord) -> Array:
    """A whole array of a leaf's shape: float32 where it is coded; blocks.

    Args:
      step: a slot, a checkpoint or a snapshot.
      record: the leaf.
      state: one of its states that is no codec's scales.

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
    dtype = dtype_of(state.dtype)
    root = step / record.array_name(state.name)
    pool = BufferPool(_PIECE_ELEMENTS * dtype.itemsize)
    scales: Array | None = None
    for number, chunk in enumerate(chunks):
        if state.codec == "int8":
            scales = _scales(step, record, state, number)
        for start in range(0, chunk.num_elements, _PIECE_ELEMENTS):
            length = min(_PIECE_ELEMENTS, chunk.num_elements - start)
            num_bytes = length * dtype.itemsize
            with pool.acquire(num_bytes) as buffer:
                offset = start * dtype.itemsize
                read_into(root / chunk.key, buffer.array, offset, num_bytes)
                values = buffer.array[:num_bytes].view(dtype)
                if scales is not None:
                    own = scales[
                        start // CODE_BLOCK : -(-(start + length) // CODE_BLOCK)
                    ]
                    values = CodedSlot(values, own).decode()
                elif state.codec:
                    values = CodedSlot(values, None).decode()
                yield chunk, start, values
    pool.close()


def _scales(step: Path, record: LeafRecord, state: StateRecord, number: int) -> Array:
    """All scales of a chunk."""
    scales = next(s for s in record.states if s.slot == state.name and s != state)
    chunk = scale_chunks(record.grid, record.grid.chunks())[number]
    num_bytes = chunk.num_elements * scales.itemsize
    pool = BufferPool(max(num_bytes, 1) + 4096)
    with pool.acquire(num_bytes) as buffer:
        file = step / record.array_name(scales.name) / chunk.key
        read_into(file, buffer.array, 0, num_bytes)
        return buffer.array[:num_bytes].view(np.float32).copy()
