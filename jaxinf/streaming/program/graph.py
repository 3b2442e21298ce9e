"""The inputs of a traced loss function, and the bytes of its values.

Invariant: a value with an `origin` is that input; one with a `constant` is a literal,
part of the program's text.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from jaxinf.program import Value


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a param leaf that is fetched alone, or whose gradient is complete.

    Attributes:
      leaf: The leaf's number.
      index: Position on its leading axes; empty for the whole.
      rows: First and last (exclusive) position on the next axis; None for all.
    """

    leaf: int
    index: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None

    def of(self, array: Any) -> Any:
        """Returns the piece of a whole leaf's array."""
        part = array[self.index] if self.index else array
        return part if self.rows is None else part[slice(*self.rows)]


@dataclass(frozen=True, slots=True)
class Batch:
    """A leaf of the batch."""

    leaf: int


@dataclass(frozen=True, slots=True)
class Const:
    """An array that the loss function closed over."""

    number: int


@dataclass(frozen=True, slots=True)
class Seed:
    """The cotangent of the loss; nodes that depend on it are backward."""


@dataclass(frozen=True, slots=True)
class Number:
    """An index that is passed as an argument, so programs do not depend on it."""

    number: int


Origin: TypeAlias = Piece | Batch | Const | Seed | Number


class Inputs:
    """The inputs of a traced function, each with one value.

    Attributes:
      consts: The arrays that it, and the functions that it calls, closed over.
    """

    def __init__(self, consts: Iterable[Any]) -> None:
        self.consts = list(consts)
        self._numbers = {id(const): i for i, const in enumerate(self.consts)}
        self._values: dict[tuple[Origin, Any], Value] = {}

    def value(self, origin: Origin, aval: Any) -> Value:
        key = origin, aval.dtype
        return self._values.setdefault(key, Value(aval, origin=origin))

    def const(self, array: Any) -> Value:
        number = self._numbers.setdefault(id(array), len(self.consts))
        if number == len(self.consts):
            self.consts.append(array)
        return self.value(Const(number), jax.typeof(array))


def aval_bytes(aval: Any) -> int:
    """Returns the bytes of an array; random keys count as 16 bytes an element."""
    shape = getattr(aval, "shape", None)
    if shape is None:
        return 0
    itemsize = getattr(aval.dtype, "itemsize", 16)
    return math.prod(shape) * itemsize


def num_bytes(values: Iterable[Value]) -> int:
    return sum(aval_bytes(value.aval) for value in values)


def struct(aval: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """Returns a value's type with a sharding, as an argument of a trace."""
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding
    )
