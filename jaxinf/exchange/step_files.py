"""A committed step to be exported, read portion by portion.

Invariant: files are only read, one portion of an array at a time, and every chunk that
  differs from its checksum is detected.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

from jaxinf.layout import Portion, portions
from jaxinf.store import (
    CommitRecord,
    LeafRecord,
    Manifest,
    PieceRuns,
    StateRecord,
    StepReader,
    StoreDirectory,
    dtype_of,
)
from jaxinf.typing import Array

DEFAULT_MEMORY_BYTES = 256 << 20
"""Default memory for data in transit in an export or an import."""


@dataclass(frozen=True)
class StepFiles:
    """A committed step that does not change while it is read.

    Attributes:
      path: a directory with a slot's layout: a snapshot or a checkpoint.
      manifest: the manifest of its store.
      average: whether its only arrays are the params' average, in their place.
      record: the step's record; by default it is read.
      places: directories of chunks by CSD of a step whose store is not one directory.
    """

    path: Path
    manifest: Manifest
    average: bool = False
    record: CommitRecord | None = None
    places: tuple[Path, ...] = ()

    @cached_property
    def commit(self) -> CommitRecord:
        """The step's record.

        Raises:
          StoreFormatError: it is missing or damaged, or not of these arrays.
        """
        path = self.path / "commit.json"
        record = self.record or CommitRecord.read(path)
        record.check_fits(path, self.manifest)
        return record

    @cached_property
    def _directory(self) -> StoreDirectory | None:
        """Returns the store's directories on CSDs, or None if all chunks are here."""
        if not self.manifest.csds:
            return None
        return StoreDirectory.of_step(self.path, self.manifest)

    def reader(self, memory_bytes: int = 32 << 20) -> StepReader:
        """Makes a reader of its chunks, with so much memory for pieces."""
        return StepReader(
            self.path,
            self.commit,
            directory=self._directory,
            places=self.places,
            memory_bytes=memory_bytes,
        )

    def stream(
        self, leaf: LeafRecord, state: StateRecord, max_elements: int
    ) -> Iterator[tuple[Portion, Array]]:
        """Yields a leaf's state, decoded, portion by portion; blocks.

        Args:
          state: not that of scales or remainders of another state.

        Raises:
          StoreCorruptError: a chunk is damaged; raised before its last portion.
          StoreIOError: a chunk is missing or too short, or the drive failed.
        """
        every = portions(leaf.grid, max_elements)
        dtype = dtype_of(state.decoded().dtype)
        with self.reader() as reader:
            for chunk, members in groupby(every, key=lambda portion: portion.chunk):
                runs = PieceRuns(reader.pieces(leaf, state, [chunk]), dtype)
                for portion in members:
                    values = runs.take(portion.num_elements)
                    yield portion, values.reshape(portion.extent)
