"""The contents of a store without their places: leaves, states, kernels.

Invariant: equal contents have the same optimizer and the same tree.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np

from jaxinf.io import page_ceil
from jaxinf.layout import CODE_BLOCK, Chunk
from jaxinf.store.names import leaf_name

CODECS = ("bf16", "int8")
"""Codecs of the optimizer's state."""

MASTER_CODECS = ("split", "bf16")
"""Codecs of the master params of leaves that are bfloat16 on the JAX device."""

# Codecs of arrays that belong to the array before them, and the ends of their names.
BESIDE = {"scale": "_scale", "remainder": "_remainder"}


@cache
def dtype_of(name: str) -> np.dtype[Any]:
    """Returns the NumPy dtype of a name on disk; ``bfloat16`` is one of them."""
    import ml_dtypes

    if name == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


@dataclass(frozen=True)
class StateRecord:
    """One stored array of a leaf.

    Attributes:
      name: name of the optax state's field; with an end of `BESIDE` if it belongs to
        the array before it.
      dtype: dtype of the stored elements.
      codec: the codec for float32: ``"bf16"`` (rounded stochastically), ``"int8"``
        (codes; their scales are the next array), ``"scale"`` (these scales),
        ``"split"`` (rounded to bfloat16; the remainders are the next array),
        ``"remainder"`` (these remainders); empty if the optimizer computes with the
        stored elements.
    """

    name: str
    dtype: str
    codec: str = ""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtype_of(self.dtype).itemsize

    @property
    def slot(self) -> str:
        """Name of the optimizer's state, also for its scales or remainders."""
        return self.name.removesuffix(BESIDE.get(self.codec, ""))

    @property
    def is_beside(self) -> bool:
        """Whether it belongs to the array before it, and is not a state of its own."""
        return self.codec in BESIDE

    def num_elements(self, num_leaf_elements: int) -> int:
        """Returns the number of its elements for a number of the leaf's."""
        if self.codec == "scale":
            return -(-num_leaf_elements // CODE_BLOCK)
        return num_leaf_elements

    def stored_bytes(self, chunk: Chunk) -> int:
        """Returns the bytes of a chunk's file in one slot on the drive: whole pages."""
        if not chunk.num_elements:
            return 0
        return page_ceil(self.num_elements(chunk.num_elements) * self.itemsize)

    def coded(self, codec: str) -> tuple["StateRecord", ...]:
        """Returns the arrays that store this state with a codec."""
        if codec == "bf16":
            return (StateRecord(self.name, "bfloat16", codec),)
        if codec == "split":
            rest = StateRecord(self.name + BESIDE["remainder"], "int16", "remainder")
            return (StateRecord(self.name, "bfloat16", codec), rest)
        assert codec == "int8"
        scales = StateRecord(self.name + BESIDE["scale"], "float32", "scale")
        return (StateRecord(self.name, "uint8", codec), scales)

    def decoded(self) -> "StateRecord":
        """Returns the state in the form that the optimizer computes with."""
        return StateRecord(self.slot, "float32") if self.codec else self


@dataclass(frozen=True, kw_only=True)
class LeafContents:
    """One leaf of the params tree.

    Attributes:
      path: its keys.
      shape: its natural shape.
      dtype: the dtype of the params on the JAX device.
      kernel: key into `StoreContents.kernels`.
      states: its stored arrays, the master params first.
      shard_counts: shards along each dimension when the store was made.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    kernel: str
    states: tuple[StateRecord, ...]
    shard_counts: tuple[int, ...]

    @property
    def name(self) -> str:
        """The leaf's keys joined by ``/``."""
        return leaf_name(self.path)

    def state(self, name: str) -> StateRecord:
        """Returns the record of a stored array, which must exist."""
        return next(state for state in self.states if state.name == name)

    @property
    def slots(self) -> tuple[StateRecord, ...]:
        """The states that the optimizer computes with, the master params first."""
        return tuple(s.decoded() for s in self.states if not s.is_beside)

    def beside(self, state: StateRecord) -> StateRecord | None:
        """Returns the array that belongs to a state's: scales, remainders, or None."""
        found = (s for s in self.states if s.is_beside and s.slot == state.name)
        return next(found, None)


@dataclass(frozen=True, kw_only=True)
class StoreContents:
    """All leaves of a store.

    Attributes:
      kernels: the updates' equations as text, by id.
      leaves: in the order of the flattened params tree.
      created_by: versions of jaxinf, jax and optax.
    """

    kernels: Mapping[str, tuple[str, ...]]
    leaves: tuple[LeafContents, ...]
    created_by: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def num_params(self) -> int:
        """Elements over all leaves."""
        return sum(math.prod(leaf.shape) for leaf in self.leaves)

    def tree_difference(self, other: "StoreContents") -> list[str]:
        """Lists differences between the leaves and states of `other` and these.

        Grids, CSDs and versions are not compared; they may differ between stores.
        """
        mine = {leaf.name: leaf for leaf in self.leaves}
        theirs = {leaf.name: leaf for leaf in other.leaves}
        lines = [f"- leaf {n}: in the store only" for n in mine if n not in theirs]
        lines += [f"+ leaf {n}: not in the store" for n in theirs if n not in mine]
        for name in (n for n in mine if n in theirs):
            lines += _leaf_difference(mine[name], theirs[name])
        if not lines and list(mine) != list(theirs):
            lines.append("the same leaves come in another order")
        return lines

    def kernel_difference(self, other: "StoreContents") -> list[str]:
        """Describes the first update that differs; the leaves must be the same."""
        for mine, theirs in zip(self.leaves, other.leaves, strict=True):
            old, new = self.kernels[mine.kernel], other.kernels[theirs.kernel]
            if old != new:
                diff = difflib.unified_diff(old, new, "store", "optimizer", lineterm="")
                return [f"the update of leaf {mine.name} has other equations:", *diff]
        return []


def _leaf_difference(old: LeafContents, new: LeafContents) -> list[str]:
    lines = []
    if old.shape != new.shape:
        lines.append(
            f"leaf {old.name}: shape {old.shape} in the store, {new.shape} given"
        )
    if old.dtype != new.dtype:
        lines.append(
            f"leaf {old.name}: params {old.dtype} in the store, {new.dtype} given"
        )
    if old.slots != new.slots:
        lines.append(
            f"leaf {old.name}: states {_states_text(old.slots)} in the store, "
            f"{_states_text(new.slots)} given"
        )
    return lines


def _states_text(states: Sequence[StateRecord]) -> str:
    return "(" + ", ".join(f"{s.name} {s.dtype}" for s in states) + ")"
