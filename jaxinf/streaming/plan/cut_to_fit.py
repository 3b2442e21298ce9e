"""How memory becomes cuts, and cuts a plan: segments of a size that fits.

    memory, less what else a step takes
      ─► bytes of a segment: powers of two ─► cuts ─► calls ─► peak memory ─ fits?
      ─► values that leave ─► reads of params

Invariant: the same jaxpr and the same cuts give the same programs, in every process.
What a step takes stays within its budgets, in all processes alike.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from jaxinf.errors import BudgetError
from jaxinf.processes import Group
from jaxinf.program import aval_bytes
from jaxinf.streaming.plan.calls import Plan, Policy
from jaxinf.streaming.plan.compiled import Executables, known_temps, measured
from jaxinf.streaming.plan.leaving import evicted, least_bytes, may_leave, on_host
from jaxinf.streaming.plan.memory import (
    FREE_SHARE,
    Budget,
    Memory,
    MemoryNeed,
    StepNeeds,
    check_pinned,
    divide,
)
from jaxinf.streaming.plan.options import Options
from jaxinf.streaming.plan.order import plan_of
from jaxinf.streaming.plan.reads import plan_reads, staged_bytes
from jaxinf.streaming.plan.report import largest_text
from jaxinf.streaming.program.cut import cuts_of, segment_limits
from jaxinf.streaming.program.lifetimes import OrderedProgram
from jaxinf.terminal import exact_bytes, format_bytes
from jaxinf.typing import JsonValue

_Plan = TypeVar("_Plan")

# A segment may take a third of the budget: one runs, one waits, one is fetched.
_SHARE = 3
# What is added to a budget, in bytes missing: buffers take at most three eighths of it.
_RAISE = 8 / 5
_MAX_RAISES = 8
_MIB = 1 << 20


def cut_to_fit(
    ready: OrderedProgram,
    budget_bytes: int,
    policy: Policy = "recompute",
    *,
    num_parts: int = 1,
    measure: Callable[[Plan], Plan] = lambda plan: plan,
    limit: str = "memory_bytes",
) -> Plan:
    """Cuts the program so that a step's memory fits.

    Args:
      budget_bytes: Memory for a step's programs.
      num_parts: Number of parts of a batch that its programs run for in turn.
      measure: Returns the plan with its `peak_bytes` measured, or at least so many if
        they exceed the budget; by default temporaries are left out.
      limit: The argument that bounds the budget.

    Raises:
      BudgetError: No cut fits; names the params that are too large.
    """
    best: Plan | None = None
    tried = set[Sequence[int]]()
    most = budget_bytes // _SHARE
    # Ever smaller segments, those of a third of the budget first.
    limits = sorted(segment_limits(ready), key=lambda n: (n > most, abs(most - n)))
    for most_bytes in limits:
        cuts = cuts_of(ready, most_bytes)
        if cuts in tried:
            continue
        tried.add(cuts)
        plan = measure(plan_of(ready, cuts, policy, num_parts))
        if plan.peak_bytes <= budget_bytes:
            return plan
        if best is None or plan.peak_bytes < best.peak_bytes:
            best = plan
    assert best is not None, "there is a plan for every limit"
    more_parts = "another number of micro_batches or " if ready.graph.gradients else ""
    raise BudgetError(
        limit,
        f"it leaves {format_bytes(budget_bytes)} for params, values and temporaries of "
        f"the program, whose smallest cut takes at least "
        f"{format_bytes(best.peak_bytes)}, with {largest_text(best)}",
        best.peak_bytes - budget_bytes,
        f", or give {more_parts}a smaller batch",
    )


# --- a step's plan, in all processes -------------------------------------------------


def plan_within(
    ready: OrderedProgram,
    needs: StepNeeds,
    options: Options,
    budget: Budget,
    *,
    group: Group,
    executables: Executables,
    kept: Sequence[int] | None = None,
    again: frozenset[int] = frozenset(),
) -> Plan:
    """Plans a step within a budget; compiles its programs, and blocks.

    Args:
      ready: The function, traced for a part of a batch.
      group: The processes, which plan together, in the memory that all have.
      kept: The cuts on which bits depend from before; None if there are none.
      again: Segments that ``policy="plan"`` recomputes.

    Raises:
      BudgetError: The budget is too small.
      StreamError: The program cannot be cut.
      ProcessError: Other processes have other plans, or have failed.
    """
    own, plans = list[Memory](), list[Plan]()

    def divided() -> JsonValue:
        own.append(_memory(ready, needs, options, budget))
        return [own[0].programs, own[0].staged]

    told = group.gather("the memory of a step", divided)
    programs, staged = map(min, zip(*told, strict=True))
    memory = replace(own[0], programs=programs, staged=staged)

    def planned() -> JsonValue:
        plan = _fitting(ready, needs, options, memory, executables, kept, again)
        plans.append(_placed(plan, needs, memory))
        return None if group.is_alone else plans[0].digest

    remedy = "give all the same options, and the same versions of packages"
    group.agree("the plan of a step", planned, remedy)
    return plans[0]


def _memory(
    ready: OrderedProgram, needs: StepNeeds, options: Options, budget: Budget
) -> Memory:
    """Returns what this process has for a step's programs."""
    traced, purpose = ready.traced, "holding its batch and constants"
    given_bytes = options.micro_batches * sum(map(aval_bytes, traced.batch))
    given_bytes += sum(map(aval_bytes, traced.consts))
    others = [*needs.others, MemoryNeed(given_bytes, purpose, is_on_device=True)]
    leaves = may_leave(traced, options.policy, options.micro_batches)
    if leaves:
        others.append(MemoryNeed(needs.writing_bytes, "writing its values to drives"))
    memory = divide(budget, replace(needs, others=others))
    if memory.pool_factor > 1:  # XLA has a pool of pinned memory
        pooled_bytes = memory.pool_factor * memory.gradients
        check_pinned(pooled_bytes + leaves * memory.staged)
    return memory


