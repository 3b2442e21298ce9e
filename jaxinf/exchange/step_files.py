"""A committed step that is exported: its arrays, read portion by portion.

Invariant: files are only read, no more of an array is in memory than one portion, and
no chunk that differs from its checksum passes unnoticed.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np

from jaxinf.errors import ExchangeError, StoreCorruptError, StoreIOError
from jaxinf.exchange.portions import Portion, portions
from jaxinf.io import crc32c, crc32c_combine
from jaxinf.io.failures import translated
from jaxinf.store import CommitRecord, LeafRecord, Manifest, StateRecord, dtype_of
from jaxinf.typing import Array

__all__ = ["DEFAULT_MEMORY_BYTES", "StepFiles", "StoredArray", "check_not_coded"]

DEFAULT_MEMORY_BYTES = 256 << 20
"""What an export or an import holds of a step by default."""


def check_not_coded(path: Path, manifest: Manifest) -> None:
    """Refuses state in fewer bits: other tools would take codes for numbers.

    Raises:
      ExchangeError: says how to convert it.
    """
    if any(state.codec for leaf in manifest.leaves for state in leaf.states):
        raise ExchangeError(
            f"{path}: expected state as the optimizer computes with it, found it coded "
            'in fewer bits; make a store of fp32 first ("jaxinf store convert STORE '
            'NEW --state fp32"), and convert back after an import'
        )


@dataclass(frozen=True)
class StoredArray:
    """One state of one leaf, as a step has it.

    Attributes:
      leaf: the leaf's record.
      state: which of its states.
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
        return dtype_of(self.state.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.leaf.grid.num_elements * self.state.itemsize


@dataclass(frozen=True)
class StepFiles:
    """A committed step that does not change while it is read.

    Attributes:
      path: laid out like a slot: a snapshot or a checkpoint.
      manifest: what it holds.
    """

    path: Path
    manifest: Manifest

    def __post_init__(self) -> None:
        check_not_coded(self.path, self.manifest)

    @cached_property
    def commit(self) -> CommitRecord:
        """The step's record.

        Raises:
          StoreFormatError: it is missing or damaged.
        """
        return CommitRecord.read(self.path / "commit.json")

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return sum(array.num_bytes for array in self.arrays())

    def arrays(self) -> Iterator[StoredArray]:
        """All arrays, those of the master params first, then state by state."""
        for name in self.manifest.state_names:
            for leaf in self.manifest.leaves:
                yield from (StoredArray(leaf, s) for s in leaf.states if s.name == name)

    def stream(
        self, array: StoredArray, max_elements: int
    ) -> Iterator[tuple[Portion, Array]]:
        """All of an array, portion by portion, each of its dtype and shape; blocks.

        Raises:
          StoreCorruptError: with the last portion of a chunk that is not as written.
          StoreIOError: a chunk is missing or too short, or the drive failed.
        """
        every = portions(array.leaf.grid, max_elements)
        for chunk, members in groupby(every, key=lambda portion: portion.chunk):
            sums: list[tuple[int, int]] = []
            for portion in members:
                values = self.read(array, portion)
                sums.append((crc32c(values), values.nbytes))
                yield portion, values
            self._check(array, chunk, crc32c_combine(sums))

    def _check(self, array: StoredArray, chunk: int, found: int) -> None:
        expected = self.commit.checksums.get(array.name, ())
        if chunk >= len(expected) or expected[chunk] != found:
            wanted = f"{expected[chunk]:08x}" if chunk < len(expected) else "none"
            raise StoreCorruptError(
                f"{self.path / array.name}: chunk {chunk} of {array.leaf.name}, "
                f"{array.state.name}, on CSD {array.leaf.csds[chunk]}: expected "
                f"CRC-32C {wanted} as written, found {found:08x}; nothing was "
                'exported. See "jaxinf verify" for all that is damaged, and export '
                "another checkpoint"
            )

    def read(self, array: StoredArray, portion: Portion) -> Array:
        """A portion of an array, unchecked; blocks.

        Raises:
          StoreIOError: the chunk is missing or too short, or the drive failed.
        """
        file = self.path / array.name / portion.chunk_key
        values = np.empty(portion.num_elements, array.dtype)
        offset_bytes = portion.offset_elements * array.state.itemsize
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
        return values.reshape(portion.extent)


def _read_fully(fd: int, memory: memoryview, offset_bytes: int) -> int:
    done = 0
    while done < len(memory):
        num_bytes = os.preadv(fd, [memory[done:]], offset_bytes + done)
        if num_bytes == 0:
            break
        done += num_bytes
    return done
