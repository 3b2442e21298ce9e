"""A traced loss and gradient as one graph, and its inputs.

Invariant: a value with an `origin` is that input; one with a `constant` is a literal,
part of the program's text.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxinf.program.graph import Node, Value

__all__ = [
    "Batch",
    "Const",
    "Graph",
    "Number",
    "Origin",
    "Piece",
    "Seed",
    "aval_bytes",
    "literal",
    "num_bytes",
]


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


@dataclass(frozen=True)
class Graph:
    """One traced program.

    Attributes:
      nodes: The needed nodes, in an order in which they can be computed.
      results: The loss and the leaves of aux.
      gradients: Complete gradients, by their piece of a leaf.
    """

    nodes: tuple[Node, ...]
    results: tuple[Value, ...]
    gradients: Mapping[Piece, Value]

    @property
    def outputs(self) -> tuple[Value, ...]:
        """Results and gradients."""
        return (*self.results, *self.gradients.values())


def aval_bytes(aval: Any) -> int:
    """Returns the bytes of an array; random keys count as 16 bytes an element."""
    shape = getattr(aval, "shape", None)
    if shape is None:
        return 0
    itemsize = getattr(aval.dtype, "itemsize", 16)
    return math.prod(shape) * itemsize


def num_bytes(values: Iterable[Value]) -> int:
    """Returns the bytes of all `values` together."""
    return sum(aval_bytes(value.aval) for value in values)


def literal(atom: Any) -> Value:
    """Returns the value of a jaxpr's literal."""
    return Value(atom.aval, constant=atom.val)
