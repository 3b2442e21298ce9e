"""What runs on chunks: the update of a leaf, and the making of its first state.

Invariant: a kernel is a value: equal programs compare and hash equal, and leaves with
equal programs share one kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from jaxinf.kernels.codecs import CodedSlot
from jaxinf.kernels.evaluator import Evaluator
from jaxinf.kernels.ir import (
    Equation,
    Input,
    Operand,
    describe_body,
    inputs_of,
)
from jaxinf.typing import Array

__all__ = ["InitKernel", "Kernel"]


@dataclass(frozen=True)
class Kernel:
    """One leaf's update as straight-line code.

    Attributes:
      slots: Names of the stored state, in order.
      slot_dtypes: Their dtypes.
      scalar_dtypes: Dtypes in which prologue scalars come (32-bit or bool).
      array_dtypes: Dtypes of the prologue's arrays, one element per leaf element.
      equations: The body.
      update: optax's update `u` (float32); None where it is the literal zero.
      new_slots: The slots' new values.
      reciprocals: Of each scalar, whether XLA multiplies by its reciprocal where the
        equations divide by it: it is broadcast, and used nowhere else in the update of
        all leaves. Empty: none.
    """

    slots: tuple[str, ...]
    slot_dtypes: tuple[np.dtype, ...]
    scalar_dtypes: tuple[np.dtype, ...]
    array_dtypes: tuple[np.dtype, ...]
    equations: tuple[Equation, ...]
    update: Operand | None
    new_slots: tuple[Operand, ...]
    reciprocals: tuple[bool, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Of all fields; a step looks kernels up for every subgroup."""
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    @property
    def num_scalars(self) -> int:
        """How many prologue scalars it reads."""
        return len(self.scalar_dtypes)

    @property
    def num_arrays(self) -> int:
        """How many prologue arrays it reads."""
        return len(self.array_dtypes)

    @property
    def reads_gradient(self) -> bool:
        """Whether the body reads the gradient (`evaluate` checks it regardless)."""
        return ("gradient", 0) in self._inputs

    @property
    def reads_params(self) -> bool:
        """Whether the body reads the master params (beside adding `u` to them)."""
        return ("params", 0) in self._inputs

    @cached_property
    def unchanged(self) -> frozenset[str]:
        """Slots (and ``"params"``) that the update provably leaves as they are."""
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

    def evaluate(
        self,
        *,
        gradient: Array,
        params: Array | CodedSlot,
        slots: Sequence[Array | CodedSlot],
        scalars: Sequence[np.generic | Array],
        arrays: Sequence[Array],
        out: Array,
    ) -> bool:
        """Updates one chunk in place; blocks the caller; thread-safe.

        Works in blocks of 32 Ki elements: temporary memory does not grow with the
        chunk. Every operation computes in the dtype optax gave it (16-bit floats in
        float32, then rounded, as XLA does on CPU), without fused multiply-adds.
        Denormal float32 results are flushed to zero, as XLA does on CPU.

        Args:
          gradient: ``(n,)`` float32, bfloat16 or float16; only read.
          params: ``(n,)`` float32 master, becomes ``params + u``; it may be given as it
            is coded in bfloat16.
          slots: ``(n,)`` each, become the new state; a float32 slot may be given as it
            is coded.
          scalars: 0-d, as the prologue gave them.
          arrays: ``(n,)`` each, the chunk's part of the prologue's arrays.
          out: ``(n,)``: float32 receives `u`; bfloat16 or float16 receives the new
            params rounded to nearest even, or, of coded params, their bfloat16 codes.

        Returns:
          Whether all of the gradient is finite. If not, `params`, `slots` and `out`
          hold garbage and are to be discarded.

        Raises:
          TypeError, ValueError: A dtype, shape or count is not the kernel's.
        """
        return self._evaluator.run_update(
            gradient=gradient,
            params=params,
            slots=slots,
            scalars=scalars,
            arrays=arrays,
            out=out,
        )

    def check_arguments(
        self,
        *,
        gradient: Array,
        params: Array | CodedSlot,
        slots: Sequence[Array | CodedSlot],
        scalars: Sequence[np.generic | Array],
        arrays: Sequence[Array],
        out: Array,
    ) -> list[np.generic]:
        """Checks what `evaluate` takes and returns the scalars as NumPy's.

        Raises:
          TypeError, ValueError: A dtype, shape or count is not the kernel's.
        """
        return self._evaluator.check_update(
            gradient=gradient,
            params=params,
            slots=slots,
            scalars=scalars,
            arrays=arrays,
            out=out,
        )

    @cached_property
    def _inputs(self) -> set[tuple[str, int]]:
        return inputs_of(self.equations, [self.update, *self.new_slots])

    @cached_property
    def _evaluator(self) -> Evaluator:
        return Evaluator(
            equations=self.equations,
            update=self.update,
            new_slots=self.new_slots,
            slot_dtypes=self.slot_dtypes,
            scalar_dtypes=self.scalar_dtypes,
            array_dtypes=self.array_dtypes,
        )


@dataclass(frozen=True)
class InitKernel:
    """One leaf's first state, elementwise in its params; attributes as in `Kernel`."""

    slots: tuple[str, ...]
    slot_dtypes: tuple[np.dtype, ...]
    scalar_dtypes: tuple[np.dtype, ...]
    array_dtypes: tuple[np.dtype, ...]
    equations: tuple[Equation, ...]
    new_slots: tuple[Operand, ...]

    @property
    def reads_params(self) -> bool:
        """Whether the state depends on the params."""
        return ("params", 0) in inputs_of(self.equations, self.new_slots)

    def describe(self) -> list[str]:
        """The program line by line, with every literal shown as ``#``."""
        return describe_body(self.equations, list(zip(self.slots, self.new_slots)))  # noqa: B905

    def initialise(
        self,
        *,
        params: Array,
        slots: Sequence[Array],
        scalars: Sequence[np.generic | Array] = (),
        arrays: Sequence[Array] = (),
    ) -> None:
        """Writes one chunk's first state into `slots`; blocks; thread-safe.

        Args:
          params: ``(n,)`` float32 master; only read.
          slots: ``(n,)`` each, of the slots' dtypes; what they hold is not read.
          scalars: 0-d, as the prologue gave them.
          arrays: ``(n,)`` each, the chunk's part of the prologue's arrays.

        Raises:
          TypeError, ValueError: A dtype, shape or count is not the kernel's.
        """
        self._evaluator.run_init(
            params=params, slots=slots, scalars=scalars, arrays=arrays
        )

    @cached_property
    def _evaluator(self) -> Evaluator:
        return Evaluator(
            equations=self.equations,
            new_slots=self.new_slots,
            slot_dtypes=self.slot_dtypes,
            scalar_dtypes=self.scalar_dtypes,
            array_dtypes=self.array_dtypes,
        )
