"""The scalars of all kernels of a step, computed by one program.

Invariant: a scalar that many kernels share is one result of the program, so its size
does not grow with the number of leaves that need the same scalars.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxinf.csd import ScalarInputs
from jaxinf.program import LeafInputs

__all__ = ["KernelScalars"]


class KernelScalars:
    """A compiled prologue.

    Args:
      prologue: Returns the new scalar state and the inputs of each leaf's kernel;
        traceable.
    """

    def __init__(
        self, prologue: Callable[..., tuple[list[jax.Array], list[LeafInputs]]]
    ) -> None:
        self._prologue = prologue
        self._places: list[list[int]] = []
        self._compiled = jax.jit(self._distinct)

    def __call__(self, *args: Any) -> tuple[list[jax.Array], Sequence[ScalarInputs]]:
        """Computes the new scalar state and each kernel's scalars; blocks."""
        new, distinct = self._compiled(*args)
        known = [np.asarray(scalar) for scalar in distinct]
        rows: dict[tuple[int, ...], ScalarInputs] = {}
        return new, [
            rows.setdefault(tuple(row), ScalarInputs(tuple(known[n] for n in row)))
            for row in self._places
        ]

    def _distinct(self, *args: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        new, leaves = self._prologue(*args)
        numbers: dict[int, int] = {}
        distinct: list[jax.Array] = []
        for scalar in (scalar for leaf in leaves for scalar in leaf.scalars):
            if id(scalar) not in numbers:
                numbers[id(scalar)] = len(distinct)
                distinct.append(scalar)
        self._places = [[numbers[id(s)] for s in leaf.scalars] for leaf in leaves]
        return new, distinct
