"""How memory becomes cuts: the plan with segments of a size that fits.

    bytes of a segment: powers of two ─► cuts ─► calls ─► peak memory ─ fits? ─► plan

Invariant: the same jaxpr and the same cuts give the same programs, in every process.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any

from jaxinf.errors import BudgetError
from jaxinf.streaming.plan.calls import Plan, Policy, may_leave
from jaxinf.streaming.plan.leaving import least_bytes
from jaxinf.streaming.plan.order import lenders_of, sequence
from jaxinf.streaming.plan.report import largest_text
from jaxinf.streaming.program.cut import choose_cuts, segment_bytes
from jaxinf.streaming.program.graph import Piece, aval_bytes, build_graph
from jaxinf.streaming.program.keys import Keys, stable_digest
from jaxinf.streaming.program.lifetimes import Lifetimes, ordered
from jaxinf.streaming.program.programs import make_programs, sum_programs
from jaxinf.streaming.program.trace import Traced, trace, trace_function
from jaxinf.typing import PyTree

PLAN_VERSION = 2
"""Changed whenever equal cuts would give other programs, and so other bits."""

# A segment may take a third of the budget: one runs, one waits, one is fetched.
_SHARE = 3
_MAX_HALVINGS = 14


@dataclass(frozen=True, repr=False)  # it has all nodes
class Prepared:
    """A traced loss function, ready to be cut.

    Attributes:
      traced: The loss function, for a part of a batch if there are several.
      keys: Their texts, and what is made of the graph but once.
      num_parts: Number of parts of a batch that its programs run for in turn.
      cuts: Those that its steps have had; None to choose them.
      again: Segments that ``policy="plan"`` recomputes.
    """

    traced: Traced
    lifetimes: Lifetimes
    keys: Keys
    num_parts: int = 1
    cuts: Sequence[int] | None = None
    again: frozenset[int] = frozenset()

    @cached_property
    def tokens(self) -> list[str]:
        """Tokens of the forward nodes; equal ones have equal computations."""
        return [self.keys.node(node) for node in self.lifetimes.forward]

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the whole computation, the same in every process."""
        graph = self.lifetimes.graph
        inputs = {
            value: None
            for node in graph.nodes
            for value in node.inputs
            if value.origin is not None
        }
        lines = self.keys.describe(tuple(inputs), graph.nodes, graph.outputs)
        origins = (str(value.origin) for value in inputs)
        targets = "\n".join(map(str, graph.gradients))
        traced = self.traced
        specs: list[str] = []
        if traced.mesh is not None:
            specs = [str(a.sharding.spec) for a in (*traced.params, *traced.batch)]
        return stable_digest(chain(lines, origins, [targets], traced.names, specs))

    @property
    def gradient_pieces(self) -> tuple[Piece, ...]:
        """Parts of params whose gradients are handed out."""
        return tuple(self.lifetimes.graph.gradients)

    @property
    def given_bytes(self) -> int:
        """Bytes of the batch, and of the arrays that the loss function closed over."""
        batch_bytes = self.num_parts * sum(map(aval_bytes, self.traced.batch))
        return batch_bytes + sum(map(aval_bytes, self.traced.consts))


def prepare(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    *,
    has_aux: bool = False,
    num_parts: int = 1,
    is_deterministic: bool = True,
) -> Prepared:
    """Traces `loss_fn` and orders its nodes; raises the errors of `trace`.

    Args:
      batch: A part of a batch, if there are several.
      is_deterministic: Whether its programs have the same bits in each run.
    """
    traced = trace(loss_fn, params, batch, has_aux=has_aux)
    return _prepared(traced, num_parts, is_deterministic=is_deterministic)


def prepare_function(
    fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    *,
    is_deterministic: bool = True,
) -> Prepared:
    """As `prepare`, of a function without a gradient."""
    traced = trace_function(fn, params, batch)
    return _prepared(traced, is_deterministic=is_deterministic)


def _prepared(
    traced: Traced, num_parts: int = 1, *, is_deterministic: bool
) -> Prepared:
    traced = replace(traced, is_deterministic=is_deterministic)
    return Prepared(traced, ordered(build_graph(traced)), Keys(), num_parts)


# --- memory ─► cuts ─► a plan ---------------------------------------------------------


