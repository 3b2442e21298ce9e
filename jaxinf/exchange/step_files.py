"""A committed step to be exported, and its params as an export has them.

Adapters of low rank (LoRA) are added to their matrices, and of a schedule-free
optimizer's params the export has their average, of which its model is to be used.

Invariant: files are only read, one portion of an array at a time, and every chunk that
  differs from its checksum is detected. A matrix with an adapter is W + alpha / rank *
  A @ B, computed in float32 and rounded once; alpha is the commit's.
"""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.errors import ExchangeError
from jaxinf.layout import DEFAULT_CHUNK_ELEMENTS, Portion, portions
from jaxinf.store import (
    MASTER_PARAMS,
    SCHEDULE_FREE,
    CommitRecord,
    LeafRecord,
    Manifest,
    PieceRuns,
    StateRecord,
    StepReader,
    StoreDirectory,
    dtype_of,
    schedule_free_params,
)
from jaxinf.typing import AVERAGE, Array, ProgressCallback

DEFAULT_FILE_BYTES = 4 << 30
DEFAULT_MEMORY_BYTES = 256 << 20
"""Default memory for data in transit in an export or an import."""

LORA_A, LORA_B = "lora_a", "lora_b"
"""Names of the leaves beside a matrix: [in, rank] and [rank, out]."""


@dataclass(frozen=True)
class Transit:
    """How an export moves.

    Attributes:
      memory_bytes: memory for data in transit.
      progress: called with the bytes done and those in all.
      stop: once it is set, an export to a URL ends with an ExchangeError.
      max_file_bytes: size at which another safetensors file begins; an array is never
        split.
    """

    memory_bytes: int = DEFAULT_MEMORY_BYTES
    progress: ProgressCallback | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    max_file_bytes: int = DEFAULT_FILE_BYTES


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
        """The step's record, checked to be of these arrays."""
        path = self.path / "commit.json"
        record = self.record or CommitRecord.read(path)
        record.check_fits(path, self.manifest)
        return record

    @property
    def architecture(self) -> Mapping[str, Any]:
        """The model as `jaxinf.train` writes it into the commit; empty of others."""
        payload = self.commit.payload
        said = payload.get("architecture") if isinstance(payload, Mapping) else None
        return said if isinstance(said, Mapping) else {}

    @property
    def adapter_alpha(self) -> float | None:
        """Alpha as the commit says it; without, leaves are no adapters."""
        found = self.architecture.get("lora_alpha")
        return float(found) if isinstance(found, int | float) else None

    def reader(self, memory_bytes: int = 32 << 20) -> StepReader:
        """Makes a reader of its chunks, with so much memory for pieces."""
        has_csds = bool(self.manifest.csds)  # else all chunks are here
        store = StoreDirectory.of_step(self.path, self.manifest) if has_csds else None
        options = {"directory": store, "places": self.places}
        return StepReader(self.path, self.commit, memory_bytes=memory_bytes, **options)

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


@dataclass(frozen=True)
class ParamArray:
    """A param of a step, or its average if that is asked for; nothing is read yet.

    Attributes:
      step: its step.
      leaf: its leaf's record.
      adapter: A, B and alpha if an adapter is to be added.
    """

    step: StepFiles
    leaf: LeafRecord
    adapter: "tuple[ParamArray, ParamArray, float] | None" = None

    @property
    def dtype(self) -> np.dtype:
        return dtype_of(self._states[self._state_name].decoded().dtype)

    @property
    def name(self) -> str:
        """Its keys joined by ``.``; that of params that are one array is ``params``."""
        return self.leaf.array_name(MASTER_PARAMS).removeprefix(MASTER_PARAMS + ".")

    @property
    def _states(self) -> dict[str, StateRecord]:
        return {state.name: state for state in self.leaf.states if not state.is_beside}

    @property
    def _state_name(self) -> str:
        # A leaf that is not trained is its own average.
        has_average = self.step.average and AVERAGE in self._states
        return AVERAGE if has_average else MASTER_PARAMS

    def stream(self, max_elements: int) -> Iterator[tuple[Portion, Array]]:
        """Yields it portion by portion; raises as `StepFiles.stream`."""
        portions = self._averaged(max_elements)
        if self.adapter is None:
            yield from portions
            return
        a, b = (part._whole() for part in self.adapter[:2])
        scale = np.float32(self.adapter[2] / a.shape[1])
        for portion, values in portions:
            rows, columns = portion.slices
            added = a[rows] @ b[:, columns] * scale
            yield portion, values.astype(np.float32) + added

    def _averaged(self, max_elements: int) -> Iterator[tuple[Portion, Array]]:
        step, states = self.step, self._states
        b1, z = step.commit.schedule_free_b1, states.get(SCHEDULE_FREE)
        portions = step.stream(self.leaf, states[self._state_name], max_elements)
        if b1 is None or z is None or step.average:
            yield from portions
            return
        others = step.stream(self.leaf, z, max_elements)
        for (portion, y), (_, values) in zip(portions, others, strict=True):
            yield portion, schedule_free_params(y, values, b1)

    def _whole(self) -> Array:
        whole = np.empty(self.leaf.shape, np.float32)
        for portion, values in self.stream(DEFAULT_CHUNK_ELEMENTS):
            whole[portion.slices] = values
        return whole


def adapters(step: StepFiles) -> dict[tuple[str, ...], tuple[ParamArray, ParamArray]]:
    """Returns A and B by the path of their layer; none if the commit has no alpha."""
    if step.adapter_alpha is None:
        return {}
    leaves = {leaf.path: leaf for leaf in step.manifest.leaves if leaf.path}
    return {
        path[:-1]: (ParamArray(step, a), ParamArray(step, leaves[*path[:-1], LORA_B]))
        for path, a in leaves.items()
        if path[-1] == LORA_A
    }


def param_arrays(step: StepFiles) -> list[ParamArray]:
    """Returns the params of a step, with its adapters in their matrices."""
    names = step.manifest.state_names
    if step.average and AVERAGE not in names:
        raise ExchangeError(
            f"{step.path}: expected a store with an average of the params, found "
            f"{', '.join(names)}; leave --average out"
        )
    alpha, beside = step.adapter_alpha, adapters(step)
    result = []
    for leaf in step.manifest.leaves:
        *owner, name = leaf.path or ("",)
        parts, adapter = beside.get(tuple(owner)), None
        if parts is not None and name in (LORA_A, LORA_B):
            continue
        if parts is not None and alpha is not None and name == "kernel":
            adapter = (*parts, alpha)
        result.append(ParamArray(step, leaf, adapter))
    return result
