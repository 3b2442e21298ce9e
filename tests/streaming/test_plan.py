"""Plans: a program as it is cut, the number of programs, and their contents."""

import ctypes
import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import family
from hypothesis import given
from hypothesis import strategies as st
from streaming_cases import assert_near, in_memory, prepared, run, smallest_bytes, unit
from zoo import ZOO, Program, normal

from jaxinf.errors import BudgetError
from jaxinf.streaming.count import program_bytes
from jaxinf.streaming.plan import reads
from jaxinf.streaming.plan.cut_to_fit import cut_to_fit
from jaxinf.streaming.plan.order import make_plan
from jaxinf.streaming.program import lifetimes
from jaxinf.streaming.program.cut import cuts_of
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.lifetimes import Stay, fill, occupancy, order_program
from jaxinf.streaming.run import Runner

pytestmark = pytest.mark.optimized("long")

DEEP = ("linen", "linen_scan_remat_dropout", "gpt2_nano", "l2_penalty")
DEEP += ("stack_by_index",)


def cut_in_blocks(name, depth):
    ready = prepared(ZOO[name](depth=depth))
    return cut_to_fit(ready, smallest_bytes(ready) * 5 // 4)


def pieces_of(plan):
    read = [use.tensor for use in plan.param_stays]
    return read, [piece for call in plan.calls for piece, _ in call.gradients]


@pytest.mark.parametrize("name", family(DEEP, short=DEEP[-2:]))
def test_more_equal_blocks_need_no_more_programs(name):
    first = prepared(ZOO[name](depth=12))
    limit_bytes = first.piece_bytes(first.sizes) // 6  # a little more than a block's
    plans = []
    for depth in (12, 24, 48):
        ready = prepared(ZOO[name](depth=depth))
        plans.append(make_plan(ready, cuts_of(ready, limit_bytes)))
    assert len({len(plan.programs) for plan in plans}) == 1
    few, more, most = (len(plan.calls) for plan in plans)
    assert few < more < most


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
    fetches = reads.plan_fetches(
        Stay(n, n + 1, 0, unit(leaf)) for n, own in enumerate(uses) for leaf in own
    )
    held = reads.unit_bytes_by_call(fetches, len(uses))
    joined = reads.join_fetches(fetches, held, num_spare * unit(0).page_bytes)
    assert len(joined) == num_reads
    assert held.tolist() == reads.unit_bytes_by_call(joined, len(uses)).tolist()


def test_the_last_read_before_the_gradient_serves_the_update():
    calls = [(0, 0, 0), (1, 1, 1), (0, 3, 4), (1, 6, 6)]
    fetches = [reads.Fetch(unit(leaf), *first_last) for leaf, *first_last in calls]
    made, held = {unit(0): 4, unit(1): 5}, reads.unit_bytes_by_call(fetches, 8)
    found = reads.serve_updates(fetches, made, held, 1 << 20)
    assert [fetch.gradient for fetch in found] == [None, 5, 4, None]


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
    plan = make_plan(ready, cuts, "recompute")
    num_forward = len(cuts) - 1
    kept = [
        life.aval.shape
        for life in plan.lives.values()
        if life.made < num_forward - 1 and life.takers and life.takers[-1] > num_forward
    ]
    assert kept
    assert (512, 512) not in kept


STACKS = ("linen_scan", "scan_remat_reverse", "stack_by_index")


@pytest.mark.parametrize("name", family(STACKS, short=STACKS[1:]))
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


def test_a_long_chain_before_a_scan_is_looked_at_once():
    def loss(params, x):
        for _ in range(40):
            x = x + jnp.tanh(x)
        return jax.lax.scan(lambda sum, row: (sum + jnp.sum(row @ params), 0), 0.0, x)[
            0
        ]

    assert order_program(loss, np.eye(4, dtype="f"), np.ones((6, 4), "f")).forward


def pending_bytes(plan):
    """Returns the most bytes of backward values that wait between two calls."""
    sizes = {}
    held, most = set(), 0
    for call in plan.calls:
        for value, output in zip(call.makes, call.program.outputs, strict=True):
            if value is not None and call.program.name.startswith("backward"):
                sizes[value] = output.aval.size * output.aval.dtype.itemsize
                held.add(value)
        held -= set(call.frees)
        most = max(most, sum(sizes[value] for value in held))
    return most


@pytest.mark.parametrize("name", ["l2_penalty", "cast_first"])
def test_gradients_do_not_wait_for_the_end(name):
    plan = cut_in_blocks(name, 12)
    if name == "l2_penalty":  # which reads params where they are anyway
        forward = [c for c in plan.calls if c.program.name.startswith("forward")]
        params = [c.program.params for c in forward if not c.is_repeat]
        read = [piece for own in params for piece, _ in own]
        assert len(read) == len(set(read))
    all_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in plan.traced.params)
    assert pending_bytes(plan) < all_bytes / 8


