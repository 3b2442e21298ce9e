"""Kernels: a leaf's update, or its first state, as one elementwise operation a line.

Invariant: a kernel is data: straight-line code, whose equations read inputs, literals
or earlier equations. Equal programs compare and hash equal, and leaves with equal ones
share a kernel. `jaxinf.kernels` runs it on chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

from jaxinf.typing import AVERAGE, BFLOAT16, FLOAT16, FLOAT32

_BOOL = np.dtype(np.bool_)
_SCALAR_DTYPES = (
    dict.fromkeys((FLOAT32, BFLOAT16, FLOAT16), FLOAT32)
    | dict.fromkeys(map(np.dtype, ("int8", "int16", "int32")), np.dtype(np.int32))
    | dict.fromkeys(map(np.dtype, ("uint8", "uint16", "uint32")), np.dtype(np.uint32))
    | {_BOOL: _BOOL}
)
"""The dtypes of a body, and those in which scalars are handed over to it."""

InputKind: TypeAlias = Literal["gradient", "params", "slot", "scalar", "array"]


@dataclass(frozen=True)
class Input:
    """A value that comes from outside the body.

    Attributes:
      kind: ``gradient`` and ``params`` (the master) are always float32.
      index: The number of the slot, scalar or array; 0 for other kinds.
      dtype: The dtype in which the body computes. Scalars of 16-bit floats are handed
        over as float32 (see `scalar_dtype`).
    """

    kind: InputKind
    index: int
    dtype: np.dtype


@dataclass(frozen=True)
class Constant:
    """A literal, kept as bytes so that NaN equals itself and -0.0 is not 0.0."""

    dtype: np.dtype
    data: bytes

    @classmethod
    def of(cls, value: Any, dtype: np.dtype) -> "Constant":
        return cls(dtype, np.asarray(value, dtype).tobytes())

    @property
    def value(self) -> np.generic:
        return np.frombuffer(self.data, self.dtype)[0]


@dataclass(frozen=True)
class Result:
    index: int
    dtype: np.dtype


Operand: TypeAlias = Input | Constant | Result


@dataclass(frozen=True)
class Equation:
    """``result = op(*inputs)``, elementwise; `inputs` that are scalars broadcast.

    Attributes:
      params: Static parameters, sorted by name (e.g. ``("y", 3)``).
      dtype: The result's; 16-bit floats are computed in float32 and rounded.
    """

    op: str
    inputs: tuple[Operand, ...]
    params: tuple[tuple[str, Any], ...]
    dtype: np.dtype


@dataclass(frozen=True)
class Kernel:
    """One leaf's update, or its first state, as straight-line code.

    Attributes:
      slots: Names of the slots, the arrays that the optimizer keeps for a leaf.
      scalar_dtypes: Dtypes in which prologue scalars come (32-bit or bool).
      array_dtypes: Dtypes of the prologue's arrays, one element per leaf element.
      update: Optax's update `u` (float32); None where it is the literal zero,
        and for a first state, which does not depend on the old one.
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

    @cached_property
    def unchanged(self) -> frozenset[str]:
        """Slots (and ``"params"``) that the update provably does not change."""
        pairs = enumerate(zip(self.slots, self.new_slots, strict=True))
        names = {
            name
            for index, (name, value) in pairs
            if isinstance(value, Input) and (value.kind, value.index) == ("slot", index)
        }
        return frozenset(names | ({"params"} if self.update is None else set()))

    def describe(self) -> list[str]:
        """Returns the program line by line, with every literal shown as ``#``."""
        return self._lines(len(self.equations), self.slots)

    @cached_property
    def identity(self) -> tuple[str, ...]:
        """Describes the optimizer alone, without an average of the params."""
        slots = [name for name in self.slots if name != AVERAGE]
        if len(slots) == len(self.slots):
            return tuple(self.describe())
        values = zip(self.slots, self.new_slots, strict=True)
        needed = [self.update, *(value for name, value in values if name in slots)]
        # The average's equations come after all that the optimizer needs.
        last = max((v.index for v in needed if isinstance(v, Result)), default=-1)
        return tuple(self._lines(last + 1, slots))

    def _lines(self, num_equations: int, slots: Sequence[str]) -> list[str]:
        lines = [
            f"%{index}: {equation.dtype} = {equation.op}{_listed(equation.params)} "
            + ", ".join(map(_operand, equation.inputs))
            for index, equation in enumerate(self.equations[:num_equations])
        ]
        outputs = [("update", self.update)]
        values = zip(self.slots, self.new_slots, strict=True)
        outputs += [(name, value) for name, value in values if name in slots]
        return lines + [f"{name} = {_operand(value)}" for name, value in outputs]


def is_supported_dtype(dtype: Any) -> bool:
    """Whether a body may hold values of `dtype` (no 64-bit, no random keys)."""
    return isinstance(dtype, np.dtype) and dtype in _SCALAR_DTYPES


def scalar_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which a kernel is given a scalar of a supported one."""
    return _SCALAR_DTYPES[dtype]


def needed_by(
    equations: Sequence[Equation], outputs: Sequence[Operand | None]
) -> set[Operand]:
    """Returns all operands on which outputs depend, outputs included."""
    needed = {operand for operand in outputs if operand is not None}
    for index, equation in reversed([*enumerate(equations)]):
        if Result(index, equation.dtype) in needed:
            needed |= {*equation.inputs}
    return needed


def inputs_of(
    equations: Sequence[Equation], outputs: Sequence[Operand | None]
) -> set[tuple[str, int]]:
    """Returns kind and index of every input on which outputs depend."""
    needed = needed_by(equations, outputs)
    return {(o.kind, o.index) for o in needed if isinstance(o, Input)}


def _listed(params: Sequence[tuple[str, Any]]) -> str:
    words = " ".join(f"{name}={value}" for name, value in params)
    return f"[{words}]" if words else ""


def _operand(operand: Operand | None) -> str:
    match operand:
        case None:
            return "0"
        case Constant():
            return f"#:{operand.dtype}"
        case Result():
            return f"%{operand.index}"
        case Input(kind="gradient" | "params"):
            return operand.kind
    return f"{operand.kind}{operand.index}:{operand.dtype}"
