"""The params of a step as an export has them.

Adapters of low rank (LoRA) are added to their matrices, and of a schedule-free
optimizer's params the export has their average, of which its model is to be used.

Invariant: a matrix with an adapter is W + alpha / rank * A @ B, computed in float32 and
  rounded once; alpha is the commit's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinf.exchange.step_files import StepFiles, StoredArray
from jaxinf.layout import DEFAULT_CHUNK_ELEMENTS, Portion
from jaxinf.store import (
    MASTER_PARAMS,
    SCHEDULE_FREE,
    LeafRecord,
    schedule_free_params,
)
from jaxinf.typing import Array

LORA_A, LORA_B = "lora_a", "lora_b"
"""Names of the leaves beside a matrix: [in, rank] and [rank, out]."""


@dataclass(frozen=True)
class ParamArray:
    """A param of a step; nothing is read yet.

    Attributes:
      step: its step.
      array: its array.
      adapter: A, B and alpha if an adapter is to be added.
    """

    step: StepFiles
    array: StoredArray
    adapter: "tuple[ParamArray, ParamArray, float] | None" = None

    @property
    def leaf(self) -> LeafRecord:
        return self.array.leaf

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def name(self) -> str:
        """Its keys joined by ``.``; that of params that are one array is ``params``."""
        return self.array.name.removeprefix(MASTER_PARAMS + ".")

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
        step, b1 = self.step, self.step.commit.schedule_free_b1
        portions = step.stream(self.array, max_elements)
        states = {state.name: state for state in self.leaf.states}
        if b1 is None or step.average or SCHEDULE_FREE not in states:
            yield from portions
            return
        z = StoredArray(self.leaf, states[SCHEDULE_FREE])
        others = step.stream(z, max_elements)
        for (portion, y), (_, z) in zip(portions, others, strict=True):
            yield portion, schedule_free_params(y, z, b1)

    def _whole(self) -> Array:
        whole = np.empty(self.leaf.shape, np.float32)
        for portion, values in self.stream(DEFAULT_CHUNK_ELEMENTS):
            whole[portion.slices] = values
        return whole


def adapters(step: StepFiles) -> dict[tuple[str, ...], tuple[ParamArray, ParamArray]]:
    """Returns A and B by the path of their layer; none if the commit has no alpha."""
    if adapter_alpha(step) is None:
        return {}
    found = {
        array.leaf.path: ParamArray(step, array)
        for array in step.arrays()
        if array.state_name == MASTER_PARAMS and array.leaf.path
    }
    return {
        path[:-1]: (a, found[*path[:-1], LORA_B])
        for path, a in found.items()
        if path[-1] == LORA_A
    }


def param_arrays(step: StepFiles) -> list[ParamArray]:
    """Returns the params of a step, with its adapters in their matrices."""
    alpha, beside = adapter_alpha(step), adapters(step)
    result = []
    for array in step.arrays():
        *owner, name = array.leaf.path or ("",)
        parts = beside.get(tuple(owner))
        if array.state_name != MASTER_PARAMS or (parts and name in (LORA_A, LORA_B)):
            continue
        adapter = None
        if parts is not None and alpha is not None and name == "kernel":
            adapter = (*parts, alpha)
        result.append(ParamArray(step, array, adapter))
    return result


def adapter_alpha(step: StepFiles) -> float | None:
    """Returns alpha as the commit says it; without, leaves are no adapters."""
    payload = step.commit.payload
    said: Any = payload.get("architecture") if isinstance(payload, Mapping) else None
    found = said.get("lora_alpha") if isinstance(said, Mapping) else None
    return float(found) if isinstance(found, int | float) else None
