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
from jaxinf.streaming.plan.compiled import Executables, known_temp_bytes, measure_memory
from jaxinf.streaming.plan.memory import (
    FREE_SHARE,
    Budget,
    MemoryNeed,
    StepMemory,
    StepNeeds,
    check_pinned,
    divide_memory,
)
from jaxinf.streaming.plan.offload import (
    evict_values,
    least_peak_bytes,
    may_offload,
    place_on_host,
)
from jaxinf.streaming.plan.options import Options
from jaxinf.streaming.plan.order import make_plan
from jaxinf.streaming.plan.reads import plan_reads, staged_bytes
from jaxinf.streaming.plan.report import describe_largest
from jaxinf.streaming.program.cut import cuts_of, segment_limits
from jaxinf.streaming.program.lifetimes import OrderedProgram
from jaxinf.terminal import exact_bytes, format_bytes
from jaxinf.typing import JsonValue

_Planned = TypeVar("_Planned")

# A segment may take a third of the budget: one runs, one waits, one is fetched.
_SHARE = 3
# What is added to a budget, in bytes missing: buffers take at most three eighths of it.
_RAISE = 8 / 5
_MAX_RAISES = 8
_MIB = 1 << 20


def cut_to_fit(
    ordered: OrderedProgram,
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
      measure: Returns the plan with its `peak_bytes` measured, or at least so many if
        they exceed the budget; by default temporaries are left out.
      limit: The argument that bounds the budget.
    """
    best: Plan | None = None
    tried = set[Sequence[int]]()
    share = budget_bytes // _SHARE
    # Ever smaller segments, those of a third of the budget first.
    limits = sorted(segment_limits(ordered), key=lambda n: (n > share, abs(share - n)))
    for limit_bytes in limits:
        cuts = cuts_of(ordered, limit_bytes)
        if cuts in tried:
            continue
        tried.add(cuts)
        plan = measure(make_plan(ordered, cuts, policy, num_parts))
        if plan.peak_bytes <= budget_bytes:
            return plan
        if best is None or plan.peak_bytes < best.peak_bytes:
            best = plan
    assert best is not None, "there is a plan for every limit"
    more_parts = (
        "another number of micro_batches or " if ordered.graph.gradients else ""
    )
    raise BudgetError(
        limit,
        f"it leaves {format_bytes(budget_bytes)} for params, values and temporaries of "
        f"the program, whose smallest cut takes at least "
        f"{format_bytes(best.peak_bytes)}, with {describe_largest(best)}",
        best.peak_bytes - budget_bytes,
        f", or give {more_parts}a smaller batch",
    )


def plan_step(
    ordered: OrderedProgram,
    needs: StepNeeds,
    options: Options,
    budget: Budget,
    *,
    group: Group,
    executables: Executables,
    kept: Sequence[int] | None = None,
    recomputed: frozenset[int] = frozenset(),
) -> Plan:
    """Plans a step within a budget; compiles its programs, and blocks.

    Args:
      group: The processes, which plan together, in the memory that all have.
      kept: The cuts that the store keeps, since bits depend on them, or None.
      recomputed: Segments that ``policy="plan"`` recomputes.
    """
    memories, plans = list[StepMemory](), list[Plan]()

    def divide() -> JsonValue:
        memories.append(_step_memory(ordered, needs, options, budget))
        return [memories[0].program_bytes, memories[0].staged_bytes]

    gathered = group.gather("the memory of a step", divide)
    programs, staged = map(min, zip(*gathered, strict=True))
    memory = replace(memories[0], program_bytes=programs, staged_bytes=staged)

    def plan() -> JsonValue:
        fitting = _plan_programs(
            ordered, needs, options, memory, executables, kept, recomputed
        )
        plans.append(_place_tensors(fitting, needs, memory))
        return None if group.is_alone else plans[0].digest

    remedy = "give all the same options, and the same versions of packages"
    group.agree("the plan of a step", plan, remedy)
    return plans[0]


def _step_memory(
    ordered: OrderedProgram, needs: StepNeeds, options: Options, budget: Budget
) -> StepMemory:
    traced, purpose = ordered.traced, "holding its batch and constants"
    given_bytes = options.micro_batches * sum(map(aval_bytes, traced.batch))
    given_bytes += sum(map(aval_bytes, traced.consts))
    others = [*needs.others, MemoryNeed(given_bytes, purpose, is_on_device=True)]
    offloads = may_offload(traced, options.policy, options.micro_batches)
    if offloads:
        others.append(MemoryNeed(needs.writing_bytes, "writing its values to drives"))
    memory = divide_memory(budget, replace(needs, others=others))
    if memory.pool_factor > 1:  # XLA has a pool of pinned memory
        pooled_bytes = memory.pool_factor * memory.gradient_bytes
        check_pinned(pooled_bytes + offloads * memory.staged_bytes)
    return memory


def _plan_programs(
    ordered: OrderedProgram,
    needs: StepNeeds,
    options: Options,
    memory: StepMemory,
    executables: Executables,
    cuts: Sequence[int] | None,
    recomputed: frozenset[int],
) -> Plan:
    """Returns a plan whose programs' memory fits, of new cuts if none are given."""
    policy, num_parts = options.policy, options.micro_batches

    def measure(plan: Plan) -> Plan:
        """Fills in temporaries; does not compile new cuts that cannot fit anyway."""
        plan = _with_resident_params(plan, needs)
        plan = replace(plan, temp_bytes=known_temp_bytes(plan, executables))
        if cuts is not None or least_peak_bytes(plan) <= memory.program_bytes:
            plan = measure_memory(plan, executables)
        return replace(plan, peak_bytes=least_peak_bytes(plan))

    if cuts is None:
        return cut_to_fit(
            ordered,
            memory.program_bytes,
            policy,
            num_parts=num_parts,
            measure=measure,
            limit=memory.limit,
        )
    plan = measure(make_plan(ordered, cuts, policy, num_parts, recomputed))
    if recomputed and plan.peak_bytes > memory.program_bytes:
        plan = measure(make_plan(ordered, cuts, policy, num_parts))
    missing_bytes = plan.peak_bytes - memory.program_bytes
    if missing_bytes > 0:
        raise BudgetError(
            memory.limit,
            f"it leaves {format_bytes(memory.program_bytes)} for the plan that the "
            f"store was trained with, which takes {format_bytes(plan.peak_bytes)}",
            missing_bytes,
            ", or pass replan=True for another plan (bits then differ from here on)",
        )
    return plan


def _with_resident_params(plan: Plan, needs: StepNeeds) -> Plan:
    """Returns the plan without stays of params that are in memory anyway."""
    if needs.unit_of is not None:
        return plan
    # A piece of a leaf is copied for its calls.
    stays = plan.param_stays
    copied = tuple(stay for stay in stays if stay.tensor.index or stay.tensor.rows)
    params_bytes = sum(map(aval_bytes, plan.traced.params))
    return replace(plan, param_stays=copied, resident_bytes=params_bytes)


def _place_tensors(plan: Plan, needs: StepNeeds, memory: StepMemory) -> Plan:
    """Returns the plan with the values that leave, and the reads of params."""
    unit_of, factor = needs.unit_of, memory.pool_factor
    if plan.may_offload:
        plan = evict_values(plan, memory.program_bytes)
    if memory.staged_bytes:
        passing_bytes = 0 if unit_of is None else staged_bytes(unit_of, plan)
        host_bytes = (memory.staged_bytes - passing_bytes) // factor
        plan = replace(plan, offload=place_on_host(plan, host_bytes))
        if unit_of is not None:
            left_bytes = memory.staged_bytes - factor * plan.offload.host_bytes
            memory = replace(memory, staged_bytes=left_bytes)
    return replace(plan, memory=memory, reads=plan_reads(plan, needs, memory))


def plan_or_advise(
    budget: Budget, plan: Callable[[Budget], _Planned], *, advises: bool
) -> _Planned:
    """Returns what `plan` makes of a budget.

    Args:
      advises: Whether an error names a budget that works, which is raised until a plan
        fits. Several processes plan but once.
    """
    try:
        return plan(budget)
    except BudgetError as error:
        first = last = error
    works, device_bytes = dict[str, int](), budget.device.num_bytes or 0
    # By default the limit is a share of what the device has free.
    free_bytes = device_bytes / FREE_SHARE
    most_bytes = free_bytes if budget.device_memory_bytes is None else math.inf
    for _ in range(_MAX_RAISES if advises else 0):
        refused = works.get(last.limit, getattr(budget, last.limit) or device_bytes)
        num_mib = (refused + int(_RAISE * last.missing_bytes)) // _MIB + 1
        works[last.limit] = num_mib * _MIB
        if works.get("device_memory_bytes", 0) > most_bytes:
            break
        try:
            plan(replace(budget, **works))
        except BudgetError as error:
            last = error
        else:
            raise BudgetError(
                first.limit,
                first.problem,
                first.missing_bytes,
                first.otherwise,
                {name: exact_bytes(num_bytes) for name, num_bytes in works.items()},
            )
    raise first
