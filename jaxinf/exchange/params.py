"""The params of a committed step as an export has them.

Adapters of low rank (LoRA) are added to their matrices, and of a schedule-free
optimizer's params the export has their average, of which its model is to be used.

Invariant: files are only read, one portion of an array at a time, and every chunk that
  differs from its checksum is detected. A matrix with an adapter is W + alpha / rank *
  A @ B, computed in float32 and rounded once; alpha is the commit's.
"""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from jaxinf.errors import ExchangeError
from jaxinf.layout import DEFAULT_CHUNK_ELEMENTS, ChunkBox
from jaxinf.store import (
    MASTER_PARAMS,
    SCHEDULE_FREE,
    CommittedStep,
    LeafRecord,
    StateRecord,
    dtype_of,
    schedule_free_params,
)
from jaxinf.typing import AVERAGE, Array, ProgressCallback

DEFAULT_MEMORY_BYTES = 256 << 20
"""Default memory for data in transit in an export or an import."""

LORA_A, LORA_B = "lora_a", "lora_b"
"""Names of the leaves beside a matrix: [in, rank] and [rank, out]."""


@dataclass(frozen=True)
class ExportOptions:
    """How an export moves.

    Attributes:
      memory_bytes: memory for data in transit.
      progress: called with the bytes done and those in all.
      stop: once it is set, an export to a URL ends with an ExchangeError.
    """

    memory_bytes: int = DEFAULT_MEMORY_BYTES
    progress: ProgressCallback | None = None
    stop: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class ParamArray:
    """A param of a step, or its average if that is asked for; nothing is read yet.

    Attributes:
      step: its step.
      leaf: its leaf's record.
      average: whether it is the params' average, in their place.
      adapter: what is to be added.
    """

    step: CommittedStep
    leaf: LeafRecord
    average: bool = False
    adapter: "Adapter | None" = None

    @property
    def path(self) -> str:
        """Its keys, joined by ``/``."""
        return "/".join(self.leaf.path)

    @property
    def name(self) -> str:
        """Its keys joined by ``.``; that of params that are one array is ``params``."""
        return self.leaf.array_name(MASTER_PARAMS).removeprefix(MASTER_PARAMS + ".")

    @property
    def dtype(self) -> np.dtype:
        return dtype_of(self._state.decoded().dtype)

    @property
    def _states(self) -> dict[str, StateRecord]:
        return {state.name: state for state in self.leaf.states if not state.is_beside}

    @property
    def _state(self) -> StateRecord:
        # A leaf that is not trained is its own average.
        has_average = self.average and AVERAGE in self._states
        return self._states[AVERAGE if has_average else MASTER_PARAMS]

    def stream(self, max_elements: int) -> Iterator[tuple[ChunkBox, Array]]:
        """Yields it portion by portion; raises as `StepReader.boxes`."""
        portions = self._averaged(max_elements)
        if self.adapter is None:
            yield from portions
            return
        *parts, alpha = self.adapter
        a, b = (part._whole() for part in parts)
        scale = np.float32(alpha / a.shape[1])
        for portion, values in portions:
            rows, columns = portion.slices
            added = a[rows] @ b[:, columns] * scale
            yield portion, values.astype(np.float32) + added

    def _averaged(self, max_elements: int) -> Iterator[tuple[ChunkBox, Array]]:
        portions = self.step.boxes(self.leaf, self._state, max_elements)
        b1, z = self.step.commit.schedule_free_b1, self._states.get(SCHEDULE_FREE)
        if b1 is None or z is None or self.average:
            yield from portions
            return
        others = self.step.boxes(self.leaf, z, max_elements)
        for (portion, y), (_, values) in zip(portions, others, strict=True):
            yield portion, schedule_free_params(y, values, b1)

    def _whole(self) -> Array:
        whole = np.empty(self.leaf.shape, np.float32)
        for portion, values in self.stream(DEFAULT_CHUNK_ELEMENTS):
            whole[portion.slices] = values
        return whole


Adapter: TypeAlias = tuple[ParamArray, ParamArray, float]
"""A, B and alpha."""


def said_architecture(step: CommittedStep) -> Mapping[str, Any]:
    """Returns the model as `jaxinf.train` writes it into the commit, else nothing."""
    payload = step.commit.payload
    said = payload.get("architecture") if isinstance(payload, Mapping) else None
    return said if isinstance(said, Mapping) else {}


def param_arrays(step: CommittedStep, *, average: bool = False) -> list[ParamArray]:
    """Returns the params of a step, or their average, with adapters in the matrices."""
    names = step.manifest.state_names
    if average and AVERAGE not in names:
        raise ExchangeError(
            f"{step.path}: expected a store with an average of the params, found "
            f"{', '.join(names)}; leave --average out"
        )
    leaves = step.manifest.leaves
    arrays = {leaf.path: ParamArray(step, leaf, average) for leaf in leaves}
    alpha, result = said_architecture(step).get("lora_alpha"), []
    for path, array in arrays.items():
        parts = [arrays.get((*path[:-1], name)) for name in (LORA_A, LORA_B)]
        if not isinstance(alpha, int | float) or None in parts:
            result.append(array)
        elif path[-1] == "kernel":
            result.append(replace(array, adapter=(*parts, float(alpha))))
        elif path[-1] not in (LORA_A, LORA_B):
            result.append(array)
    return result
