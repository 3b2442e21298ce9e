"""Plans: the cuts of a program, the number of programs, and their contents."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import family
from hypothesis import given
from hypothesis import strategies as st
from streaming import assert_near, in_memory, prepared, smallest_bytes, unit
from zoo import ZOO, normal

from jaxinf.errors import BudgetError, StreamError
from jaxinf.streaming.plan.compiled import Executables, known_temps, measured
from jaxinf.streaming.plan.cut_to_fit import cut_to_fit, plan_of, within
from jaxinf.streaming.plan.memory import Budget, Memory, StepNeeds
from jaxinf.streaming.plan.reads import (
    fetches_of,
    held_bytes,
    keep_between,
    plan_reads,
)
from jaxinf.streaming.program.cut import Run, cuts_of, find_runs
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.lifetimes import Stay, fill, occupancy, order_program
from jaxinf.streaming.program.units import units_of
from jaxinf.streaming.run import Runner
from jaxinf.terminal import parse_bytes

pytestmark = pytest.mark.optimized("long")

DEEP = ("linen", "linen_scan_remat_dropout", "gpt2_nano", "haiku", "equinox_mlp")
DEEP += ("l2_penalty", "stack_by_index")


def cut_in_blocks(name, depth):
    """Makes a plan whose segments are blocks of the model."""
    ready = prepared(ZOO[name](depth=depth))
    return cut_to_fit(ready, smallest_bytes(ready) * 5 // 4)


def pieces_of(plan):
    """The parts of params that calls read, and those whose gradients they make."""
    read = [use.tensor for use in plan.uses]
    return read, [piece for call in plan.calls for piece, _ in call.gradients]


@pytest.mark.parametrize("name", family(DEEP, short=DEEP[-2:]))
def test_more_equal_blocks_need_no_more_programs(name):
    first = prepared(ZOO[name](depth=12))
    limit_bytes = first.piece_bytes(first.sizes) // 6  # a little more than a block's
    plans = []
    for depth in (12, 24, 48):
        ready = prepared(ZOO[name](depth=depth))
        plans.append(plan_of(ready, cuts_of(ready, limit_bytes)))
    assert len({len(plan.programs) for plan in plans}) == 1
    few, more, most = (len(plan.calls) for plan in plans)
    assert few < more < most


def test_runs_of_equal_parts_are_found_between_other_things():
    tokens = *"x", *("ab" * 6), *"y", *("abcdc" * 4), *"z", *("fg" * 3)
    assert find_runs(tokens) == [Run(1, 2, 12), Run(14, 5, 20), Run(35, 2, 6)]
    assert find_runs(tuple("abcabc")) == find_runs(()) == []  # twice is no run


CALLS = st.integers(0, 7)


@given(st.lists(st.tuples(CALLS, CALLS, st.integers(1, 5))), st.integers(0, 12))
def test_what_stays_fits_and_nothing_else_would(drawn, capacity):
    """Params and values stay between calls as far as there is memory, in this order."""
    stays = [Stay(min(a, b), max(a, b), n, i) for i, (a, b, n) in enumerate(drawn)]
    occupied = np.zeros(7, np.int64)
    added = fill(occupied, stays, capacity)
    assert occupied.tolist() == occupancy(7, added).tolist()
    assert occupied.max() <= capacity
    for stay in (one for one in stays if one not in added):
        during = occupied[stay.start : stay.stop]
        assert during.max(initial=0) + stay.num_bytes > capacity


@pytest.mark.parametrize(("num_spare", "num_reads"), [(0, 6), (1, 6), (2, 5)])
def test_params_stay_for_a_later_call_if_they_fit(num_spare, num_reads):
    """Half of the room beyond the least is for reading ahead."""
    uses = [[0], [], [1, 2, 3, 4], [], [], [0]]
    fetches = fetches_of(
        Stay(n, n + 1, 0, unit(leaf)) for n, own in enumerate(uses) for leaf in own
    )
    held = held_bytes(fetches, len(uses))
    joined = keep_between(fetches, held, num_spare * unit(0).page_bytes)
    assert len(joined) == num_reads
    assert held.tolist() == held_bytes(joined, len(uses)).tolist()


def test_recomputing_holds_no_scores():
    def loss(params, x):
        for w in params:
            scores = jax.nn.softmax((x @ w) @ (x @ w.T).T)
            x = x + scores @ x
        return jnp.mean(x**2)

    ready = order_program(
        loss, [np.ones((64, 64), np.float32)] * 3, np.ones((512, 64), "f")
    )
    cuts = cut_to_fit(ready, 1 << 30, "keep").cuts
    plan = plan_of(ready, cuts, "recompute")
    num_forward = len(cuts) - 1
    kept = [
        life.aval.shape
        for life in plan.lives.values()
        if life.made < num_forward - 1 and life.takers and life.takers[-1] > num_forward
    ]
    assert kept
    assert (512, 512) not in kept


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("linen_scan", marks=pytest.mark.long),
        "scan_remat_reverse",
        "stack_by_index",
    ],
)
def test_a_stack_is_fetched_and_handed_out_a_layer_at_a_time(name):
    depth = 6
    plan = cut_in_blocks(name, depth)
    fetched, given = pieces_of(plan)
    shapes = [leaf.shape for leaf in plan.traced.params]
    stacks = {i for i, shape in enumerate(shapes) if shape[0] == depth}
    assert stacks
    for pieces in (fetched, given):
        assert {p.index for p in pieces if p.leaf in stacks} == {
            (i,) for i in range(depth)
        }
        assert not [p for p in pieces if p.leaf in stacks and p.rows]
    order = list(dict.fromkeys(p.index[0] for p in given if p.leaf in stacks))
    is_reverse = name == "scan_remat_reverse"
    assert order == sorted(order, reverse=not is_reverse)


def pending_bytes(plan):
    """Returns the most bytes of backward values that wait between two calls."""
    sizes = {}
    held, most = set(), 0
    for call in plan.calls:
        for slot, value in zip(call.makes, call.program.outputs, strict=True):
            if slot is not None and call.program.name.startswith("backward"):
                sizes[slot] = value.aval.size * value.aval.dtype.itemsize
                held.add(slot)
        held -= set(call.frees)
        most = max(most, sum(sizes[slot] for slot in held))
    return most


@pytest.mark.parametrize("name", ["l2_penalty", "equinox_cast_first"])
def test_gradients_do_not_wait_for_the_end(name):
    plan = cut_in_blocks(name, 12)
    if name == "l2_penalty":  # which reads params where they are anyway
        forward = [c for c in plan.calls if c.program.name.startswith("forward")]
        params = [c.program.params for c in forward if not c.is_repeat]
        read = [piece for own in params for piece, _ in own]
        assert len(read) == len(set(read))
    all_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in plan.traced.params)
    assert pending_bytes(plan) < all_bytes / 8


def test_rows_of_a_table_are_fetched_alone():
    ready = prepared(ZOO["gpt2_nano"]())
    plan = cut_to_fit(ready, smallest_bytes(ready) * 2)
    wpe = plan.traced.names.index("wpe")
    rows = {piece for piece in pieces_of(plan)[0] if piece.leaf == wpe}
    assert rows <= {Piece(wpe), Piece(wpe, rows=(0, 16))}


def test_a_budget_below_the_largest_equation_is_refused():
    ready = prepared(ZOO["tied_and_unused"]())
    smallest = smallest_bytes(ready)
    too_little = smallest // 2
    missing = smallest - too_little
    message = rf"leaves {too_little} .*table .*raise memory_bytes by at least {missing}"
    with pytest.raises(StreamError, match=message):
        cut_to_fit(ready, too_little)
    assert cut_to_fit(ready, smallest).peak_bytes <= smallest


ONES = np.ones(3, np.float32)
GOOD = {"w": ONES}


def test_large_closed_over_arrays_are_warned_of():
    table = jnp.full((600, 600), 2.0)

    @jax.jit
    def inner(batch):
        return jnp.sum(table @ jnp.resize(batch, 600))

    def loss(params, batch):
        return inner(batch) * jnp.sum(params["w"] * batch)

    found = r"1440000 bytes .*float32\[600, 600\]\).*in the batch: step"
    with pytest.warns(UserWarning, match=found):
        ready = order_program(loss, GOOD, ONES)
    plan = cut_to_fit(ready, smallest_bytes(ready))
    found, _ = Runner(plan)(ONES, in_memory([ONES]), lambda *_: None)
    assert float(found) == pytest.approx(float(loss(GOOD, ONES)))


def test_a_plan_prints_its_segments():
    ready = prepared(ZOO["linen_scan"](depth=12))
    limit_bytes = ready.piece_bytes(ready.sizes) // 6
    plan = plan_of(ready, cuts_of(ready, limit_bytes))
    needs = StepNeeds(units_of(plan.traced.params, lambda *_: True))
    reading = plan_reads(plan, needs, Memory())
    plan = replace(plan, reading=reading)
    head, _, columns, *lines = str(plan).splitlines()
    assert f"{len(plan.calls)} calls of {len(plan.programs)} programs" in head
    titles = "calls segment programs memory values leaving params read params"
    assert " ".join(columns.split()) == titles
    assert len(plan.cuts) - 1 <= len(lines) <= 2 * (len(plan.cuts) - 1)


def test_an_expensive_equation_is_never_run_by_two_programs():
    """Matrix products belong to one segment; only cheap ones are computed again."""
    ready = prepared(ZOO["linen"](depth=3))
    plan = cut_to_fit(ready, smallest_bytes(ready))
    programs = {call.program: None for call in plan.calls}
    heavy = [n for p in programs for n in p.nodes if n.name == "dot_general"]
    assert len(heavy) == len(set(heavy))
    assert len(heavy) > 3 * 10


def test_nothing_that_is_handed_out_lends_its_memory():
    """The next program reads each layer's output, and its gradient, for the last time.

    The gradient of a bias of the batch's shape is that of the layer's output.
    """

    def loss(params, x):
        outputs = []
        for w, b in params:
            x = jnp.tanh(x @ w) + b
            outputs.append(x)
        return jnp.mean(x**2), outputs

    params = [(normal(i, 64, 64) / 8, normal(10 + i, 8, 64)) for i in range(4)]
    batch, leaves = normal(20, 8, 64), jax.tree.leaves(params)
    ready = order_program(loss, params, batch, has_aux=True)
    plan = cut_to_fit(ready, smallest_bytes(ready, "keep"), "keep")
    assert any(plan.donated.values())
    handed = {}
    value, outputs = Runner(plan)(batch, in_memory(leaves), handed.__setitem__)
    (near, near_outputs), gradients = jax.value_and_grad(loss, has_aux=True)(
        params, batch
    )
    found = [handed[Piece(i)] for i in range(len(leaves))]
    assert_near((value, outputs, found), (near, near_outputs, gradients), 1e-5)


@pytest.mark.parametrize("tried", [300, 700, 900, 1290])
def test_the_budget_that_a_refusal_names_is_near_the_least(tried):
    def plan(budget):
        mib = budget.memory_bytes >> 20
        if mib < 1300:  # less than what is missing is known at first
            missing = 60 if mib < 850 else 400
            raise BudgetError("memory_bytes", "too little", missing << 20)

    with pytest.raises(BudgetError) as refused:
        within(Budget(tried << 20), plan, advises=True)
    assert 1300 << 20 <= parse_bytes(refused.value.works["memory_bytes"]) < 1500 << 20


def test_what_known_programs_take_too_much_is_not_compiled():
    program = ZOO["gpt2_nano"]()
    ready, known = prepared(program), Executables(are_run=False)
    plan = measured(plan_of(ready, cuts_of(ready, 1 << 40)), known)
    assert known_temps(plan, known) == plan.temp_bytes
    assert known_temps(plan, Executables()) == {}
