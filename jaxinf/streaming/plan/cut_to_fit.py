"""How memory becomes cuts, and cuts a plan: segments of a size that fits.

    memory, less what else a step takes
      ─► bytes of a segment: powers of two ─► cuts ─► calls ─► peak memory ─ fits?
      ─► values that leave ─► reads of params

Invariant: the same jaxpr and the same cuts give the same programs, in every process.
What a step takes stays within its budgets, in all processes alike.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from jaxinf.errors import BudgetError
from jaxinf.processes import Group
from jaxinf.streaming.plan.calls import Plan, Policy, may_leave
from jaxinf.streaming.plan.compiled import Executables, known_temps, measured
from jaxinf.streaming.plan.leaving import evicted, least_bytes, plan_tiers
from jaxinf.streaming.plan.memory import (
    Budget,
    Memory,
    MemoryNeed,
    StepNeeds,
    check_pinned,
    divide,
)
from jaxinf.streaming.plan.options import Options
from jaxinf.streaming.plan.order import order_calls
from jaxinf.streaming.plan.reads import plan_reads, staged_bytes
from jaxinf.streaming.plan.report import largest_text
from jaxinf.streaming.program.cut import cuts_of, segment_limits
from jaxinf.streaming.program.graph import aval_bytes
from jaxinf.streaming.program.lifetimes import OrderedProgram
from jaxinf.streaming.program.meshes import default_device
from jaxinf.streaming.program.programs import make_programs
from jaxinf.terminal import exact_bytes
from jaxinf.typing import JsonValue

_Plan = TypeVar("_Plan")

# A segment may take a third of the budget: one runs, one waits, one is fetched.
_SHARE = 3
# Of what is added to a budget, so much at least goes where bytes are missing: buffers
# take at most three eighths. The last tries are generous: what works is then
# made less, so often at most.
_SHARES = 5 / 8, 5 / 8, 1 / 8, 1 / 16
_MAX_ADVICE_HALVINGS = 5


def cut_to_fit(
    ready: OrderedProgram,
    budget_bytes: int,
    policy: Policy = "recompute",
    measure: Callable[[Plan], Plan] = lambda plan: plan,
    limit: str = "memory_bytes",
    *,
    num_parts: int = 1,
) -> Plan:
    """Cuts the program so that a step's memory fits.

    Args:
      budget_bytes: Memory for a step's programs.
      num_parts: Number of parts of a batch that its programs run for in turn.
      measure: Returns the plan with its `peak_bytes` measured, or at least so many if
        they exceed the budget. It is called for plans that would fit without
        temporaries, and by default leaves these out.

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
        plan = plan_of(ready, cuts, policy, num_parts)
        if plan.peak_bytes <= budget_bytes:
            plan = measure(plan)
        if plan.peak_bytes <= budget_bytes:
            return plan
        if best is None or plan.peak_bytes < best.peak_bytes:
            best = plan
    assert best is not None, "there is a plan for every limit"
    raise BudgetError(
        limit,
        f"it leaves {budget_bytes} bytes for params, values and temporaries of the "
        f"program, whose smallest cut takes at least {best.peak_bytes}, with "
        f"{largest_text(best)}",
        best.peak_bytes - budget_bytes,
        ", or give a smaller batch",
    )


def plan_of(
    ready: OrderedProgram,
    cuts: Sequence[int],
    policy: Policy = "recompute",
    num_parts: int = 1,
    again: Container[int] = (),
) -> Plan:
    """Returns the plan of given cuts, without values that leave and temporaries.

    Args:
      again: Segments that are recomputed; all with ``"recompute"``.
    """
    programs = make_programs(ready, cuts)
    again = range(len(cuts)) if policy == "recompute" else again
    what = order_calls(ready.graph, programs, again, ready.keys, num_parts)
    plan = Plan(ready.traced, tuple(cuts), policy, *what, num_parts)
    return replace(plan, peak_bytes=least_bytes(plan))


# --- a step's plan, in all processes -------------------------------------------------


def plan_within(
    ready: OrderedProgram,
    needs: StepNeeds,
    options: Options,
    budget: Budget,
    *,
    group: Group,
    executables: Executables,
    kept: Callable[[], Sequence[int] | None] = lambda: None,
    again: frozenset[int] = frozenset(),
) -> Plan:
    """Plans a step within a budget; compiles its programs, and blocks.

    Args:
      ready: The function, traced for a part of a batch.
      group: The processes, which plan together, in the memory that all have.
      kept: Returns the cuts on which bits depend from before; None if there are none.
      again: Segments that ``policy="plan"`` recomputes.

    Raises:
      BudgetError: The budget is too small.
      StreamError: The program cannot be cut.
      ProcessError: Other processes have other plans, or have failed.
    """
    own, plans = list[Any](), list[Plan]()

    def divided() -> JsonValue:
        own[:] = _memory(ready, needs, options, budget), kept()
        return [own[0].programs, own[0].staged, own[0].spare]

    told = group.gather("the memory of a step", divided)
    programs, staged, spare = map(min, zip(*told, strict=True))
    memory = replace(own[0], programs=programs, staged=staged, spare=spare)

    def planned() -> JsonValue:
        what = ready, needs, options, memory, own[1], again, executables
        plans.append(_placed(_measured(*what), needs, memory))
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
    leaves = may_leave(options.policy, options.micro_batches)
    if leaves:
        others.append(MemoryNeed(needs.writing_bytes, "writing its values to drives"))
    needs = replace(needs, others=others)
    memory = divide(budget.memory_bytes, needs, budget.limit)
    pinned_bytes = memory.pool_factor * memory.gradients + leaves * memory.staged
    check_pinned(default_device(), pinned_bytes)
    return memory


