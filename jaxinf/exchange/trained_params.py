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

from jaxinf.errors import ExchangeError
from jaxinf.exchange.step_files import StepFiles
from jaxinf.layout import DEFAULT_CHUNK_ELEMENTS, Portion
from jaxinf.store import (
    MASTER_PARAMS,
    SCHEDULE_FREE,
    LeafRecord,
    StateRecord,
    dtype_of,
    schedule_free_params,
)
from jaxinf.typing import AVERAGE, Array

LORA_A, LORA_B = "lora_a", "lora_b"
"""Names of the leaves beside a matrix: [in, rank] and [rank, out]."""


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
    if adapter_alpha(step) is None:
        return {}
    leaves = {leaf.path: leaf for leaf in step.manifest.leaves if leaf.path}
    return {
        path[:-1]: (ParamArray(step, a), ParamArray(step, leaves[*path[:-1], LORA_B]))
        for path, a in leaves.items()
        if path[-1] == LORA_A
    }


def param_arrays(step: StepFiles) -> list[ParamArray]:
    """Returns the params of a step, with its adapters in their matrices.

    Raises:
      ExchangeError: their average is asked for, and there is none.
    """
    names = step.manifest.state_names
    if step.average and AVERAGE not in names:
        raise ExchangeError(
            f"{step.path}: expected a store with an average of the params, found "
            f"{', '.join(names)}; leave --average out"
        )
    alpha, beside = adapter_alpha(step), adapters(step)
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


def adapter_alpha(step: StepFiles) -> float | None:
    """Returns alpha as the commit says it; without, leaves are no adapters."""
    payload = step.commit.payload
    said: Any = payload.get("architecture") if isinstance(payload, Mapping) else None
    found = said.get("lora_alpha") if isinstance(said, Mapping) else None
    return float(found) if isinstance(found, int | float) else None
