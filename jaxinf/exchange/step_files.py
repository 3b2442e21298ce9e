"""A committed step that is exported: its arrays, read portion by portion.

Invariant: files are only read, no more of an array is in memory than one portion, and
no chunk that differs from its checksum passes unnoticed.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np

from jaxinf.errors import StoreCorruptError, StoreIOError
from jaxinf.exchange.portions import Portion, portions
from jaxinf.io import crc32c, crc32c_combine
from jaxinf.io.failures import translated
from jaxinf.kernels import CodedSlot
from jaxinf.layout import CODE_BLOCK, scale_chunks
from jaxinf.store import CommitRecord, LeafRecord, Manifest, StateRecord, dtype_of
from jaxinf.typing import Array

__all__ = ["DEFAULT_MEMORY_BYTES", "StepFiles", "StoredArray"]

DEFAULT_MEMORY_BYTES = 256 << 20
"""What an export or an import holds of a step by default."""


# Codes are decoded so many at a time.
_PIECE_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class StoredArray:
    """One state of one leaf, as the optimizer computes with it.

    Attributes:
      leaf: the leaf's record.
      state: which of its states, as it is stored; none that belongs to another.
    """

    leaf: LeafRecord
    state: StateRecord

    @property
    def name(self) -> str:
        """Its directory below the step."""
        return self.leaf.array_name(self.state.name)

    @property
    def dtype(self) -> np.dtype:
        """Of its elements."""
        return dtype_of(self.state.decoded().dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.leaf.grid.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class StepFiles:
    """A committed step that does not change while it is read.

    Attributes:
      path: laid out like a slot: a snapshot or a checkpoint.
      manifest: what it holds.
    """

    path: Path
    manifest: Manifest
    _decoded_sums: dict[tuple[str, int], int] = field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def commit(self) -> CommitRecord:
        """The step's record.

        Raises:
          StoreFormatError: it is missing or damaged.
        """
        return CommitRecord.read(self.path / "commit.json")

    def exported(self) -> tuple[Manifest, CommitRecord]:
        """Manifest and commit record of what `stream` has given, all of it."""
        sums = {
            a.name: self.commit.checksums[a.name]
            if not a.state.codec
            else np.array(
                [self._decoded_sums[a.name, n] for n in range(len(a.leaf.csds))],
                np.uint32,
            )
            for a in self.arrays()
        }
        return self.manifest.decoded, replace(self.commit, checksums=sums)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return sum(array.num_bytes for array in self.arrays())

    def arrays(self) -> Iterator[StoredArray]:
        """All arrays, those of the master params first, then state by state."""
        for name in self.manifest.state_names:
            for leaf in self.manifest.leaves:
                for state in leaf.states:
                    if state.name == name and not state.is_beside:
                        yield StoredArray(leaf, state)

    def stream(
        self, array: StoredArray, max_elements: int
    ) -> Iterator[tuple[Portion, Array]]:
        """All of an array, portion by portion, each of its dtype and shape; blocks.

        What is coded comes as the numbers that it stands for.

        Raises:
          StoreCorruptError: with the last portion of a chunk that is not as written.
          StoreIOError: a chunk is missing or too short, or the drive failed.
        """
        every = portions(array.leaf.grid, max_elements)
        for chunk, members in groupby(every, key=lambda portion: portion.chunk):
            reader = _ChunkReader(self, array, chunk)
            sums: list[tuple[int, int]] = []
            for portion in members:
                values = reader.read(portion.offset_elements, portion.num_elements)
                if array.state.codec:
                    sums.append((crc32c(values), values.nbytes))
                yield portion, values.reshape(portion.extent)
            reader.check()
            if array.state.codec:
                self._decoded_sums[array.name, chunk] = crc32c_combine(sums)


class _ChunkReader:
    """Reads a chunk of a state from its first element to its last, decoding it."""

    def __init__(self, step: StepFiles, array: StoredArray, number: int) -> None:
        self._step, self._array, self._number = step, array, number
        grid = array.leaf.grid
        chunks = grid.chunks()
        self._chunk = self._own = chunks[number]
        self._beside = array.leaf.beside(array.state)
        self._sums: dict[str, list[tuple[int, int]]] = {}
        if self._beside is not None and self._beside.codec == "scale":
            self._own = scale_chunks(grid, chunks)[number]
            self._scales = self._stored(self._beside, 0, self._own.num_elements)

    def read(self, start: int, num: int) -> Array:
        """Elements that follow those read before, 1-D."""
        state = self._array.state
        if not state.codec:
            return self._stored(state, start, num)
        values = np.empty(num, self._array.dtype)
        for done in range(0, num, _PIECE_ELEMENTS):
            count = min(_PIECE_ELEMENTS, num - done)
            values[done : done + count] = self._decoded(start + done, count)
        return values

    def _decoded(self, start: int, num: int) -> Array:
        codes = self._stored(self._array.state, start, num)
        if self._beside is None:
            return CodedSlot.of(codes).decode()
        if self._beside.codec != "scale":
            rest = self._stored(self._beside, start, num)
            return CodedSlot.of(codes, rest).decode()
        # A block may have begun in the piece before.
        skipped = start % CODE_BLOCK
        codes = np.concatenate([np.zeros(skipped, codes.dtype), codes])
        first = start // CODE_BLOCK
        scales = self._scales[first : first - (-codes.size // CODE_BLOCK)]
        return CodedSlot.of(codes, scales).decode()[skipped:]

    def _stored(self, state: StateRecord, start: int, num: int) -> Array:
        """Elements of one of the arrays, as they are stored."""
        chunk = self._own if state.is_beside else self._chunk
        name = self._array.leaf.array_name(state.name)
        values = np.empty(num, dtype_of(state.dtype))
        _read_file(self._step.path / name / chunk.key, values, start * state.itemsize)
        self._sums.setdefault(state.name, []).append((crc32c(values), values.nbytes))
        return values

    def check(self) -> None:
        """Compares all that was read with what was written.

        Raises:
          StoreCorruptError: it differs.
        """
        leaf, step = self._array.leaf, self._step
        for state_name, sums in self._sums.items():
            name, found = leaf.array_name(state_name), crc32c_combine(sums)
            expected = step.commit.checksums.get(name, ())
            is_there = self._number < len(expected)
            if is_there and expected[self._number] == found:
                continue
            wanted = f"{expected[self._number]:08x}" if is_there else "none"
            raise StoreCorruptError(
                f"{step.path / name}: chunk {self._number} of {leaf.name}, "
                f"{state_name}, on CSD {leaf.csds[self._number]}: expected CRC-32C "
                f"{wanted} as written, found {found:08x}; nothing was exported. See "
                '"jaxinf verify" for all that is damaged, and export another checkpoint'
            )


def _read_file(file: Path, values: Array, offset_bytes: int) -> None:
    """Fills an array from a file, and leaves none of it in the page cache."""
    with translated("read", file, offset_bytes), open(file, "rb") as stream:
        fd = stream.fileno()
        num_read = _read_fully(fd, values.view(np.uint8).data, offset_bytes)
        os.posix_fadvise(fd, offset_bytes, num_read, os.POSIX_FADV_DONTNEED)
    if num_read < values.nbytes:
        raise StoreIOError(
            f"{file}: truncated: expected {offset_bytes + values.nbytes} bytes, "
            f"found {offset_bytes + num_read}; export another checkpoint, or "
            "restore this one from a backup"
        )


def _read_fully(fd: int, memory: memoryview, offset_bytes: int) -> int:
    done = 0
    while done < len(memory):
        num_bytes = os.preadv(fd, [memory[done:]], offset_bytes + done)
        if num_bytes == 0:
            break
        done += num_bytes
    return done
