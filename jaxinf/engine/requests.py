"""What a step is asked for, and who computes it in place of the CSDs.

Invariant: the arrays of a request belong to the caller, and are used only until
`StepEngine.update` or `StepEngine.recall` returns. Which subgroups an updater computes
changes between steps only; the others stay with the CSDs, with the same results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from jaxinf.compress import SparseLeaf
from jaxinf.csd import Csd, CsdBuffer, Extent, ScalarInputs, Update, UpdateOutcome
from jaxinf.engine.shape import StoreShape
from jaxinf.layout import Subgroup
from jaxinf.program import Kernel
from jaxinf.typing import Array

LEAST_ELEMENTS = 1 << 16
"""Shorter subgroups stay with the CSDs: an update of theirs is over before a call of
another processor has begun."""


@dataclass(frozen=True)
class KeptLeaf:
    """A leaf, or a JAX device's shard of it, that a step leaves as it is.

    Attributes:
      leaf: its number.
      origin: index in the leaf of the first element.
      shape: of the leaf or shard.
    """

    leaf: int
    origin: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SlotRequest:
    """A request for a slot of a leaf, or of a JAX device's shard of it.

    Attributes:
      leaf: its number.
      slot: the slot's name.
      origin: index in the leaf of the first element of `out`.
      out: receives the values in its dtype.
    """

    leaf: int
    slot: str
    origin: tuple[int, ...]
    out: Array


@dataclass(frozen=True)
class UpdateRequest:
    """The arrays of an update of a leaf, or of a JAX device's shard of it.

    Attributes:
      leaf: its number.
      kernel: the update.
      origin: index in the leaf of the arrays' first element.
      gradient: 16 or 32 bits, or its compressed form; only read.
      inputs: scalars, and arrays of the gradient's shape.
      out: of the gradient's shape; float32 receives the update, 16 bits the new params,
        rounded to nearest even, or as the store rounds them (docs/format.md, "Codecs").
        None if no result is needed.
      probe: the first few params on the JAX device, to compare with the master; or
        empty.
      params: params on the JAX device, of the gradient's shape. If they equal the
        store's `params` to the bit, those are not read. None if they are not available.
      feedback: float32 of the gradient's shape, the error feedback after this step;
        None if it does not change.
    """

    leaf: int
    kernel: Kernel
    origin: tuple[int, ...]
    gradient: Array | SparseLeaf
    inputs: ScalarInputs
    out: Array | None
    probe: Array
    params: Array | None = None
    feedback: Array | None = None

    @property
    def out_dtype(self) -> np.dtype:
        """Dtype of the kernel's result, even if it is not needed."""
        return np.dtype(np.float32) if self.out is None else self.out.dtype


class Updater(Protocol):
    """Computes updates of subgroups that are in a host CSD's buffers. Thread-safe."""

    @property
    def num_at_once(self) -> int:
        """Number of updates to run at once, each on a thread that waits for it."""
        ...

    def takes(self, extents: Sequence[Extent], kernel: Kernel) -> bool:
        """Whether it can compute a kernel on states of this form."""
        ...

    def update(self, csd: Csd, buffer: CsdBuffer, update: Update) -> UpdateOutcome:
        """Updates a buffer's states in place, as `Csd.update`; blocks.

        Args:
          csd, buffer: the CSD, and its buffer with the states.
          update: of a kernel that it takes, with a gradient that is not sparse; its
            `out` is left alone.

        Raises:
          StoreError: the processor failed, or has no memory left.
        """
        ...


@dataclass(frozen=True)
class Assignment:
    """Which subgroups an updater computes.

    Attributes:
      updater: the updater; None for none.
      every: it computes every so many of the subgroups that it can; 0 for none;
        "auto" while their number is measured.
      subgroups: these.
    """

    updater: Updater | None = None
    every: int | Literal["auto"] = 0
    subgroups: frozenset[Subgroup] = frozenset()


def assigned(
    shape: StoreShape, kernels: Sequence[Kernel], updater: Updater, every: int
) -> Assignment:
    """Assigns every so many subgroups to an updater, in the order of the store.

    Args:
      shape: the store's chunks.
      kernels: the update of each leaf.
      updater: the updater.
      every: 1 for all that it takes; 0 for none.
    """
    found: list[Subgroup] = []
    for leaf, kernel in enumerate(kernels):
        for layouts in shape.chunk_layouts(leaf):
            if all(updater.takes(x.kernel_extents, kernel) for x in layouts):
                own = (layout.subgroup for layout in layouts)
                found += (x for x in own if x.num_elements >= LEAST_ELEMENTS)
    chosen = frozenset(found[every - 1 :: every] if every else ())
    return Assignment(updater if chosen else None, every, chosen)
