"""Where a step's params are, and where their gradients go.

    in_store.py    params and state in a store      to a `StoreSink`
    in_memory.py   params and state in memory       to plain optax
    function.py    params in a store                there are none

Invariant: a home serves batches of all shapes; a `StoreSink` those of one.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from jaxinf.errors import StreamError
from jaxinf.streaming.move.params import Params
from jaxinf.streaming.move.scratch import Scratch, Waiting
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.memory import StepNeeds
from jaxinf.streaming.program.lifetimes import OrderedProgram
from jaxinf.streaming.update.apply_gradients import Agree
from jaxinf.transfer import ByteCounts
from jaxinf.typing import PyTree


@dataclass(frozen=True)
class NoUpdates:
    """What takes the place of `NearStorageUpdates` where the store gets none."""

    needs: StepNeeds
    disk_bytes = 0

    def waiting(self, plan: Plan) -> Waiting | None:
        return None

    def traffic(self, plan: Plan) -> ByteCounts:
        return ByteCounts(plan.away_bytes, plan.away_bytes)


class StateHome:
    """What homes have in common.

    Each has `avals`, the params' shapes, dtypes and shardings. ``first(init_fn, args,
    shardings)`` and ``given(params, state, shardings)`` return these, and what
    ``start(avals, make, ready, budget, plan)`` makes the first step of, once it is
    known to fit in a budget. ``params(like)`` is that of `StreamedStep`.
    ``updates(ready, avals)`` returns what the updates of a traced function take, for
    the step's avals by default. ``source(updates, plan, hold)`` makes what gives params
    to programs.

    Attributes:
      what: What runs, for errors.
      has_loss: Whether there are gradients.
      store, engine: None for params in memory.
    """

    what = "a step"
    has_loss = True
    store: Any = None
    engine: Any = None
    num_skipped = 0

    avals: Any
    first: Callable[..., tuple[PyTree, Any]]
    given: Callable[..., tuple[PyTree, Any]]
    start: Callable[..., None]
    params: Callable[..., PyTree]
    updates: Callable[..., Any]
    source: Callable[..., Params]

    def state(self) -> PyTree:
        """See `StreamedStep.state`."""
        raise StreamError("step.state: it is in the store; use store.state(like=)")

    def kept_cuts(self, ready: OrderedProgram) -> Sequence[int] | None:
        """Returns the cuts on which bits depend from before; None if there are none."""

    def scratch(self) -> Scratch:
        """Returns files on drives for values."""
        return Scratch(())

    def take_turn(self, plan: Plan) -> None:
        """Gets ready for the steps of a plan."""

    def join(self) -> None:
        """Waits for the updates of the step before."""

    def rest(self) -> None:
        """Frees buffers until the next step."""

    def close(self, *error: Any) -> None:
        """Closes the store, if it is the step's own."""

    # --- as a sink: see `StoreSink` --------------------------------------------------

    waited_s, spilled_bytes = 0.0, (0, 0)

    def sink(
        self, updates: Any, plan: Plan, ready: OrderedProgram, closing: ExitStack
    ) -> Any:
        """Returns what takes a plan's gradients; `closing` frees its memory."""
        return self

    def begin(self, extra_args: Mapping[str, Any], params: Params) -> None:
        if extra_args:
            raise ValueError("extra_args: only steps with a store have some")

    def put(self, piece: Any, gradient: Any) -> None:
        raise AssertionError("a function has no gradients")

    def finish(self, extra_args: Any, results: Any, check: Any, agree: Agree) -> bool:
        agree(lambda: ())
        return False

    def abandon(self) -> None: ...


def without(**given: PyTree) -> None:
    """Refuses arguments that would have no effect: ValueError."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}: expected with jaxinf.stream alone; leave it out")
