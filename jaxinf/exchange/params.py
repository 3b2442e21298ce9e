"""The params of a committed step as an export has them.

Adapters of low rank (LoRA) are added to their matrices, and of a schedule-free
optimizer's params the export has their average, of which its model is to be used.

Invariant: files are only read, one portion of an array at a time, and every chunk that
  differs from its checksum is detected. A matrix with an adapter is W + alpha / rank *
  A @ B, computed in float32 and rounded once; alpha is the commit's.
"""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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

DEFAULT_FILE_BYTES = 4 << 30
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
      max_file_bytes: size at which another safetensors file begins; an array is never
        split.
    """

    memory_bytes: int = DEFAULT_MEMORY_BYTES
    progress: ProgressCallback | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    max_file_bytes: int = DEFAULT_FILE_BYTES


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


def adapters(
    step: CommittedStep, *, average: bool = False
) -> dict[tuple[str, ...], Adapter]:
    """Returns adapters by the path of their layer; none if the commit has no alpha."""
    alpha = said_architecture(step).get("lora_alpha")
    if not isinstance(alpha, int | float):
        return {}
    arrays = {
        leaf.path: ParamArray(step, leaf, average)
        for leaf in step.manifest.leaves
        if leaf.path
    }
    return {
        path[:-1]: (a, arrays[*path[:-1], LORA_B], float(alpha))
        for path, a in arrays.items()
        if path[-1] == LORA_A
    }


def param_arrays(step: CommittedStep, *, average: bool = False) -> list[ParamArray]:
    """Returns the params of a step, or their average, with adapters in the matrices."""
    names = step.manifest.state_names
    if average and AVERAGE not in names:
        raise ExchangeError(
            f"{step.path}: expected a store with an average of the params, found "
            f"{', '.join(names)}; leave --average out"
        )
    beside, result = adapters(step, average=average), []
    for leaf in step.manifest.leaves:
        *owner, name = leaf.path or ("",)
        adapter = beside.get(tuple(owner))
        if adapter is None or name not in (LORA_A, LORA_B):
            own = adapter if name == "kernel" else None
            result.append(ParamArray(step, leaf, average, own))
    return result
