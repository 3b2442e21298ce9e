"""Where the gradients of a step go: to a store, to optax in memory, or nowhere.

Invariant: a step that is abandoned, or refused, leaves params as they were.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxinf.errors import StreamError
from jaxinf.streaming.move.params import Params
from jaxinf.streaming.move.scratch import Scratch, Waiting
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.fit import OrderedProgram
from jaxinf.streaming.plan.memory import Claims
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.meshes import on_this_process
from jaxinf.transfer import ByteCounts
from jaxinf.typing import Array, PyTree

# Elements whose finiteness is looked at together: it takes memory.
_RUN_ELEMENTS = 1 << 18

Agree: TypeAlias = Callable[[Callable[[], Sequence[str]]], list[str]]
"""Runs an action in all processes; returns the leaves that refuse the step in any."""


class Sink:
    """Takes the gradients of steps, for batches of one shape; this one of a function.

    Args:
      claims: What it takes beside a step's programs.

    Attributes:
      waited_s: Time that gradients of the last step waited for room.
    """

    waited_s = 0.0

    def __init__(self, claims: Claims) -> None:
        self.claims = claims

    def open(self, plan: Plan, ready: OrderedProgram) -> None:
        """Takes the room of a step, before the first; `ready` is what was cut."""

    def scratch(self) -> Scratch:
        """Returns files on drives for values; none by default."""
        return Scratch(())

    def begin(self, extra_args: Mapping[str, Any], params: Params) -> None:
        """Gets ready for a step.

        Args:
          params: The source of the step's params, which updates may take.
        """
        if extra_args:
            raise ValueError("extra_args: only steps with a store have some")

    def put(self, piece: Piece, gradient: jax.Array | Array) -> None:
        """Takes a complete gradient; blocks while too many wait.

        Raises:
          BaseException: The exception that stopped the updates.
        """
        raise AssertionError("a function has no gradients")

    def finish(
        self,
        extra_args: Mapping[str, Any],
        results: PyTree,
        check: Callable[[], None],
        agree: Agree,
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
        agree(lambda: ())
        return False

    def abandon(self) -> None:
        """Gives the step up."""

    def close(self) -> None:
        """Frees memory and files; idempotent."""

    # --- what it moves -------------------------------------------------------------

    def waiting(self, plan: Plan) -> Waiting | None:
        """Returns the gradients that wait for the last one; None if none does."""
        return None

    def traffic(self, plan: Plan) -> ByteCounts:
        """Returns the bytes that a step moves on drives."""
        waits = plan.away_bytes
        return ByteCounts(drive_read_bytes=waits, drive_write_bytes=waits)

    @property
    def spilled_bytes(self) -> tuple[int, int]:
        """Bytes of the last step's gradients that waited in memory and in files."""
        return 0, 0


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
