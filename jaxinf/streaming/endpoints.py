"""The ends of a step: where a traced program's params come from, and gradients go.

    in_store.py    params and state in a store      gradients: `StoreSink`
    in_memory.py   params and state in memory       gradients: plain optax
    function.py    params in a store                no gradients

Invariant: one of these, a step's home, serves batches of all shapes; its `Endpoints`
those of one.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxinf.engine import Engine
from jaxinf.streaming.move.scratch import ScratchFiles
from jaxinf.streaming.move.work_queues import WorkQueues
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.memory import StepNeeds
from jaxinf.streaming.program.lifetimes import OrderedProgram
from jaxinf.streaming.run import GetParams
from jaxinf.streaming.update.apply_gradients import StoreSink
from jaxinf.streaming.update.update_plan import UpdatePlan
from jaxinf.typing import PyTree

if TYPE_CHECKING:  # which has the endpoints
    from jaxinf.streaming.in_memory import InMemory

Sink: TypeAlias = "StoreSink | InMemory"
"""Takes the gradients of steps; a function has none."""


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """Where a traced program's params come from, and where its gradients go.

    Attributes:
      needs: What both take beside the programs.
      engine: Engine of the store; None in memory.
      reads, version: As of `ParamReader`; params in memory are not read.
      in_memory: Returns what gives a run those in memory; None if a store has them.
      sink: Makes what takes a plan's gradients; None for a function.
      updates: The updates near storage; None if there are none.
      reads_commit: Whether params are of the last commit, not of the last step.
      scratch: Makes files on drives for values.
      kept_cuts: The cuts on which bits depend from before; None if there are none.
    """

    needs: StepNeeds
    engine: Engine | None = None
    reads: Callable[[int], AbstractContextManager[Any]] = nullcontext
    version: Callable[[], Any] = lambda: 0
    in_memory: Callable[[], GetParams] | None = None
    sink: Callable[[Plan, OrderedProgram, Any, WorkQueues], Sink] | None = None
    updates: UpdatePlan | None = None
    reads_commit: bool = False
    scratch: Callable[[], ScratchFiles] = lambda: ScratchFiles(())
    kept_cuts: Sequence[int] | None = None


def without(**given: PyTree) -> None:
    """Refuses arguments that would have no effect: ValueError."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}: expected with jaxinf.stream alone; leave it out")
