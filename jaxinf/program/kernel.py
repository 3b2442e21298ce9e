"""The kernels that run on chunks: a leaf's update, and its first state.

Invariant: a kernel is data: equal programs compare and hash equal, and leaves with
equal programs share one kernel. `jaxinf.kernels` runs it.
"""

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from jaxinf.program.ir import (
    Equation,
    Input,
    Operand,
    Result,
    describe_body,
)
from jaxinf.typing import AVERAGE


@dataclass(frozen=True)
class Kernel:
    """One leaf's update, or its first state, as straight-line code.

    Attributes:
      slots: Names of the stored state, in order.
      slot_dtypes: Their dtypes.
      scalar_dtypes: Dtypes in which prologue scalars come (32-bit or bool).
      array_dtypes: Dtypes of the prologue's arrays, one element per leaf element.
      equations: The body.
      update: optax's update `u` (float32); None where it is the literal zero,
        and for a first state, which does not depend on the old one.
      new_slots: The slots' new values.
      reciprocals: For each scalar, whether XLA multiplies by its reciprocal instead of
        dividing by it. It does if the scalar is broadcast and has no other use in the
        update of all leaves. Empty for none.
      reduced: Numbers of the equations whose values the prologue reduces, too. XLA
        computes each in a loop of its own, and the others read it from memory.
    """

    slots: tuple[str, ...]
    slot_dtypes: tuple[np.dtype, ...]
    scalar_dtypes: tuple[np.dtype, ...]
    array_dtypes: tuple[np.dtype, ...]
    equations: tuple[Equation, ...]
    update: Operand | None
    new_slots: tuple[Operand, ...]
    reciprocals: tuple[bool, ...] = ()
    reduced: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of all fields, cached: a step looks kernels up for every subgroup."""
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    @property
    def num_arrays(self) -> int:
        """Number of prologue arrays that it reads."""
        return len(self.array_dtypes)

    @cached_property
    def unchanged(self) -> frozenset[str]:
        """Slots (and ``"params"``) that the update provably does not change."""
        names = {
            name
            for index, (name, value) in enumerate(
                zip(self.slots, self.new_slots, strict=True)
            )
            if isinstance(value, Input) and (value.kind, value.index) == ("slot", index)
        }
        return frozenset(names | ({"params"} if self.update is None else set()))

    def describe(self) -> list[str]:
        """The program line by line, with every literal shown as ``#``."""
        outputs = [("update", self.update), *zip(self.slots, self.new_slots)]  # noqa: B905
        return describe_body(self.equations, outputs)

    @cached_property
    def identity(self) -> tuple[str, ...]:
        """Describes the optimizer alone, without an average of the params."""
        if AVERAGE not in self.slots:
            return tuple(self.describe())
        outputs = [("update", self.update), *zip(self.slots, self.new_slots)]  # noqa: B905
        outputs = [(name, value) for name, value in outputs if name != AVERAGE]
        # The average's equations come after all that the optimizer needs.
        last = max((v.index for _, v in outputs if isinstance(v, Result)), default=-1)
        return tuple(describe_body(self.equations[: last + 1], outputs))