def _measured(
    ready: OrderedProgram,
    needs: StepNeeds,
    options: Options,
    memory: Memory,
    cuts: Sequence[int] | None,
    again: frozenset[int],
    executables: Executables,
) -> Plan:
    """Returns a plan whose programs' memory fits, of new cuts if none are given."""
    policy, num_parts = options.policy, options.micro_batches

    def measure(plan: Plan) -> Plan:
        plan = measured(_with_params(plan, needs), executables)
        return replace(plan, peak_bytes=least_bytes(plan))

    def tried(plan: Plan) -> Plan:
        plan = _with_params(plan, needs)
        known = replace(plan, temp_bytes=known_temps(plan, executables))
        known = replace(known, peak_bytes=least_bytes(known))
        return known if known.peak_bytes > memory.programs else measure(plan)

    if cuts is None:
        what = ready, memory.programs, policy, tried, memory.limit
        return cut_to_fit(*what, num_parts=num_parts)
    plan = measure(plan_of(ready, cuts, policy, num_parts, again))
    if again and plan.peak_bytes > memory.programs:
        plan = measure(plan_of(ready, cuts, policy, num_parts))
    most_bytes = memory.programs + memory.spare
    if plan.peak_bytes > most_bytes:
        raise BudgetError(
            memory.limit,
            f"it leaves {most_bytes} bytes for the plan that the store was trained "
            f"with, which takes {plan.peak_bytes}",
            plan.peak_bytes - most_bytes,
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
    programs = max(memory.programs, plan.peak_bytes)  # of a kept plan, with the spare
    memory = replace(memory, programs=programs)
    host_bytes, tiers = memory.staged, None
    if plan.is_offloaded:
        passing = 0 if needs.unit_of is None else staged_bytes(needs.unit_of, plan)
        host_bytes = (host_bytes - passing) // memory.pool_factor
        plan = evicted(plan, memory.programs)
    if memory.staged:
        tiers = plan_tiers(plan, host_bytes)
        if needs.unit_of is not None:
            pool_bytes = memory.pool_factor * tiers.host_bytes
            memory = memory.without(pool_bytes, "keeping values")
    reading = plan_reads(plan, needs, memory)
    return replace(plan, memory=memory, tiers=tiers, reading=reading)


# --- a budget that works -------------------------------------------------------------


def within(budget: Budget, plan: Callable[[Budget], _Plan], *, advises: bool) -> _Plan:
    """Returns what `plan` makes of a budget.

    Args:
      advises: Whether an error names a budget that works, for which it plans again:
        not where several processes plan, which do so once.

    Raises:
      BudgetError: The budget is too small.
    """
    try:
        return plan(budget)
    except BudgetError as error:
        refused = error
    works = _near_least(refused, budget, plan) if advises else budget
    given, names = vars(budget), ("memory_bytes", "device_memory_bytes")
    raised = {k: n for k in names if (n := getattr(works, k)) != given[k]}
    if raised:
        sizes = {k: exact_bytes(n) for k, n in raised.items()}
        of = refused.limit, refused.problem, refused.missing_bytes, refused.otherwise
        refused = BudgetError(*of, works=sizes)
    raise refused


def _near_least(
    error: BudgetError, budget: Budget, plan: Callable[[Budget], object]
) -> Budget:
    """Returns a budget that works, near the least; the one refused if none is found."""
    low, works, shares = budget, None, [*_SHARES]
    for _ in range(len(_SHARES) + _MAX_ADVICE_HALVINGS):
        least = getattr(low, error.limit)
        if works is None:
            if least is None or not shares:
                break
            wanted = least + max(1, int(error.missing_bytes / shares.pop(0)))
        else:
            most = getattr(works, error.limit)
            if most - least <= most // 8:
                break
            wanted = (least + most) // 2
        tried = replace(works or low, **{error.limit: _rounded(wanted)})
        if tried == works:
            break
        try:
            plan(tried)
        except BudgetError as other:
            low, error = tried, error if works else other
        else:
            works = tried
    return works or budget


def _rounded(num_bytes: int) -> int:
    """Returns whole MiB that are easily read: at most 1/32 more."""
    unit = max(1 << 20, 1 << max(0, num_bytes.bit_length() - 6))
    return -(-num_bytes // unit) * unit
