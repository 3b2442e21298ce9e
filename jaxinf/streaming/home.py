"""A step's home: where its params and state are, and where its gradients go.

    in_store.py    params and state in a store      gradients: `StoreSink`
    in_memory.py   params and state in memory       gradients: plain optax
    function.py    params in a store                no gradients

Invariant: a `Home` serves batches of all shapes; its `Endpoints` those of one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxinf.engine import Engine, Store
from jaxinf.streaming.move.params import Hold, Params
from jaxinf.streaming.move.scratch import Scratch
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.memory import Budget, StepNeeds
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.lifetimes import OrderedProgram
from jaxinf.streaming.update.apply_gradients import Agree
from jaxinf.transfer import ByteCounts
from jaxinf.typing import Array, PyTree


class Sink(Protocol):
    """Takes the gradients of steps.

    Attributes:
      waited_s: Time that gradients of the last step waited for room.
    """

    waited_s: float

    @property
    def spilled_bytes(self) -> tuple[int, int]:
        """Bytes of the last step's gradients that waited in memory and in files."""
        ...

    def begin(self, extra_args: Mapping[str, Any], params: Params) -> None:
        """Gets ready for a step.

        Args:
          extra_args: Further arguments of the optimizer's update.
          params: The source of the step's params, which updates may take.
        """

    def put(self, piece: Piece, gradient: jax.Array | Array) -> None:
        """Takes a complete gradient; blocks while too many wait.

        Raises:
          BaseException: The exception that stopped the updates.
        """

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
          results: Loss and aux.
          check: Called where the step can be given up; raises if it must be.

        Raises:
          NonFiniteGradientError: The step was refused.
          BaseException: The exception that stopped the updates.
        """
        ...

    def abandon(self) -> None:
        """Gives the step up, without a commit."""

    def close(self) -> None:
        """Frees memory and files; idempotent."""


def _of_values(plan: Plan) -> ByteCounts:
    return ByteCounts(plan.away_bytes, plan.away_bytes)


@dataclass(frozen=True)
class Endpoints:
    """Where a traced program's params come from, and where its gradients go.

    Attributes:
      needs: What both take beside the programs.
      source: Makes what gives a plan's programs their params.
      sink: Makes what takes a plan's gradients.
      on_drives: Returns a plan's gradients that wait there for the last one, and their
        bytes; None if none waits, in memory neither.
      traffic: Returns the bytes that a plan's step moves on drives; by default those of
        values.
      disk_bytes: Returns the bytes of the store with both slots.
      scratch: Makes files on drives for values.
      kept_cuts: Returns the cuts on which bits depend from before; None if there are
        none.
    """

    needs: StepNeeds
    source: Callable[[Plan, Hold], Params]
    sink: Callable[[Plan, OrderedProgram], Sink]
    on_drives: Callable[[Plan], Mapping[Piece, int] | None] = lambda plan: None
    traffic: Callable[[Plan], ByteCounts] = _of_values
    disk_bytes: Callable[[], int] = lambda: 0
    scratch: Callable[[], Scratch] = lambda: Scratch(())
    kept_cuts: Callable[[], Sequence[int] | None] = lambda: None


class Home(Protocol):
    """Where params and state are: `InStore`, `InMemory`, or a function's `ReadStore`.

    Attributes:
      what: What runs there, for errors: a step or a function.
      has_loss: Whether it is a loss function that runs.
      num_skipped: Number of steps skipped for a non-finite gradient.
    """

    what: str
    has_loss: bool
    num_skipped: int

    @property
    def store(self) -> Store | None:
        """The store of the params; None in memory."""
        ...

    @property
    def engine(self) -> Engine | None:
        """That of the store."""
        ...

    @property
    def avals(self) -> PyTree:
        """Shapes, dtypes and shardings of the params; raises StreamError before any."""
        ...

    def first(
        self, init_fn: Callable[..., PyTree], args: Sequence[Any], shardings: PyTree
    ) -> tuple[PyTree, Any]:
        """Returns the avals of the first params, and what makes them: for `start`."""
        ...

    def given(
        self, params: PyTree, state: PyTree, shardings: PyTree
    ) -> tuple[PyTree, Any]:
        """As `first`, of params that are there."""
        ...

    def start(
        self,
        avals: PyTree,
        make: Any,
        ready: OrderedProgram | None,
        budget: Budget,
        plan: Callable[[OrderedProgram, Endpoints, Budget], Plan],
        /,
    ) -> None:
        """Makes the first step, once that is known to fit in a budget, or resumes.

        Args:
          avals, make: Of `first` or `given`.
          ready: The function, if a batch was given.
          plan: Plans a step; raises BudgetError.
        """

    def endpoints(self, ready: OrderedProgram, avals: PyTree = None) -> Endpoints:
        """Returns those of a traced program.

        Args:
          avals: The params of a home that has none yet.
        """
        ...

    def take_turn(self, plan: Plan) -> None:
        """Gets ready for the steps of a plan."""

    def join(self) -> None:
        """Waits for the updates of the step before."""

    def params(self, like: PyTree) -> PyTree:
        """Returns the current params, in the form of `like` unless that is None."""
        ...

    def rest(self) -> None:
        """Frees buffers until the next step."""

    def close(self, *error: Any) -> None:
        """Ends the home, with the error, if any, of the context that it ends."""


def without(**given: PyTree) -> None:
    """Refuses arguments that would have no effect: ValueError."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}: expected with jaxinf.stream alone; leave it out")
