"""Where a step's params are, and where their gradients go.

    in_store.py    params and state in a store      StoreSink
    in_memory.py   params and state in memory       itself, by plain optax
    function.py    params in a store                Sink, as there are no gradients

Invariant: a home serves batches of all shapes; its sinks those of one.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxinf.engine import Engine, Store
from jaxinf.errors import StreamError
from jaxinf.streaming.move.params import Hold, Params
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.fit import OrderedProgram
from jaxinf.streaming.update.sink import Sink
from jaxinf.typing import PyTree


class StateHome:
    """What homes have in common.

    Each has `avals`, the params' shapes, dtypes and shardings. ``first(init_fn, args,
    shardings)`` and ``given(params, state, shardings)`` return these, and what
    ``start(avals, make, ready, budget, plan)`` makes the first step of, once it is
    known to fit in a budget.

    Attributes:
      what: What runs, for errors.
      has_loss: Whether there are gradients.
      store, engine: None for params in memory.
    """

    what = "a step"
    has_loss = True
    store: Store | None = None
    engine: Engine | None = None
    num_skipped = 0

    avals: Any
    first: Callable[..., tuple[PyTree, Any]]
    given: Callable[..., tuple[PyTree, Any]]
    start: Callable[..., None]

    def params(self, like: PyTree) -> PyTree:
        """See `StreamedStep.params`."""
        raise NotImplementedError

    def state(self) -> PyTree:
        """See `StreamedStep.state`."""
        raise StreamError("step.state: it is in the store; use store.state(like=)")

    def sink(self, ready: OrderedProgram, avals: PyTree = None) -> Sink:
        """Returns what takes the gradients of what was traced; compiles its programs.

        Args:
          avals: Shapes of params that were not made, by default the step's.
        """
        raise NotImplementedError

    def source(self, plan: Plan, sink: Sink, hold: Hold) -> Params:
        """Makes what gives params to programs."""
        raise NotImplementedError

    def check_mesh(self, mesh: Mesh | None) -> None:
        """Refuses devices on which it cannot be streamed."""

    def kept_cuts(self, ready: OrderedProgram) -> Sequence[int] | None:
        """Returns the cuts on which bits depend from before; None if there are none."""
        return None

    def disk_bytes(self, sink: Sink) -> tuple[int, int]:
        """Returns bytes of the store with both slots, and of what is there now."""
        return 0, 0

    def take_turn(self, plan: Plan) -> None:
        """Gets ready for the steps of a plan."""

    def join(self) -> None:
        """Waits for the updates of the step before."""

    def rest(self) -> None:
        """Frees buffers until the next step."""

    def close(self, *error: Any) -> None:
        """Closes the store, if it is the step's own."""


def without(**given: PyTree) -> None:
    """Refuses arguments that would have no effect: ValueError."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}: expected with jaxinf.stream alone; leave it out")
