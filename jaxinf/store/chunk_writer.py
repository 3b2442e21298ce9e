"""Writes boxes of arrays to the chunk files of a step that is not committed yet.

A chunk that another member of a run holds is left out.

Invariant: a file with more than one link is never written; `StoreDirectory` ensures it.
"""

import itertools
import os
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from jaxinf.errors import ExchangeError
from jaxinf.io import crc32c, crc32c_combine, opened_to_write
from jaxinf.io.failures import translated
from jaxinf.layout import Chunk, box_runs
from jaxinf.store.contents import StateRecord
from jaxinf.store.directory import StoreDirectory
from jaxinf.typing import Array

_File: TypeAlias = tuple[int, int, str]
"""A chunk's file: leaf, chunk and state."""


class _RunSums:
    """Checksums of a file's runs, written in any order; adjacent ones are combined."""

    def __init__(self) -> None:
        self._by_end: dict[int, tuple[int, int]] = {}  # start and checksum, by end

    def add(self, offset_bytes: int, data: Array) -> None:
        start, checksum = offset_bytes, crc32c(data)
        before = self._by_end.pop(offset_bytes, None)
        if before is not None:
            start, known = before
            parts = ((known, offset_bytes - start), (checksum, data.nbytes))
            checksum = crc32c_combine(parts)
        self._by_end[offset_bytes + data.nbytes] = start, checksum

    def of(self, num_bytes: int) -> int:
        """Returns the checksum of the file's first bytes, all of which were added.

        Raises:
          ExchangeError: some bytes are missing or were added twice, because the
            source's boxes do not form a grid.
        """
        runs = sorted((start, end, crc) for end, (start, crc) in self._by_end.items())
        place = 0
        for start, end, _ in runs:
            if start != place:
                break
            place = end
        if place != num_bytes:
            raise ExchangeError(
                f"expected {num_bytes} bytes of a chunk, one behind the other, found "
                f"them up to byte {place}; the checkpoint's arrays are incomplete"
            )
        return crc32c_combine((crc, end - start) for start, end, crc in runs)


class ChunkWriter:
    """Writes one step of a store.

    Attributes:
      directory: the store, whose lock the caller holds, or that is being made.
      place: the slot that `current` does not name, or ``checkpoints/NAME``; all chunk
        files exist.
    """

    def __init__(self, directory: StoreDirectory, place: str) -> None:
        self.directory = directory
        self.place = place
        self._sums: dict[_File, _RunSums] = {}

    def checksum(self, leaf: int, chunk: int, state: StateRecord) -> int:
        """Returns the CRC-32C of one chunk, all of which was written."""
        num_bytes = self.directory.state_bytes(leaf, chunk, state)
        return self._sums[leaf, chunk, state.name].of(num_bytes)

    def write_stored(
        self, leaf: int, state: str, start: Sequence[int], values: Array
    ) -> None:
        """Writes a box of an array, as it is stored; blocks until it is copied.

        All of an array must be written before the step is published. Scales are written
        by `write_scales`.

        Args:
          leaf: the leaf's number.
          state: name of the state.
          start: leaf index of the box's first element.
          values: the box, of the dtype in which the state is stored.
        """
        record = self.directory.manifest.leaves[leaf]
        grid = record.grid
        ranges = [
            range(s // c, -(-(s + n) // c))
            for s, n, c in zip(start, values.shape, grid.chunk_shape, strict=True)
        ]
        chunks = self.directory.chunks[leaf]
        strides = _strides(grid.grid_shape)
        for index in itertools.product(*ranges):
            position = sum(i * s for i, s in zip(index, strides, strict=True))
            if record.places[position] < 0:
                continue
            chunk = chunks[position]
            file = self._prepare(leaf, position, state)
            with translated("write", file), opened_to_write(file) as fd:
                sums = self._sums[leaf, position, state]
                _write_part(fd, sums, chunk, grid.chunk_shape, start, values)

    def write_scales(self, leaf: int, state: str, chunk: int, values: Array) -> None:
        """Writes the scales of a chunk that this store holds; blocks."""
        file = self._prepare(leaf, chunk, state)
        memory = np.ascontiguousarray(values).view(np.uint8)
        with translated("write", file), opened_to_write(file) as fd:
            self._sums[leaf, chunk, state].add(0, memory)
            put(fd, memory, 0)

    def _prepare(self, leaf: int, chunk: int, state: str) -> os.PathLike[str]:
        key = (leaf, chunk, state)
        if key in self._sums:
            return self.directory.chunk_file(self.place, leaf, chunk, state)
        self._sums[key] = _RunSums()
        return self.directory.prepare_write(self.place, leaf, chunk, state)


def _write_part(
    fd: int,
    sums: _RunSums,
    chunk: Chunk,
    chunk_shape: Sequence[int],
    start: Sequence[int],
    values: Array,
) -> None:
    first = [max(s, c) for s, c in zip(start, chunk.start, strict=True)]
    last = [
        min(s + n, c + e)
        for s, n, c, e in zip(
            start, values.shape, chunk.start, chunk.extent, strict=True
        )
    ]
    box = tuple(slice(a - s, b - s) for a, b, s in zip(first, last, start, strict=True))
    part = np.ascontiguousarray(values[(*box, ...)])
    memory = part.reshape(-1).view(np.uint8)
    inside = [a - c for a, c in zip(first, chunk.start, strict=True)]
    extent = [b - a for a, b in zip(first, last, strict=True)]
    done = 0
    for offset, length in box_runs(chunk_shape, inside, extent):
        end = done + length * part.itemsize
        place = offset * part.itemsize
        sums.add(place, memory[done:end])
        put(fd, memory[done:end], place)
        done = end


def put(fd: int, values: Array, offset_bytes: int) -> None:
    """Writes contiguous values at a place of a file; blocks."""
    memory, done = values.reshape(-1).view(np.uint8).data, 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done:], offset_bytes + done)


def _strides(grid_shape: Sequence[int]) -> list[int]:
    strides, product = [], 1
    for length in reversed(grid_shape):
        strides.append(product)
        product *= length
    return strides[::-1]
