"""Binds a step to a plan: cuts, memory, files.

    Ends ─ fitted ─► Fitted ─ bind ─► Bound

Invariant: a refused budget is refused with one that works.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar

from jaxinf.errors import BudgetError
from jaxinf.streaming.bound import Bound, Ends, Fitted
from jaxinf.streaming.move.values import make_values
from jaxinf.streaming.options import Options
from jaxinf.streaming.plan.fit import Prepared
from jaxinf.streaming.plan.offload import check_tiers
from jaxinf.streaming.run import Runner
from jaxinf.terminal import exact_bytes

_Plan = TypeVar("_Plan")

# Of what is added to a budget, so much at least goes where bytes are missing: buffers
# take at most three eighths. The last of three tries is generous.
_SHARES = 5 / 8, 5 / 8, 1 / 8


def within(options: Options, plan: Callable[[Mapping[str, int]], _Plan]) -> _Plan:
    """Returns what `plan` makes of the budgets.

    Raises:
      BudgetError: A budget is too small; names one with which `plan` works, unless
        several processes plan, which do so once.
    """
    try:
        return plan(options.budgets)
    except BudgetError as error:
        if not options.together.group.is_alone:
            raise
        raise _advised(error, options.budgets, plan) from None


def _advised(
    error: BudgetError,
    budgets: Mapping[str, int],
    plan: Callable[[Mapping[str, int]], object],
) -> BudgetError:
    """Returns the refusal with budgets that work; blocks while it plans."""
    tried, last = dict(budgets), error
    for share in _SHARES:
        if last.limit not in tried:
            break
        more = max(1, int(last.missing_bytes / share))
        tried[last.limit] = _rounded(tried[last.limit] + more)
        try:
            plan(tried)
        except BudgetError as other:
            last = other
            continue
        raised = {name: n for name, n in tried.items() if n != budgets[name]}
        return error._advising({name: exact_bytes(n) for name, n in raised.items()})
    return error


def _rounded(num_bytes: int) -> int:
    """Returns whole MiB that are easily read: at most 1/32 more."""
    unit = max(1 << 20, 1 << max(0, num_bytes.bit_length() - 6))
    return -(-num_bytes // unit) * unit


def bind(ends: Ends, ready: Prepared) -> Bound:
    """Plans, compiles and divides the memory; blocks.

    What one process is refused, by its device or its drive, all are: none goes on to a
    step, where it would wait for the others.

    Raises:
      StreamError: The program cannot be cut to fit, or the saved plan is another's.
      ProcessError: Another process is refused.
    """
    fitted = within(ends.options, partial(ends.fitted, ready))
    with ExitStack() as undone:
        made = ends.options.together.group.in_all(
            "the room for a step", lambda: _made(ends, ready, fitted, undone)
        )
        undone.pop_all()
    return made


def _made(ends: Ends, ready: Prepared, fitted: Fitted, undone: ExitStack) -> Bound:
    """Saves a new plan, and takes the room of its step, which `undone` frees."""
    if not fitted.is_saved:
        ends.save(ready, fitted.plan)
    sink = ends.sink(fitted)
    undone.callback(sink.close)
    if fitted.tiers is not None:
        check_tiers(fitted.tiers, fitted.host_bytes)
    values = make_values(fitted.plan, fitted.tiers, ends.folders, ends.meters)
    undone.callback(values.close)
    runner = Runner(fitted.plan, ends.options.executables, values)
    fitted = replace(fitted, plan=runner.plan)
    params, store_bytes = ends.source(fitted)
    undone.callback(params.close)
    return Bound(ends, fitted, runner, params, sink, store_bytes)
