"""Gathers the scalars that an optimizer computes of all gradients, as these arrive.

Invariant: each gradient is read once. The scalars of a leaf that arrives whole have the
bits of jitted optax; for a leaf that arrives in slices, the slices' scalars are
combined.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxinf.csd import ScalarInputs
from jaxinf.errors import UnsupportedTransformError
from jaxinf.program import UpdateProgram
from jaxinf.stream.graph import Piece
from jaxinf.stream.keys import Keys
from jaxinf.stream.scalars import KernelScalars

__all__ = ["GradientScalars"]


class GradientScalars:
    """Collects the scalars of one step's gradients.

    Args:
      program: An optimizer that reads gradients.
    """

    def __init__(self, program: UpdateProgram) -> None:
        self._program = program
        self._divided = program.divided()
        self._functions: dict[str, Callable[..., Any]] = {}
        self._keys = Keys()
        self._parts: dict[int, list[jax.Array]] = {}
        self._combine = KernelScalars(self._divided.combine)

    def check(self, pieces: Sequence[Piece]) -> None:
        """Refuses gradients that arrive in parts if they are needed whole."""
        for piece in pieces:
            leaf = piece.leaf
            if not piece.index or not self._divided.reads(leaf):
                continue
            if not self._divided.can_gather(leaf):
                raise UnsupportedTransformError(
                    "jaxinf.stream: expected an optimizer that takes sums, largest or "
                    "smallest values of all gradients, found one that needs "
                    f"{self._program.leaves[leaf].info.name} whole, which comes in "
                    "slices; use an optimizer without that, or jaxinf.smart_update"
                )

    def begin(self) -> None:
        """Prepares for the gradients of a step."""
        self._parts.clear()

    def add(self, piece: Piece, gradient: jax.Array) -> None:
        """Computes a gradient's scalars; blocks until they are there."""
        leaf = piece.leaf
        if not self._divided.reads(leaf):
            return
        if piece.index:
            gradient = gradient.reshape((1,) * len(piece.index) + gradient.shape)
        scalars = jax.block_until_ready(self._function(leaf)(gradient))
        if leaf in self._parts:
            scalars = self._divided.gather(leaf, self._parts[leaf], scalars)
        self._parts[leaf] = scalars

    def combine(
        self, scalar_state: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], Sequence[ScalarInputs]]:
        """Returns the new scalar state, and the scalars of each leaf's kernel."""
        return self._combine(self._parts, scalar_state)

    def _function(self, leaf: int) -> Callable[..., Any]:
        """Compiles a leaf's function, once for all leaves with the same computation."""
        gradient, nodes, scalars = self._divided.program(leaf)
        key = self._keys.program([gradient], nodes, scalars)
        if key not in self._functions:
            self._functions[key] = jax.jit(lambda g: self._divided.part(leaf, g))
        return self._functions[key]
