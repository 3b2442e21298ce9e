"""Gradients that wait for the last one, because no update may start before it.

Invariant: nothing of the store is written while gradients arrive here.
"""

from collections.abc import Iterator

import jax
import numpy as np

from jaxinf.program import UpdateProgram
from jaxinf.streaming.move.spill import Spill
from jaxinf.streaming.program.graph import Piece
from jaxinf.typing import Array

__all__ = ["Deferred", "is_finite"]

_PIECE_ELEMENTS = 1 << 18


class Deferred:
    """Spills a step's gradients.

    Args:
      program: The optimizer.
      spill: Storage for gradients.
      is_checked: Whether gradients must be known to be finite before the first update.

    Attributes:
      bad: Names of leaves whose gradient has NaN or Inf, if checked.
    """

    def __init__(
        self, program: UpdateProgram, spill: Spill, *, is_checked: bool
    ) -> None:
        self._program = program
        self._is_checked = is_checked
        self.spill = spill
        self.bad: list[str] = []

    def begin(self) -> None:
        """Prepares for the gradients of a step."""
        self.bad = []
        self.spill.reset()

    def add(self, piece: Piece, gradient: jax.Array | Array) -> None:
        """Takes a gradient; blocks while it is written."""
        if self._is_checked and not is_finite(np.asarray(gradient)):
            self.bad.append(self._program.leaves[piece.leaf].info.name)
        self.spill.put(piece, np.asarray(gradient))  # it need not stay on the device

    def each(self) -> Iterator[tuple[Piece, Array]]:
        """Yields the gradients, in the order in which they came; they stay."""
        for piece in self.spill.pieces():
            yield piece, self.spill.look(piece)

    def take_all(self) -> Iterator[tuple[Piece, Array]]:
        """Yields the gradients, in the order in which they came."""
        for piece in self.spill.pieces():
            yield piece, self.spill.take(piece)


def is_finite(array: Array) -> bool:
    """Whether an array has neither NaN nor Inf; takes little memory."""
    flat = array.reshape(-1)
    return all(
        np.isfinite(flat[start : start + _PIECE_ELEMENTS]).all()
        for start in range(0, flat.size, _PIECE_ELEMENTS)
    )
