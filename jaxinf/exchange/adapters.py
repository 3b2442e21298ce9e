"""Adapters of low rank in a step (LoRA): added to their matrices, or by themselves.

Invariant: a matrix with an adapter is W + alpha / rank * A @ B, computed in float32 and
  rounded once; alpha is the commit's.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxinf.exchange.step_files import StepFiles, StoredArray
from jaxinf.layout import DEFAULT_CHUNK_ELEMENTS, Portion
from jaxinf.store import MASTER_PARAMS
from jaxinf.typing import Array

LORA_A, LORA_B = "lora_a", "lora_b"
"""Names of the leaves beside a matrix: [in, rank] and [rank, out]."""

Change = Callable[[Portion, Array], Array]
"""Returns other elements of a portion in the place of those that are stored."""


class Adapters:
    """The adapters of a step of jaxinf.train; nothing is read yet.

    Attributes:
      alpha: by which their product is multiplied, over the rank; None if the commit
        says nothing of adapters. Leaves have no meaning of their own then.
      arrays: A and B by the path of their layer.
    """

    def __init__(self, step: StepFiles) -> None:
        self._step = step
        self.alpha = _alpha(step)
        self.arrays: dict[tuple[str, ...], dict[str, StoredArray]] = {}
        for array in step.arrays():
            if array.state_name == MASTER_PARAMS and self.has(array):
                *owner, name = array.leaf.path
                self.arrays.setdefault(tuple(owner), {})[name] = array

    def has(self, array: StoredArray) -> bool:
        return self.alpha is not None and array.leaf.path[-1:] in ((LORA_A,), (LORA_B,))

    def change_of(self, array: StoredArray) -> Change | None:
        """Returns what adds its adapter to a matrix; None for other arrays."""
        *owner, name = array.leaf.path or ("",)
        parts, alpha = self.arrays.get(tuple(owner)), self.alpha
        if parts is None or alpha is None or name != "kernel":
            return None
        read: list[Array] = []

        def add(portion: Portion, values: Array) -> Array:
            if not read:
                read.extend(self._whole(parts[name]) for name in (LORA_A, LORA_B))
            a, b = read
            rows, columns = portion.slices
            added = a[rows] @ b[:, columns] * np.float32(alpha / a.shape[1])
            return values.astype(np.float32) + added

        return add

    def _whole(self, array: StoredArray) -> Array:
        whole = np.empty(array.leaf.shape, np.float32)
        for portion, values in self._step.stream(array, DEFAULT_CHUNK_ELEMENTS):
            whole[portion.slices] = values
        return whole


def _alpha(step: StepFiles) -> float | None:
    payload = step.commit.payload
    said: Any = payload.get("architecture") if isinstance(payload, Mapping) else None
    found = said.get("lora_alpha") if isinstance(said, Mapping) else None
    return float(found) if isinstance(found, int | float) else None
