"""Where the gradients of a step go.

Invariant: a step that is abandoned, or refused, leaves params as they were.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxinf.errors import StreamError
from jaxinf.streaming.move.params import Params
from jaxinf.streaming.plan.group_step import GroupStep
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.meshes import on_this_process
from jaxinf.typing import Array, PyTree

# Elements whose finiteness is looked at together: it takes memory.
_RUN_ELEMENTS = 1 << 18


class Sink(ABC):
    """Takes the gradients of steps."""

    def begin(self, extra_args: Mapping[str, Any], params: Params) -> None:
        """Gets ready for a step.

        Args:
          params: The source of the step's params, which updates may take.
        """

    @abstractmethod
    def put(self, piece: Piece, gradient: jax.Array | Array) -> None:
        """Takes a complete gradient; blocks while too many wait.

        Raises:
          BaseException: The exception that stopped the updates.
        """

    @abstractmethod
    def finish(
        self, extra_args: Mapping[str, Any], results: PyTree, check: Callable[[], None]
    ) -> bool:
        """Waits for all updates and ends the step; returns whether params changed.

        Args:
          extra_args: As for `begin`, now with those that are known late.
          results: What the caller is given, whose memory is not reused.
          check: Called where the step can be given up; raises if it must be.

        Raises:
          NonFiniteGradientError: The step was refused.
          BaseException: The exception that stopped the updates.
        """

    def abandon(self) -> None:
        """Gives the step up."""

    def close(self) -> None:
        """Frees memory and files; idempotent."""

    @property
    def waited_s(self) -> float:
        """Time that gradients of the last step waited for room."""
        return 0.0

    @property
    def spilled_bytes(self) -> tuple[int, int]:
        """Bytes of the last step's gradients that waited in memory and in files."""
        return 0, 0


class NoGradients(Sink):
    """The sink of a function without a gradient."""

    def __init__(self, together: GroupStep) -> None:
        self._together = together

    def put(self, piece: Piece, gradient: jax.Array | Array) -> None:
        raise AssertionError("a function without a gradient")

    def finish(
        self, extra_args: Mapping[str, Any], results: PyTree, check: Callable[[], None]
    ) -> bool:
        self._together.agree(lambda: ())
        return False


def is_finite(array: Array) -> bool:
    """Whether an array has neither NaN nor Inf; takes little memory."""
    flat = array.reshape(-1)
    return all(
        np.isfinite(flat[start : start + _RUN_ELEMENTS]).all()
        for start in range(0, flat.size, _RUN_ELEMENTS)
    )


def on_host(array: jax.Array | Array) -> Array:
    """Returns an array of which this process has the whole; raises StreamError."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        if not array.is_fully_replicated:
            raise StreamError(
                "carry: expected arrays that every process has whole, found one that "
                "is sharded over them; replicate it"
            )
        array = on_this_process(array)
    return np.asarray(array)
