"""The content of one call for an update, or for a slot before it.

Invariant: the arrays belong to the caller, and are used only until `StepEngine.update`
or `StepEngine.recall` returns.
"""

from dataclasses import dataclass

import numpy as np

from jaxinf.compress import SparseLeaf
from jaxinf.csd import ScalarInputs
from jaxinf.program import Kernel
from jaxinf.typing import Array


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
      wants_params: whether float32 `out` receives the new params, not the update.
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
    wants_params: bool = False
    feedback: Array | None = None

    @property
    def out_dtype(self) -> np.dtype:
        """Dtype of the kernel's result, even if it is not needed."""
        return np.dtype(np.float32) if self.out is None else self.out.dtype

    @property
    def returns_params(self) -> bool:
        """Whether the result depends on the params."""
        is_wanted = self.wants_params and self.out is not None
        return is_wanted or self.out_dtype != np.float32

    @property
    def link_up_bytes(self) -> int:
        """Bytes that return over the link."""
        return 0 if self.out is None else self.out.nbytes

    @property
    def link_bytes(self) -> int:
        """Bytes of the gradient on the link, with error feedback."""
        feedback = 0 if self.feedback is None else self.feedback.nbytes
        return self.gradient.nbytes + feedback
