"""What one call brings for an update.

Invariant: its arrays belong to the caller; they are used until `StepEngine.update`
returns, and not after.
"""

from dataclasses import dataclass

import numpy as np

from jaxinf.compress import SparseLeaf
from jaxinf.csd import ScalarInputs
from jaxinf.program import Kernel
from jaxinf.typing import Array

__all__ = ["UpdateRequest"]


@dataclass(frozen=True)
class UpdateRequest:
    """What one call brings for an update: a leaf, or a JAX device's shard of it.

    Attributes:
      leaf: its number.
      kernel: the update.
      origin: index in the leaf of the arrays' first element.
      gradient: 16 or 32 bits, or what a compression sends of it; only read.
      inputs: scalars, and arrays of the gradient's shape.
      out: of the gradient's shape; float32 receives the update, 16 bits the new params,
        rounded to nearest even, or as the store rounds them (docs/format.md, "Codecs").
        None where nobody wants either.
      probe: the first few params on the JAX device, or empty: compared with the master.
      params: params on the JAX device, of the gradient's shape. Where they are what
        the store has as `params` to the bit, they are taken instead of reading those.
        None where they are not at hand.
      wants_params: float32 `out` receives the new params, not the update.
      feedback: float32 of the gradient's shape, the error feedback after this step;
        None where it stays as it is.
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
        """Of what the kernel gives, wanted or not."""
        return np.dtype(np.float32) if self.out is None else self.out.dtype

    @property
    def link_up_bytes(self) -> int:
        """Bytes that go back on the link."""
        return 0 if self.out is None else self.out.nbytes

    @property
    def link_bytes(self) -> int:
        """Bytes that the gradient takes on the link, error feedback included."""
        feedback = 0 if self.feedback is None else self.feedback.nbytes
        return self.gradient.nbytes + feedback
