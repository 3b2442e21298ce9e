"""Gradients that are zero whatever the batch: of leaves that a loss does not train.

Invariant: none of them leaves the device, waits, or takes memory of the host.
"""

from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import numpy as np

from jaxinf.program.graph import Node
from jaxinf.streaming.program.graph import Graph, Piece, aval_bytes
from jaxinf.typing import Array

Put = Callable[[Piece, Any], None]


def zeros_of(graph: Graph) -> frozenset[Piece]:
    """Returns the gradients of a program that are zero by its text."""
    return frozenset(p for p, value in graph.gradients.items() if _is_zero(value.node))


def _is_zero(node: Node | None) -> bool:
    constant = None if node is None or not node.is_spread else node.inputs[0].constant
    return constant is not None and bool(constant == 0)


def sizes_but_zeros(
    graph: Graph, zeros: Set[Piece], size_of: Callable[[Any], int] = aval_bytes
) -> Mapping[Piece, int]:
    """Returns the bytes of gradients that wait on the host; 0 for zeros.

    Args:
      size_of: The bytes of one, by its abstract value.
    """
    return {
        piece: 0 if piece in zeros else size_of(value.aval)
        for piece, value in graph.gradients.items()
    }


def zeros_apart(zeros: Set[Piece], put: Put) -> Put:
    """Returns what takes gradients, and gives zeros on as views of one element."""

    def take(piece: Piece, gradient: jax.Array | Array) -> None:
        if piece in zeros:
            one = np.zeros((), gradient.dtype)
            gradient = np.broadcast_to(one, gradient.shape)
        put(piece, gradient)

    return take if zeros else put


def is_zeros(gradient: Any) -> bool:
    """Whether a gradient of several elements is one that `zeros_apart` has made."""
    is_array = isinstance(gradient, np.ndarray) and gradient.size > 1
    return is_array and not any(gradient.strides)


def held_bytes(gradient: Any) -> int:
    """Returns the memory that a gradient takes; 0 for one of `zeros_apart`."""
    return 0 if is_zeros(gradient) else gradient.nbytes