def test_a_product_of_matrices_belongs_to_one_segment():
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


@pytest.mark.long
def test_programs_take_the_memory_that_is_reported(run_python):
    program = Path(__file__).parents[1] / "programs" / "unreported_memory.py"
    unreported = [int(line) for line in run_python(program).stdout.split()]
    assert unreported  # one for each program
    assert max(unreported) < 36 << 20  # half of one product


# --- plans as they run ----------------------------------------------------------------


def wide(params, batch):
    x = batch
    for w in params:
        x = jnp.tanh(x @ w) @ w + x
    return jnp.mean(x**2)


WIDE = Program(wide, [normal(i, 32, 32) / 6 for i in range(12)], normal(100, 8192, 32))


@pytest.fixture
def step(streamed):
    step = streamed(WIDE, optax.adam(1e-2), policy="keep")
    step.load(WIDE.params)
    return step


def is_running(outputs):
    return not all(out.is_ready() for out in outputs if not out.is_deleted())


def test_at_most_two_programs_are_in_flight(step, monkeypatch):
    """A call takes far less time than a program."""
    step(WIDE.batch)
    call, made, running = jax.stages.Compiled.__call__, [], []

    def noting(self, *args):
        running.append(sum(map(is_running, made)))
        made.append(jax.tree.leaves(outputs := call(self, *args)))
        return outputs

    monkeypatch.setattr(jax.stages.Compiled, "__call__", noting)
    step(WIDE.batch)
    assert len(running) == len(step.plan.calls)
    assert set(running) == {0, 1}


def resident_bytes():
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


def test_freed_memory_is_given_back(step):
    """The program's graph, and what glibc keeps below a block that is still in use."""
    libc, size = ctypes.CDLL(None), 100_000
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("not glibc")
    libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    step.compile(WIDE.batch)
    assert not any(isinstance(x, lifetimes.OrderedProgram) for x in gc.get_objects())
    blocks = [libc.memset(libc.malloc(size), 1, size) for _ in range(1000)]
    full_bytes = resident_bytes()
    last = blocks.pop()
    for block in blocks:
        libc.free(block)
    assert full_bytes - resident_bytes() < 50_000_000
    step.compile(WIDE.batch[:4096])
    assert full_bytes - resident_bytes() > 50_000_000
    libc.free(last)


# --- dry runs -------------------------------------------------------------------------


PROGRAM = ZOO["stack_by_index"]()
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
SHAPES = jax.eval_shape(lambda: PROGRAM.params)


def calls_of(plan):
    return plan.cuts, [call.program.key for call in plan.calls], plan.evictions


@pytest.mark.parametrize("policy", family(["recompute", "offload"], short=["offload"]))
def test_what_it_counts_is_what_the_step_moves(streamed, place, policy):
    options = {"memory_bytes": "13MiB", "policy": policy, "micro_batches": 2}
    with streamed(PROGRAM, TX, **options) as step:
        found = step.dry_run(PROGRAM.batch, params=SHAPES)
        assert not [*place.rglob("*")]
        assert found.device_bytes == 0
        assert found.host_bytes < 13 << 20
        assert step.plan is None
        step.load(PROGRAM.params, batch=PROGRAM.batch)
        again = step.dry_run(PROGRAM.batch)
        run(step, PROGRAM, 2)
        step.store.wait()
        moved = step.store.metrics.traffic
        assert again.drive_read_bytes == moved.drive_read_bytes
        assert again.drive_write_bytes == moved.drive_write_bytes
        assert calls_of(again.plan) == calls_of(step.plan)
        assert again.disk_bytes == found.disk_bytes
        run(step, PROGRAM, 1)  # a dry run leaves the step alone
        held = [path.stat().st_size for path in place.rglob("*") if path.is_file()]
        assert sum(held) < 1.2 * again.disk_bytes + (1 << 20)


def test_a_budget_that_is_too_small_is_answered_with_one_that_works(streamed):
    with pytest.raises(BudgetError) as refused:
        streamed(PROGRAM, TX, memory_bytes="64KiB").dry_run(PROGRAM.batch, SHAPES)
    with streamed(PROGRAM, TX, **refused.value.works) as step:
        assert step.dry_run(PROGRAM.batch, SHAPES).host_bytes


@pytest.mark.parametrize("name", ["gpt2_nano", "linen", "scan_remat_reverse"])
def test_a_whole_program_is_counted_to_within_a_third(name):
    program = ZOO[name]()
    given = program.params, program.batch
    compiled = jax.jit(jax.value_and_grad(program.loss)).lower(*given).compile()
    memory = compiled.memory_analysis()
    expected = memory.argument_size_in_bytes + memory.output_size_in_bytes
    expected += memory.temp_size_in_bytes
    assert 2 * expected < 3 * program_bytes(program.loss, *given) < 4 * expected
