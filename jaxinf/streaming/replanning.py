"""Plans values that leave: once, or by what steps measure.

Invariant: nothing is measured for a step that ended early.
"""

from dataclasses import replace

from jaxinf.io import ByteMeters
from jaxinf.schedule.placement import Waiting
from jaxinf.streaming.call_timer import Watch
from jaxinf.streaming.fit import Fitted
from jaxinf.streaming.move.mover import MoverCounts
from jaxinf.streaming.move.probe import probe
from jaxinf.streaming.move.scratch import Folders
from jaxinf.streaming.move.values import make_values
from jaxinf.streaming.options import Options
from jaxinf.streaming.plan.offload import check_tiers
from jaxinf.streaming.plan.plan import Plan
from jaxinf.streaming.plan.planner import Planner
from jaxinf.streaming.plan.retrying import Moved
from jaxinf.streaming.plan.search import Problem
from jaxinf.streaming.plan.wear import Wear
from jaxinf.streaming.program.graph import Graph
from jaxinf.streaming.run import CompiledMemory, Executables, Runner


def offload_planned(
    fitted: Fitted,
    graph: Graph,
    executables: Executables,
    options: Options,
    folders: Folders,
    waiting: Waiting | None = None,
) -> tuple[Plan, "Replanner | None"]:
    """Plans which values leave, if any may; with ``"plan"`` by measures. Blocks.

    Args:
      waiting: Gradients that wait for the last one; None if none does.
    """
    plan, budget_bytes = fitted.plan, fitted.division.programs
    if not plan.is_offloaded:
        return plan, None
    form = options.activations
    memory = CompiledMemory(plan, executables, budget_bytes, form)
    if options.policy != "plan":
        return memory.fitted(), None
    problem = Problem(
        graph,
        plan.programs,
        budget_bytes,
        memory.call_bytes,
        plan.calls.resident,
        memory.admits,
        fitted.loads,
        form,
        fitted.tiers,
        waiting,
    )
    replanner = Replanner(plan, problem, options.num_runs, folders)
    return replanner.plan, replanner


def make_runner(
    fitted: Fitted,
    plan: Plan,
    executables: Executables,
    folders: Folders,
    replanner: "Replanner | None",
    meters: ByteMeters | None = None,
) -> Runner:
    """Returns what runs a plan that was fitted; takes room on drives, blocks.

    Args:
      replanner: What measures the calls; None if no one asks.

    Raises:
      BudgetError: The host has no room for values on their way.
      StoreSpaceError, StoreIOError: A drive is full, or failed.
    """
    tiers = fitted.tiers(plan.calls)
    if tiers is not None:
        check_tiers(tiers, fitted.host_bytes)
    values = make_values(plan, tiers, folders, meters)
    watch = None if replanner is None else replanner.watch
    return Runner(plan, executables, values, watch)


class Replanner(Planner):
    """The planner of a step, and what it measures. Used from one thread.

    Args:
      plan: The step's programs; their graph stays in memory.
      num_parts: Number of times that the calls run in a step.
      folders: A folder on each drive that values may leave for.

    Attributes:
      is_changed: Whether the next step has to be bound to another choice.
    """

    def __init__(
        self,
        plan: Plan,
        problem: Problem,
        num_parts: int,
        folders: Folders,
    ) -> None:
        super().__init__(problem, num_parts)
        self._plan, self._folders = plan, folders
        self.watch = Watch()
        self.is_changed = False

    @property
    def plan(self) -> Plan:
        """The plan that the next step has to run."""
        return self._plan.chosen(self.choice)

    def shown(self, plan: Plan, wear: Wear | None) -> Plan:
        """Returns a plan with its choice and the wear, if measures made it."""
        if self.forecast is None or self.is_changed:
            return replace(plan, choice=None)
        return replace(plan, choice=self.choice, wear=wear)

    def begin(self) -> None:
        """Begins a step; drops what one that ended early has measured."""
        self.watch.take()

    def ended(
        self, step_s: float, values: MoverCounts, peak_bytes: int, params: MoverCounts
    ) -> None:
        """Takes the measures of a step, and plans again if that is due."""
        moved = {
            "written": Moved(values.num_written_bytes, values.write_s),
            "read": Moved(values.num_read_bytes, values.read_s),
            "out": Moved(values.num_out_bytes, values.out_s),
            "back": Moved(values.num_back_bytes, values.back_s),
            "params": Moved(params.num_read_bytes, params.read_s),
        }
        self.is_changed |= self.observe(step_s, self.watch.take(), moved, peak_bytes)
        if self.is_probe_due:
            self.is_changed |= self.probed(probe(self._folders))

    def close(self) -> None:
        """Ends the thread; idempotent."""
        self.watch.close()
