"""Binds a step to a plan: cuts, the order of parts, memory, files.

    Ends ─ planned ─► Planned(ready, ends, fitted) ─ bind ─► Bound

Invariant: the order is chosen after the cuts, so bits do not depend on it.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from jaxinf.errors import BudgetError
from jaxinf.streaming.bound import Bound, Ends
from jaxinf.streaming.budgets import planned_within
from jaxinf.streaming.fit import Fitted
from jaxinf.streaming.move.values import value_bytes
from jaxinf.streaming.plan.plan import Plan, Prepared
from jaxinf.streaming.replanning import Replanner, make_runner, offload_planned
from jaxinf.streaming.update.sink import Sink


class Planned(NamedTuple):
    """What a step was planned for.

    Attributes:
      ready: The loss function, for the parts of a batch that a run is of.
      ends: Its params source and gradient sink, of the order that was chosen.
    """

    ready: Prepared
    ends: Ends
    fitted: Fitted
    is_saved: bool


def planned(ends: Ends, ready: Prepared, *, searches: bool = True) -> Planned:
    """Cuts a step to fit, and chooses the order of the parts of a batch; compiles it.

    With ``order="auto"`` parts are in layer order if that fits with the same cuts and
    moves fewer bytes on drives; of several processes none chooses. Nothing is written.

    Args:
      ready: The loss function, traced for a part of the batch.
      searches: Whether to look for a budget that works where one is too small.

    Raises:
      BudgetError: A budget is too small; names one that works.
      StreamError: The program cannot be cut to fit, or the saved plan is another's.
    """
    options, is_alone = ends.setup.options, ends.setup.together.is_alone
    found = planned_within(
        options.budgets, fitting(ends, ready), searches=searches and is_alone
    )
    ready, ends, fitted, _ = found
    layers = ends.in_layers() if options.chooses_order and is_alone else None
    if layers is None:
        return found
    for_all = replace(ready, num_parts=options.micro_batches)
    try:
        other = layers.fitted(for_all, options.budgets, fitted.plan.cuts)
    except BudgetError:  # values of all parts do not fit
        return found
    beside = Planned(for_all, layers, other, fitted.is_saved)
    return beside if _moved_bytes(beside) < _moved_bytes(found) else found


def fitting(ends: Ends, ready: Prepared) -> Callable[[Mapping[str, int]], Planned]:
    """Returns what cuts a step to fit budgets; it raises as `planned`.

    Tables are in rows if a kept plan has them so; without one, if nothing else fits.
    """
    in_rows = cache(lambda: ends.in_rows(ready))
    kept = ends.kept_rows(ready)

    def fitted(ends: Ends, ready: Prepared, budgets: Mapping[str, int]) -> Planned:
        made = ends.fitted(ready, budgets)
        return Planned(ready, ends, made, made.is_saved)

    def fit(budgets: Mapping[str, int]) -> Planned:
        if not kept or in_rows() is None:
            try:
                return fitted(ends, ready, budgets)
            except BudgetError:
                if kept is not None or in_rows() is None:
                    raise
        found = in_rows()
        assert found is not None, "there are tables in rows"
        return fitted(*found, budgets)

    return fit


def _moved_bytes(found: Planned) -> int:
    ready, ends, fitted, _ = found
    options, executables = ends.setup.options, ends.setup.executables
    graph = ready.lifetimes.graph
    plan, replanner = offload_planned(fitted, graph, executables, options, ())
    if replanner is not None:
        replanner.close()
    values = value_bytes(plan, fitted.tiers(plan.calls))
    moved, _, by_commits = ends.moved(fitted, plan, values)
    return moved.drive_read_bytes + moved.drive_write_bytes + by_commits


def bind(ends: Ends, ready: Prepared) -> Bound:
    """Plans, compiles and divides the memory; blocks.

    What one process is refused, by its device or its drive, all are: none goes on to a
    step, where it would wait for the others.

    Raises:
      StreamError: The program cannot be cut to fit, or the saved plan is another's.
      ProcessError: Another process is refused.
    """
    found = planned(ends, ready)
    with ExitStack() as undone:
        made = ends.setup.together.call(
            "the room for a step", lambda: _made(found, undone)
        )
        undone.pop_all()
    return made


def _made(found: Planned, undone: ExitStack) -> Bound:
    """Saves a new plan, and takes the room of its step, which `undone` frees."""
    ready, ends, fitted, is_saved = found
    setup, graph = ends.setup, ready.lifetimes.graph
    if not is_saved:
        ends.save(ready, fitted.plan)
    sink = ends.sink(fitted)
    undone.callback(sink.close)
    plan, replanner = offload_planned(
        fitted, graph, setup.executables, setup.options, ends.folders, sink.waiting
    )
    made = _bound(ends, fitted.without_graph(), sink, plan, replanner)
    undone.callback(made.close)
    return made


def rebind(bound: Bound) -> Bound:
    """Returns the same bound to what its planner has chosen; closes the old one.

    No step may be under way, nor its commit.
    """
    found = bound.replanner
    assert found is not None, "only a planned step changes"
    bound.close_calls()
    return _bound(bound.ends, bound.fitted, bound.sink, found.plan, found)


def _bound(
    ends: Ends,
    fitted: Fitted,
    sink: Sink,
    plan: Plan,
    replanner: Replanner | None,
) -> Bound:
    runner = make_runner(
        fitted,
        plan,
        ends.setup.executables,
        ends.folders,
        replanner,
        ends.meters,
    )
    return replace(ends.bound(runner, fitted, sink), replanner=replanner)
