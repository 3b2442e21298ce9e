"""A committed step to be exported: its arrays, read portion by portion.

Invariant: files are only read, one portion of an array at a time, and every chunk that
  differs from its checksum is detected.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np

from jaxinf.errors import ExchangeError
from jaxinf.layout import Portion, portions
from jaxinf.store import (
    MASTER_PARAMS,
    CommitRecord,
    LeafRecord,
    Manifest,
    PieceRuns,
    StateRecord,
    StepReader,
    StoreDirectory,
    dtype_of,
)
from jaxinf.typing import AVERAGE, Array

DEFAULT_MEMORY_BYTES = 256 << 20
"""Default memory for data in transit in an export or an import."""


@dataclass(frozen=True)
class StoredArray:
    """A state of a leaf, in the form that the optimizer computes with.

    Attributes:
      leaf: the leaf's record.
      state: the state's record; not that of scales or remainders of another state.
      is_average: whether it is the average in the place of the params.
    """

    leaf: LeafRecord
    state: StateRecord
    is_average: bool = False

    @property
    def state_name(self) -> str:
        """Name of its state in an export."""
        return MASTER_PARAMS if self.is_average else self.state.name

    @property
    def name(self) -> str:
        """Its directory below an exported step."""
        return self.leaf.array_name(self.state_name)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of its elements."""
        return dtype_of(self.state.decoded().dtype)


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

    def arrays(self) -> Iterator[StoredArray]:
        """Yields all arrays, those of the master params first, then state by state.

        Raises:
          ExchangeError: there is no average to yield.
        """
        names = self.manifest.state_names
        if self.average:
            if AVERAGE not in names:
                raise ExchangeError(
                    f"{self.path}: expected a store with an average of the params, "
                    f"found {', '.join(names)}; leave --average out"
                )
            names = (AVERAGE,)
        for name in names:
            for leaf in self.manifest.leaves:
                for state in leaf.states:
                    if state.name == name and not state.is_beside:
                        yield StoredArray(leaf, state, self.average)

    def stream(
        self, array: StoredArray, max_elements: int
    ) -> Iterator[tuple[Portion, Array]]:
        """Yields an array portion by portion, in its dtype; blocks.

        Coded state is decoded.

        Raises:
          StoreCorruptError: a chunk is damaged; raised before its last portion.
          StoreIOError: a chunk is missing or too short, or the drive failed.
        """
        every = portions(array.leaf.grid, max_elements)
        with self.reader() as reader:
            for chunk, members in groupby(every, key=lambda portion: portion.chunk):
                pieces = reader.pieces(array.leaf, array.state, [chunk])
                runs = PieceRuns(pieces, array.dtype)
                for portion in members:
                    values = runs.take(portion.num_elements)
                    yield portion, values.reshape(portion.extent)
