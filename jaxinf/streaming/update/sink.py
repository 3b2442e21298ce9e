"""Where the gradients of a step go, and what they take beside its programs.

Invariant: a step that is abandoned, or refused, leaves params as they were.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxinf.engine import Store, engine_of
from jaxinf.errors import StreamError
from jaxinf.streaming.move.params import Params, StoreParams, StoreReader
from jaxinf.streaming.move.scratch import Scratch, Waiting, file_bytes
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.fit import Prepared
from jaxinf.streaming.plan.memory import (
    READER_BYTES,
    Division,
    divide_rest,
    reader_bytes,
)
from jaxinf.streaming.plan.options import StepOptions
from jaxinf.streaming.plan.reads import Reading, plan_reads, staged_bytes
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.meshes import on_this_process
from jaxinf.streaming.program.trace import Traced
from jaxinf.streaming.program.units import SHARED, StoreUnits, Unit, shared_bytes
from jaxinf.transfer import ByteCounts
from jaxinf.typing import Array, PyTree

# Elements whose finiteness is looked at together: it takes memory.
_RUN_ELEMENTS = 1 << 18


class Sink(ABC):
    """Takes the gradients of steps, for batches of one shape.

    Args:
      store: The store that params are read from; None if they are in memory.
      units: How they are read.

    Attributes:
      num_drives: Number of drives that values may wait on.
      average: Whether the store's average is read.
      are_frozen: Whether params that stay are the same after a step of the store.
      waited_s: Time that gradients of the last step waited for room.
    """

    waited_s = 0.0
    num_drives = 1
    average = False
    are_frozen = True

    def __init__(
        self,
        options: StepOptions,
        store: Store | None = None,
        units: StoreUnits | None = None,
    ) -> None:
        self.options, self.store, self.units = options, store, units
        self._together = options.together

    # --- what it takes -------------------------------------------------------------

    @abstractmethod
    def divided(self, ready: Prepared, budgets: Mapping[str, int]) -> Division:
        """Divides the memory of budgets, without that of values on their way.

        Raises:
          BudgetError: A budget does not suffice.
        """

    def held_bytes(self, traced: Traced) -> int:
        """Memory for what stays beside the programs from step to step."""
        return 0

    def kept_cuts(self, ready: Prepared) -> Sequence[int] | None:
        """Returns the cuts on which bits depend from before; None if there are none."""
        return None

    def staying(self, plan: Plan) -> Plan:
        """Returns the plan with the params that stay in memory."""
        return plan

    def is_frozen(self, unit: Unit) -> bool:
        """Whether no update changes a unit, so that it may stay from step to step."""
        return False

    def takes_read(self, unit: Unit) -> bool:
        """Whether a unit's update can take what was read for a program."""
        return False

    def waiting(self, plan: Plan) -> Waiting | None:
        """Returns the gradients that wait for the last one; None if none does."""
        return None

    def traffic(self, plan: Plan) -> ByteCounts:
        """Returns the bytes that a step moves on drives."""
        waits = plan.away_bytes
        return ByteCounts(drive_read_bytes=waits, drive_write_bytes=waits)

    # --- the source of params ------------------------------------------------------

    def passing_bytes(self, plan: Plan) -> int:
        """Memory of the host that params take on their way to a device with its own."""
        return 0 if self.units is None else staged_bytes(self.units, plan)

    def reading(self, plan: Plan, division: Division) -> Reading:
        """Plans the reads of params; raises BudgetError."""
        if self.units is None:
            return Reading()
        how = self.takes_read, self.is_frozen
        return plan_reads(plan, self.units, division, *how)

    def source(self, plan: Plan) -> Params:
        """Makes what gives params to programs."""
        assert self.store is not None, "params are read from a store"
        assert self.units is not None, "which has units"
        engine, where = engine_of(self.store), (self.options.device, self._together)
        reader = StoreReader(engine, READER_BYTES, average=self.average)
        how = {"are_frozen": self.are_frozen}
        return StoreParams(self.units, reader, plan.reading, *where, **how)

    def scratch(self, content: str) -> Scratch:
        """Returns files on drives for what waits there; none by default."""
        return Scratch(())

    # --- a step --------------------------------------------------------------------

    def open(self, plan: Plan, ready: Prepared) -> None:
        """Takes the room of a step, before the first; `ready` is what was cut."""

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
    def spilled_bytes(self) -> tuple[int, int]:
        """Bytes of the last step's gradients that waited in memory and in files."""
        return 0, 0


class NoGradients(Sink):
    """The sink of a function without a gradient. Until a step, all params may stay."""

    def __init__(
        self,
        store: Store,
        ready: Prepared,
        options: StepOptions,
        *,
        average: bool,
    ) -> None:
        self.are_frozen = False
        opened = engine_of(store).opened
        if average:
            opened.averaged(0)  # or refuses
        units = StoreUnits(ready.traced.params, opened.divides)
        super().__init__(options, store, units)
        self.average = average
        self._export_bytes = opened.export_bytes

    def divided(self, ready: Prepared, budgets: Mapping[str, int]) -> Division:
        assert self.units is not None
        limit = self.options.limit_within(budgets, ready.traced.mesh)
        own_bytes = budgets["memory_bytes"] - self._export_bytes
        division = divide_rest(own_bytes - reader_bytes(own_bytes), limit)
        units = {self.units.unit(piece) for piece in ready.lifetimes.sizes}
        return division.without(
            max((u.whole_bytes for u in units if not u.is_divided), default=0),
            "reading shards of params that are not stored alone",
        ).without(shared_bytes(units), SHARED)

    def is_frozen(self, unit: Unit) -> bool:
        return True

    def put(self, piece: Piece, gradient: jax.Array | Array) -> None:
        raise AssertionError("a function without a gradient")

    def finish(
        self, extra_args: Mapping[str, Any], results: PyTree, check: Callable[[], None]
    ) -> bool:
        self._together.agree(lambda: ())
        return False


def drive_bytes(sink: Sink, plan: Plan) -> int:
    """Returns the bytes of values and gradients that wait on drives, at most."""
    last = sink.waiting(plan)
    return plan.away_bytes + (0 if last is None else file_bytes(last))


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