def cut_to_fit(
    ready: Prepared,
    budget_bytes: int,
    policy: Policy = "recompute",
    measure: Callable[[Plan], Plan] = lambda plan: plan,
    limit: str = "memory_bytes",
) -> Plan:
    """Cuts the program so that a step's memory fits.

    Args:
      budget_bytes: Memory for a step's programs.
      measure: Returns the plan with its `peak_bytes` measured; by default they are
        estimated. It is called for plans that would fit without temporaries.

    Raises:
      BudgetError: No cut fits; names the params that are too large.
    """
    best: Plan | None = None
    # Cuts, and so bits, do not depend on the number of parts.
    # Those of "plan" are of segments that are worth to be recomputed.
    like: Policy = "recompute" if policy == "plan" else policy
    alone = cache(partial(plan_of, replace(ready, num_parts=1), policy=like))
    is_alone = ready.num_parts == 1 and like == policy
    for cuts in dict.fromkeys(_cuts_to_try(ready, budget_bytes, like, alone)):
        plan = alone(cuts) if is_alone else plan_of(ready, cuts, policy)
        none = dict.fromkeys(plan.programs, 0)
        if least_bytes(replace(plan, temp_bytes=none)) <= budget_bytes:
            plan = measure(plan)
        if plan.peak_bytes <= budget_bytes:
            return plan
        if best is None or plan.peak_bytes < best.peak_bytes:
            best = plan
    assert best is not None, "there is a plan for every limit"
    raise BudgetError(
        limit,
        f"it leaves {budget_bytes} bytes for params, values and temporaries of the "
        f"program, whose smallest cut takes {best.peak_bytes}, with "
        f"{largest_text(best, ready.lifetimes.sizes)}",
        best.peak_bytes - budget_bytes,
        ", or give a smaller batch",
    )


def plan_of(ready: Prepared, cuts: Sequence[int], policy: Policy = "recompute") -> Plan:
    """Returns the plan of given cuts, without values that leave."""
    graph, num_parts = ready.lifetimes.graph, ready.num_parts
    programs = make_programs(ready.lifetimes, cuts, ready.keys)
    sums = sum_programs(programs, graph, num_parts, ready.keys)
    again = range(len(cuts)) if policy == "recompute" else ready.again
    calls, results = sequence(graph, programs, again, sums, num_parts)
    leaves = may_leave(policy, num_parts)
    lenders = lenders_of(calls, programs, sums, may_leave=leaves)
    if ready.traced.mesh is not None:  # shardings of values are not known yet
        lenders = frozenset()
    what = ready.traced, tuple(cuts), policy, calls, results, num_parts
    plan = Plan(*what, lenders=lenders)
    return replace(plan, peak_bytes=least_bytes(plan))


def _cuts_to_try(
    ready: Prepared, budget_bytes: int, policy: Policy, alone: Callable[..., Plan]
) -> Iterator[tuple[int, ...]]:
    """Yields cuts of ever smaller segments, those of a third of the budget first.

    A segment takes as many bytes as all params at most. Larger ones suit values that
    take more: they come last, or first if they are half as many and take no more
    memory.
    """
    usual, large = segment_limits(ready)
    usual.sort(key=lambda limit: limit > budget_bytes // _SHARE)
    cut = partial(cuts_of, ready)
    fitting = [limit for limit in large if limit <= budget_bytes // _SHARE]
    if fitting and policy in ("recompute", "keep"):
        plans = map(alone, map(cut, usual))
        fine = next((one for one in plans if one.peak_bytes <= budget_bytes), None)
        for coarse in map(alone, map(cut, fitting)):
            if fine is None or (
                coarse.peak_bytes <= fine.peak_bytes
                and 2 * (len(coarse.cuts) - 1) <= len(fine.cuts) - 1
            ):
                yield coarse.cuts
    yield from map(cut, chain(usual, large))


def segment_limits(ready: Prepared) -> tuple[list[int], list[int]]:
    """Returns bytes of segments to try, descending: up to those of params, and more."""
    lifetimes = ready.lifetimes
    bits = lifetimes.piece_bytes(lifetimes.sizes).bit_length()
    num_nodes = len(lifetimes.forward)
    whole = segment_bytes(lifetimes, 0, num_nodes) if num_nodes else 0
    usual = range(bits, max(0, bits - _MAX_HALVINGS), -1)
    return [1 << n for n in usual], [
        1 << n for n in range(whole.bit_length(), bits, -1)
    ]


def cuts_of(ready: Prepared, limit_bytes: int) -> tuple[int, ...]:
    """Returns the cuts for segments of so many bytes; what was cut once is kept."""
    return ready.keys.once(
        ("cuts", limit_bytes),
        lambda: choose_cuts(ready.lifetimes, ready.tokens, limit_bytes),
    )