def _fitting(
    ready: OrderedProgram,
    needs: StepNeeds,
    options: Options,
    memory: Memory,
    executables: Executables,
    cuts: Sequence[int] | None,
    again: frozenset[int],
) -> Plan:
    """Returns a plan whose programs' memory fits, of new cuts if none are given."""
    policy, num_parts = options.policy, options.micro_batches

    def measure(plan: Plan) -> Plan:
        """Fills in temporaries; does not compile new cuts that cannot fit anyway."""
        plan = _with_params(plan, needs)
        plan = replace(plan, temp_bytes=known_temps(plan, executables))
        if cuts is not None or least_bytes(plan) <= memory.programs:
            plan = measured(plan, executables)
        return replace(plan, peak_bytes=least_bytes(plan))

    if cuts is None:
        return cut_to_fit(
            ready,
            memory.programs,
            policy,
            num_parts=num_parts,
            measure=measure,
            limit=memory.limit,
        )
    plan = measure(plan_of(ready, cuts, policy, num_parts, again))
    if again and plan.peak_bytes > memory.programs:
        plan = measure(plan_of(ready, cuts, policy, num_parts))
    if plan.peak_bytes > memory.programs:
        raise BudgetError(
            memory.limit,
            f"it leaves {format_bytes(memory.programs)} for the plan that the store "
            f"was trained with, which takes {format_bytes(plan.peak_bytes)}",
            plan.peak_bytes - memory.programs,
            ", or pass replan=True for another plan (bits then differ from here on)",
        )
    return plan


def _with_params(plan: Plan, needs: StepNeeds) -> Plan:
    """Returns the plan with the params that are in memory anyway."""
    if needs.unit_of is not None:
        return plan
    # A part of a leaf is copied for its calls.
    copied = tuple(use for use in plan.uses if use.tensor.index or use.tensor.rows)
    params_bytes = sum(map(aval_bytes, plan.traced.params))
    return replace(plan, uses=copied, resident_bytes=params_bytes)


def _placed(plan: Plan, needs: StepNeeds, memory: Memory) -> Plan:
    """Returns the plan with the values that leave, and the reads of params."""
    unit_of, factor = needs.unit_of, memory.pool_factor
    if plan.is_offloaded:
        plan = evicted(plan, memory.programs)
    if memory.staged:
        passing = 0 if unit_of is None else staged_bytes(unit_of, plan)
        waiting = on_host(plan, (memory.staged - passing) // factor)
        plan = replace(plan, waiting=waiting)
        if unit_of is not None:
            staged = memory.staged - factor * waiting.host_bytes
            memory = replace(memory, staged=staged)
    return replace(plan, memory=memory, reads=plan_reads(plan, needs, memory))


# --- a budget that works -------------------------------------------------------------


def with_advice(
    budget: Budget, plan: Callable[[Budget], _Plan], *, advises: bool
) -> _Plan:
    """Returns what `plan` makes of a budget.

    Args:
      advises: Whether an error names a budget that works: one that is raised by what is
        missing, and planned for, until it fits. Several processes plan but once.

    Raises:
      BudgetError: The budget is too small.
    """
    try:
        return plan(budget)
    except BudgetError as error:
        refused = last = error
    works, device_bytes = dict[str, int](), budget.device.num_bytes or 0
    # One that was not given is what most of the device's free memory has.
    free_bytes = device_bytes / FREE_SHARE
    most_bytes = free_bytes if budget.device_memory_bytes is None else math.inf
    for _ in range(_MAX_RAISES if advises else 0):
        least = works.get(last.limit, getattr(budget, last.limit) or device_bytes)
        num_mib = (least + int(_RAISE * last.missing_bytes)) // _MIB + 1
        works[last.limit] = num_mib * _MIB
        if works.get("device_memory_bytes", 0) > most_bytes:
            break
        try:
            plan(replace(budget, **works))
        except BudgetError as error:
            last = error
        else:
            raise BudgetError(
                refused.limit,
                refused.problem,
                refused.missing_bytes,
                refused.otherwise,
                {name: exact_bytes(num_bytes) for name, num_bytes in works.items()},
            )
    raise refused
