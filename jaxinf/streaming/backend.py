"""What a step's programs work on: its params, its gradients' sink, and its memory.

    in_store.py    params and state in a store      gradients: `StoreSink`
    in_memory.py   params and state in memory       gradients: plain optax
    function.py    params in a store                no gradients

Invariant: one of these, a step's home, serves batches of all shapes; its `StepBackend`
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

if TYPE_CHECKING:  # which have the backends
    from jaxinf.streaming.function import NoGradients
    from jaxinf.streaming.in_memory import MemoryHome

Sink: TypeAlias = "StoreSink | MemoryHome | NoGradients"
"""Takes the gradients of steps."""


@dataclass(frozen=True, kw_only=True)
class StepBackend:
    """Where a traced program's params come from, and where its gradients go.

    Attributes:
      needs: What both take beside its segments.
      make_sink: Makes what takes a plan's gradients.
      kind: What runs, for errors.
      engine: Engine of the store; None in memory.
      begin_reads, version: As of `ParamReader`; params in memory are not read.
      params_in_memory: Returns what gives a run its params; None if a store has them.
      updates: The updates near storage; None if there are none.
      reads_commit: Whether params are of the last commit, not of the last step.
      make_scratch: Makes files on drives for values.
      kept_cuts: The cuts that the store keeps, since bits depend on them, or None.
    """

    ordered: OrderedProgram
    needs: StepNeeds
    make_sink: Callable[[Plan, OrderedProgram, Any, WorkQueues], Sink]
    kind: str = "a step"
    engine: Engine | None = None
    begin_reads: Callable[[int], AbstractContextManager[Any]] = nullcontext
    version: Callable[[], Any] = lambda: 0
    params_in_memory: Callable[[], GetParams] | None = None
    updates: UpdatePlan | None = None
    reads_commit: bool = False
    make_scratch: Callable[[], ScratchFiles] = lambda: ScratchFiles(())
    kept_cuts: Sequence[int] | None = None


def without(**arguments: PyTree) -> None:
    """Refuses arguments that would have no effect: ValueError."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name}: expected with jaxinf.stream alone; leave it out")
