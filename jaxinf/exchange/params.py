"""The params of a committed step, as they are exported.

Adapters of low rank (LoRA) are added to their matrices. The params of a schedule-free
optimizer are exported as their average, which is the model to use.

Invariant: files are only read, one portion of an array at a time, and every chunk that
differs from its checksum is detected. A matrix with an adapter is W + alpha / rank *
A @ B, computed in float32 and rounded once; alpha is the commit's.
"""

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxinf.errors import ExchangeError
from jaxinf.layout import DEFAULT_CHUNK_ELEMENTS, ChunkBox
from jaxinf.store import (
    MASTER_PARAMS,
    SCHEDULE_FREE,
    CommittedStep,
    LeafRecord,
    StateRecord,
    StepReader,
    dtype_of,
    schedule_free_params,
)
from jaxinf.typing import AVERAGE, Array, ProgressCallback

TRANSIT_BYTES = 256 << 20
"""Default memory for data in transit in an export or an import."""

LORA_A, LORA_B = "lora_a", "lora_b"
"""Names of the leaves beside a matrix: [in, rank] and [rank, out]."""


@dataclass(frozen=True)
class ExportOptions:
    """Memory, progress and stop of an export.

    Attributes:
      memory_bytes: Memory for data in transit.
      progress: Called with the bytes done and those in all.
      stop: Once it is set, an export to a URL ends with an ExchangeError.
    """

    memory_bytes: int = TRANSIT_BYTES
    progress: ProgressCallback = field(default_factory=lambda: lambda *_: None)
    stop: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class ParamArray:
    """A param of a step, or its average, as a tensor of a file; not read yet.

    Attributes:
      name: The tensor's name; by default the leaf's keys joined by ``.``.
      dtype: Dtype that its elements are rounded to, to nearest even.
      adapter: A, B and alpha of the adapter to add.
      axes: Order of the leaf's axes in the tensor; empty for no change.
    """

    step: CommittedStep
    leaf: LeafRecord
    state: StateRecord
    name: str
    dtype: np.dtype[Any]
    adapter: "tuple[ParamArray, ParamArray, float] | None" = None
    axes: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.leaf.shape)
        return tuple(shape[a] for a in self.axes) if self.axes else shape

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def stream(self, max_elements: int) -> Iterator[tuple[ChunkBox, Array]]:
        """Yields the leaf portion by portion; raises as `StepReader.boxes`."""
        portions = self._read_portions(max_elements)
        if self.adapter is None:
            yield from portions
            return
        *parts, alpha = self.adapter
        a, b = (part._read_whole() for part in parts)
        scale = np.float32(alpha / a.shape[1])
        for portion, values in portions:
            rows, columns = portion.slices
            added = a[rows] @ b[:, columns] * scale
            yield portion, values.astype(np.float32) + added

    def _read_portions(self, max_elements: int) -> Iterator[tuple[ChunkBox, Array]]:
        b1 = self.step.commit.schedule_free_b1
        names = [state.name for state in self.leaf.decoded_states]
        with StepReader(self.step) as reader:
            portions = reader.boxes(self.leaf, self.state, max_elements)
            if b1 is None or SCHEDULE_FREE not in names or self.state.name == AVERAGE:
                yield from portions
                return
            state = self.leaf.state(SCHEDULE_FREE)
            z_portions = reader.boxes(self.leaf, state, max_elements)
            for (portion, y), (_, z) in zip(portions, z_portions, strict=True):
                yield portion, schedule_free_params(y, z, b1)

    def _read_whole(self) -> Array:
        whole = np.empty(self.leaf.shape, np.float32)
        for portion, values in self.stream(DEFAULT_CHUNK_ELEMENTS):
            whole[portion.slices] = values
        return whole


def committed_architecture(step: CommittedStep) -> Mapping[str, Any]:
    """Returns the model as `jaxinf.train` writes it into the commit, else nothing."""
    payload = step.commit.payload
    record = payload.get("architecture") if isinstance(payload, Mapping) else None
    return record if isinstance(record, Mapping) else {}


def param_arrays(step: CommittedStep, *, average: bool = False) -> list[ParamArray]:
    """Returns the params of a step, or their average, with adapters in the matrices."""
    names = step.manifest.state_names
    if average and AVERAGE not in names:
        raise ExchangeError(
            f"{step.path}: expected a store with an average of the params, found "
            f"{', '.join(names)}; leave --average out"
        )
    arrays = {}
    for leaf in step.manifest.leaves:
        # A leaf that is not trained is its own average.
        has_average = average and AVERAGE in [state.name for state in leaf.states]
        state = leaf.state(AVERAGE if has_average else MASTER_PARAMS)
        name = leaf.array_name(MASTER_PARAMS).removeprefix(MASTER_PARAMS + ".")
        dtype = dtype_of(state.decoded().dtype)
        arrays[leaf.path] = ParamArray(step, leaf, state, name, dtype)
    alpha, result = committed_architecture(step).get("lora_alpha"), []
    for path, array in arrays.items():
        parts = [arrays.get((*path[:-1], name)) for name in (LORA_A, LORA_B)]
        if isinstance(alpha, int | float) and None not in parts:
            if path[-1] in (LORA_A, LORA_B):
                continue
            if path[-1] == "kernel":
                array = replace(array, adapter=(*parts, float(alpha)))
        result.append(array)
    return result
