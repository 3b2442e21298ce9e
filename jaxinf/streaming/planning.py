"""Plans a step for batches of one shape, within its memory.

    memory, less what the sink takes ─► cuts that fit ─► values that leave ─► reads

Invariant: what a step takes stays within its budgets, in all processes alike. A refused
budget is refused with one that works. Nothing is written.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from jaxinf.errors import BudgetError, StreamError
from jaxinf.streaming.move.scratch import writing_bytes
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.compiled import measured, offloaded
from jaxinf.streaming.plan.device import check_pinned
from jaxinf.streaming.plan.fit import Prepared, cut_to_fit, plan_of
from jaxinf.streaming.plan.leaving import least_bytes, plan_tiers
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.options import StepOptions
from jaxinf.streaming.update.sink import Sink
from jaxinf.terminal import exact_bytes
from jaxinf.typing import JsonValue

_Plan = TypeVar("_Plan")

# Of what is added to a budget, so much at least goes where bytes are missing: buffers
# take at most three eighths. The last of three tries is generous.
_SHARES = 5 / 8, 5 / 8, 1 / 8


def plan_step(sink: Sink, ready: Prepared) -> Plan:
    """Plans a step within the budgets of its options; compiles it, and blocks.

    Raises:
      BudgetError: A budget is too small; names one that works.
      StreamError: The program cannot be cut, or the saved plan is another's.
    """
    return within(sink.options, partial(plan_within, sink, ready))


def plan_within(sink: Sink, ready: Prepared, budgets: Mapping[str, int]) -> Plan:
    """As `plan_step`, with other budgets; an error names no budget that works."""
    group, found = sink.options.together.group, list[Plan]()
    division, cuts = _memory_of_all(sink, ready, budgets)

    def plan() -> JsonValue:
        found.append(_planned(sink, ready, division, cuts))
        return None if group.is_alone else found[0].digest

    remedy = "give all the same options, and the same versions of packages"
    group.agree("the plan of a step", plan, remedy)
    return found[0]


def _memory_of_all(
    sink: Sink, ready: Prepared, budgets: Mapping[str, int]
) -> tuple[Division, Sequence[int] | None]:
    """Returns the memory that all processes have, and the cuts that one has kept.

    Raises:
      StreamError: They have kept others.
    """
    options, own = sink.options, list[Division]()

    def divided() -> JsonValue:
        purpose = "holding its batch and constants"
        division = sink.divided(ready, budgets)
        division = division.without(ready.given_bytes, purpose, is_on_device=True)
        pool_bytes = division.pool_bytes(with_values=options.may_leave)
        check_pinned(options.device, pool_bytes)
        if options.may_leave:
            num_bytes = writing_bytes(sink.num_drives)
            division = division.without(num_bytes, "writing its values to drives")
        own.append(division)
        cuts = ready.cuts
        if cuts is None and not options.replan:
            cuts = sink.kept_cuts(ready)
        return [division.programs, division.staged, division.spare, cuts]

    told = options.together.group.gather("the memory of a step", divided)
    programs, staged, spare = (min(one[n] for one in told) for n in range(3))
    kept = {tuple(cuts) for *_, cuts in told if cuts is not None}
    if len(kept) > 1:
        raise StreamError(
            "jaxinf.stream: expected one plan that all processes' stores keep, found "
            f"{len(kept)}; pass replan=True for another one (bits then "
            "differ from here on)"
        )
    division = replace(own[0], programs=programs, staged=staged, spare=spare)
    return division, kept.pop() if kept else None


def _planned(
    sink: Sink,
    ready: Prepared,
    division: Division,
    cuts: Sequence[int] | None,
) -> Plan:
    policy, executables = sink.options.policy, sink.options.executables
    held_bytes = sink.held_bytes(ready.traced)
    if held_bytes > division.programs:
        raise BudgetError(
            division.limit,
            "expected room for params, gradients and optax's state, "
            f"{held_bytes} bytes, found {division.programs}",
            held_bytes - division.programs + 1,
            ", or give a store, which keeps the state on drives",
        )

    def measure(plan: Plan) -> Plan:
        plan = measured(sink.staying(plan), executables)
        return replace(plan, peak_bytes=held_bytes + least_bytes(plan))

    if cuts is None:
        programs, limit = division.programs, division.limit
        plan = cut_to_fit(ready, programs, policy, measure, limit)
    else:
        plan = measure(plan_of(ready, cuts, policy))
        if ready.again and plan.peak_bytes > division.programs:
            plan = measure(plan_of(replace(ready, again=frozenset()), cuts, policy))
        _check_fits(plan, division)
    programs = max(division.programs, plan.peak_bytes)  # of a kept plan, with the spare
    division = replace(division, programs=programs - held_bytes)
    plan = replace(plan, peak_bytes=plan.peak_bytes - held_bytes)
    host_bytes, tiers = division.staged, None
    if plan.is_offloaded:
        passing = sink.passing_bytes(plan)
        host_bytes = (host_bytes - passing) // division.pool_factor
        plan = offloaded(plan, executables, division.programs)
    if division.staged:
        tiers = plan_tiers(plan, host_bytes)
        if sink.units is not None:
            pool_bytes = division.pool_factor * tiers.host_bytes
            division = division.without(pool_bytes, "keeping values")
    reading = sink.reading(plan, division)
    plan = replace(plan, division=division, tiers=tiers, reading=reading)
    return replace(plan, traffic=sink.traffic(plan))


def _check_fits(plan: Plan, division: Division) -> None:
    """Refuses kept cuts that need more memory than there is: BudgetError."""
    most_bytes = division.programs + division.spare
    if plan.peak_bytes > most_bytes:
        raise BudgetError(
            division.limit,
            f"it leaves {most_bytes} bytes for the plan that the store was trained "
            f"with, which takes {plan.peak_bytes}",
            plan.peak_bytes - most_bytes,
            ", or pass replan=True for another plan (bits then differ from here on)",
        )


# --- a budget that works -------------------------------------------------------------


def within(options: StepOptions, plan: Callable[[Mapping[str, int]], _Plan]) -> _Plan:
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
