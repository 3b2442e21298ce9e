"""The intermediate form of an update: one elementwise operation per equation.

Invariant: a body is straight-line code; every equation reads inputs, literals or
earlier equations, and equal bodies compare and hash equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np

_DTYPE_NAMES = frozenset(
    """
    float32 bfloat16 float16 int8 uint8 int16 uint16 int32 uint32 bool
    """.split()
)

InputKind: TypeAlias = Literal["gradient", "params", "slot", "scalar", "array"]


@dataclass(frozen=True)
class Input:
    """A value that comes from outside the body.

    Attributes:
      kind: ``gradient`` and ``params`` (the master) are always float32.
      index: Which slot, scalar or array; 0 otherwise.
      dtype: The dtype the body computes with. Scalars of 16-bit floats are handed
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
        """The literal as a NumPy scalar."""
        return np.frombuffer(self.data, self.dtype)[0]


@dataclass(frozen=True)
class Result:
    """The value of equation `index`."""

    index: int
    dtype: np.dtype


Operand: TypeAlias = Input | Constant | Result


@dataclass(frozen=True)
class Equation:
    """``result = op(*inputs)``, elementwise; `inputs` that are scalars broadcast.

    Attributes:
      inputs: Operands, in the jaxpr's order.
      params: Static parameters, sorted by name (e.g. ``("y", 3)``).
      dtype: Of the result; 16-bit floats are computed in float32 and rounded.
    """

    op: str
    inputs: tuple[Operand, ...]
    params: tuple[tuple[str, Any], ...]
    dtype: np.dtype


def is_supported_dtype(dtype: Any) -> bool:
    """Whether a body may hold values of `dtype` (no 64-bit, no random keys)."""
    return isinstance(dtype, np.dtype) and _is_known(dtype)


@cache  # NumPy makes the name anew each time
def _is_known(dtype: np.dtype) -> bool:
    return dtype.name in _DTYPE_NAMES


def scalar_dtype(dtype: np.dtype) -> np.dtype:
    """The 32-bit (or bool) dtype in which a scalar of `dtype` is handed over.

    Raises:
      TypeError: A 64-bit dtype or one that is not a number.
    """
    kind = np.dtype(dtype).kind if isinstance(dtype, np.dtype) else "?"
    if dtype.itemsize <= 4:
        if dtype == np.bool_:
            return np.dtype(np.bool_)
        if kind in "iu":
            return np.dtype(np.int32 if kind == "i" else np.uint32)
        if dtype in (np.float32, np.float16) or dtype.name == "bfloat16":
            return np.dtype(np.float32)
    raise TypeError(f"no 32-bit form of {dtype}")


def describe_body(
    equations: Sequence[Equation], outputs: Sequence[tuple[str, Operand | None]]
) -> list[str]:
    """Readable lines, the same for bodies that differ in literals only."""
    lines = [
        f"%{index}: {equation.dtype} = {equation.op}{_params(equation)} "
        + ", ".join(map(_operand, equation.inputs))
        for index, equation in enumerate(equations)
    ]
    lines += [
        f"{name} = {'0' if operand is None else _operand(operand)}"
        for name, operand in outputs
    ]
    return lines


def needed_by(
    equations: Sequence[Equation], outputs: Sequence[Operand | None]
) -> set[Operand]:
    """Returns all that outputs depend on, themselves included."""
    needed = {operand for operand in outputs if operand is not None}
    for index, equation in reversed([*enumerate(equations)]):
        if Result(index, equation.dtype) in needed:
            needed |= {*equation.inputs}
    return needed


def inputs_of(
    equations: Sequence[Equation], outputs: Sequence[Operand | None]
) -> set[tuple[str, int]]:
    """Kind and index of every input that outputs depend on."""
    needed = needed_by(equations, outputs)
    return {(o.kind, o.index) for o in needed if isinstance(o, Input)}


def _params(equation: Equation) -> str:
    if not equation.params:
        return ""
    return "[" + " ".join(f"{name}={value}" for name, value in equation.params) + "]"


def _operand(operand: Operand) -> str:
    match operand:
        case Constant():
            return f"#:{operand.dtype}"
        case Result():
            return f"%{operand.index}"
        case Input(kind="gradient" | "params"):
            return operand.kind
    return f"{operand.kind}{operand.index}:{operand.dtype}"
