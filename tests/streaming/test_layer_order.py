"""Micro-batches in layer order: bits of one part after another, read once for all."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import family
from streaming import (
    CHUNKS,
    assert_same_bits,
    in_memory,
    numbers,
    run,
    smallest_bytes,
    spill_beyond,
    states,
)
from zoo import ZOO, Program, normal

import jaxinf
from jaxinf.errors import BudgetError
from jaxinf.schedule.placement import waiting
from jaxinf.schedule.reads import fetches_of
from jaxinf.streaming.move.spill import Spill
from jaxinf.streaming.plan import offload
from jaxinf.streaming.plan.plan import Plan, prepare
from jaxinf.streaming.run import Runner
from jaxinf.streaming.update.micro_batches import Sums, first_part, parts_of, together
from jaxinf.streaming.update.store_sink import StoreSink

pytestmark = pytest.mark.optimized("long")

ADAM = optax.adam(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAM)
LAYERS = {"micro_batches": 2, "order": "layers"}


def half(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree)


def tied(width=32, depth=4, rows=12):
    """Layers between two uses of a table, of which the second makes wide scores."""

    def loss(params, batch):
        x = params["table"][batch["tokens"]]
        means = []
        for w in params["layers"]:
            x = x + jnp.tanh(x @ w)
            means.append(jnp.mean(x))
        x = x * params["scale"]
        scores = jax.nn.log_softmax(x @ params["table"].T)
        picked = jnp.take_along_axis(scores, batch["tokens"][:, None], 1)
        return -jnp.mean(picked), jnp.stack(means)

    params = {
        "table": normal(0, 16 * width, width) / 6,
        "scale": normal(99, width),
        "layers": [normal(1 + n, width, width) / 6 for n in range(depth)],
    }
    tokens = np.random.default_rng(0).integers(0, 16 * width, rows, np.int32)
    return Program(loss, params, {"tokens": tokens}, has_aux=True)


# --- programs ----------------------------------------------------------------------


def part_by_part(program, ready, cuts, count, executables, folder):
    """Loss, aux and mean gradients, one part after another."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(program.params)]
    spill = Spill([folder], waiting(dict.fromkeys(ready.gradient_pieces, 1), 1 << 30))
    sums, means, results = Sums(count, spill), {}, []
    runner = Runner(ready.plan_of(cuts), executables)
    for number, part in enumerate(parts_of(program.batch, count)):

        def hand_out(piece, gradient, is_last=number == count - 1):
            if is_last:
                means.update(sums.means([(piece, gradient)]))
            else:
                sums.add([(piece, gradient)])

        results.append(runner(part, in_memory(leaves), hand_out))
    spill.close()
    return together(results, [1.0] * len(results)), means


def layer_by_layer(program, plan, executables):
    """The same in layer order; each gradient comes once."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(program.params)]
    means = {}

    def hand_out(piece, gradient):
        assert piece not in means
        means[piece] = np.asarray(gradient)

    found = Runner(plan, executables)(program.batch, in_memory(leaves), hand_out)
    return found, means


QUICK = {"equinox_mlp"}
UNDIVIDED = ("nnx_batch_norm", "conv_batch_norm", "micro_batches")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", family([name for name in ZOO if name not in UNDIVIDED], short=QUICK)
)
def test_bits_are_those_of_one_part_after_another(name, tmp_path):
    program = ZOO[name]()
    num_rows = max(x.shape[0] for x in jax.tree.leaves(program.batch) if x.ndim)
    for count, policy in ((min(4, num_rows), "recompute"), (2, "keep")):
        part = first_part(program.batch, count)
        ready = prepare(program.loss, program.params, part, has_aux=program.has_aux)
        cuts = ready.plan(smallest_bytes(ready) * 5 // 4).cuts
        executables = {}
        expected = part_by_part(program, ready, cuts, count, executables, tmp_path)
        plan = replace(ready, num_parts=count).plan_of(cuts, policy)
        found = layer_by_layer(program, plan, executables)
        assert found[1].keys() == expected[1].keys()
        means = [expected[1][piece] for piece in found[1]]
        assert [x.dtype for x in found[1].values()] == [x.dtype for x in means]
        assert_same_bits((found[0], [*found[1].values()]), (expected[0], means))


def test_a_segment_runs_for_all_parts_before_the_next_one():
    program = tied()
    ready = prepared(program, 3)
    plan = ready.plan(smallest_bytes(ready) * 5 // 4)
    calls, programs = plan.calls.calls, plan.programs
    early = programs.num_early
    assert 1 < early < len(programs.forward)
    names = [(call.program.name, call.part) for call in calls if call.is_forward]
    expected = [(f"forward {k}", part) for k in range(early) for part in range(3)]
    late = range(early, len(programs.forward))
    expected += [(f"forward {k}", part) for part in range(3) for k in late]
    assert names == expected
    # Scores of one part at a time.
    wide = [one for one in plan.calls.lives.values() if one.aval.shape == (4, 512)]
    assert wide
    assert all(one.reads[-1] - one.made < 2 * len(late) + 2 for one in wide)
    # A gradient is handed out once, and nothing is read between calls of a segment.
    given = [piece for call in calls for piece, _ in call.gradients]
    assert sorted(map(str, given)) == sorted(map(str, ready.gradient_pieces))
    uses = [call.pieces for call in calls]
    reads = [fetch.unit for fetch in fetches_of(uses)]
    assert max(map(reads.count, reads)) == 2


def prepared(program, count):
    part = first_part(program.batch, count)
    ready = prepare(program.loss, program.params, part, has_aux=program.has_aux)
    return replace(ready, num_parts=count)


# --- with a store ------------------------------------------------------------------


def trained(step, program, num_steps=3):
    """Loads the program's params and runs steps; returns losses, aux and states."""
    step.load(program.params, batch=program.batch)
    results = [step(program.batch) for _ in range(num_steps)]
    step.store.wait()
    return numbers(results), states(step.store)


def assert_trained_alike(found, expected):
    assert_same_bits(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for key, array in expected[1].items():
        np.testing.assert_array_equal(found[1][key], array, err_msg=str(key))


@pytest.mark.long
@pytest.mark.parametrize(
    ("tx", "options"),
    [
        (ADAM, {}),
        (CLIPPED, {"policy": "keep"}),
        pytest.param(CLIPPED, {"resident": "8KiB"}, marks=pytest.mark.long),
        pytest.param(ADAM, {"policy": "offload"}, marks=pytest.mark.long),
    ],
    ids=["adam", "clipped", "resident", "offload"],
)
def test_training_is_that_of_parts(tx, options, streamed, monkeypatch):
    spill_beyond(monkeypatch, 4096)
    program = tied()
    parts = streamed(program, tx, "parts", micro_batches=3, order="parts", **options)
    expected = trained(parts, program)
    step = streamed(program, tx, "layers", micro_batches=3, order="layers", **options)
    assert_trained_alike(trained(step, program), expected)
    assert step.plan.cuts == parts.plan.cuts
    assert "3 parts of a batch in layer order" in str(step.plan)
    moved, planned = step.store.metrics.traffic, step.traffic
    assert moved.drive_read_bytes == planned.drive_read_bytes
    assert moved.drive_write_bytes == planned.drive_write_bytes
    # As many bytes as a step of a part alone.
    one = streamed(program, tx, "one", **options)
    part = first_part(program.batch, 3)
    one.load(program.params, batch=part)
    assert step.traffic == one.traffic
    assert parts.traffic.drive_read_bytes > step.traffic.drive_read_bytes
    for made in (step, parts, one):
        made.close()


@pytest.mark.long
def test_16_bit_gradients_add_up_in_32(streamed):
    program = tied()
    program = replace(program, params=half(program.params))
    found = [
        trained(streamed(program, ADAM, order, micro_batches=4, order=order), program)
        for order in ("parts", "layers")
    ]
    assert_trained_alike(*found)


@pytest.mark.long
def test_a_run_goes_on_in_the_other_order(streamed):
    program = tied()
    whole = streamed(program, ADAM, "whole", micro_batches=2, order="parts")
    expected = trained(whole, program, 4)
    losses = []
    for order in ("layers", "parts"):
        with streamed(program, ADAM, micro_batches=2, order=order) as step:
            losses += trained(step, program, 2)[0]
            found = states(step.store)
    assert_trained_alike((losses, found), expected)


@pytest.mark.long
def test_a_step_that_fails_leaves_the_store_at_the_step_before(streamed, monkeypatch):
    program = tied()
    plain = streamed(program, ADAM, "plain", **LAYERS)
    plain.load(program.params, batch=program.batch)
    expected = run(plain, program, 3)
    step = streamed(program, ADAM, **LAYERS)
    step.load(program.params, batch=program.batch)
    found = run(step, program, 1)
    put, calls = StoreSink.put, []

    def failing(self, piece, gradient):
        calls.append(piece)
        if len(calls) == 3:
            raise OSError("the drive is gone")
        put(self, piece, gradient)

    with monkeypatch.context() as patch:
        patch.setattr(StoreSink, "put", failing)
        with pytest.raises(OSError, match="the drive is gone"):
            step(program.batch)
    assert step.store.step == 1
    assert found + run(step, program, 2) == expected


@pytest.mark.long
def test_what_waits_may_be_on_a_drive(streamed, monkeypatch):
    monkeypatch.setattr(offload, "SMALL_BYTES", 1)
    program, tx = tied(), optax.sgd(0.1)
    parts = streamed(program, tx, "parts", micro_batches=3, order="parts")
    expected = trained(parts, program)
    real = Plan.fitted
    monkeypatch.setattr(Plan, "fitted", lambda self, _, temps: real(self, 0, temps))
    step = streamed(
        program, tx, "layers", micro_batches=3, order="layers", policy="offload"
    )
    assert_trained_alike(trained(step, program), expected)
    calls = step.plan.calls
    # Both what goes on forward, and a tied table's gradient.
    made = {calls.calls[one.written].program.name for one in calls.evictions.values()}
    assert {name.split()[0] for name in made} == {"forward", "backward"}
    moved = step.store.metrics.traffic
    assert moved.drive_read_bytes == step.traffic.drive_read_bytes
    assert moved.drive_write_bytes == step.traffic.drive_write_bytes


# --- chosen ------------------------------------------------------------------------

IN_LAYERS = "parts of a batch in layer order"


@pytest.mark.long
def test_an_order_is_chosen_that_moves_fewer_bytes(streamed):
    program = tied()
    made = [
        streamed(program, CLIPPED, order, micro_batches=3, order=order)
        for order in ("parts", "layers", "auto")
    ]
    foretold = made[2].dry_run(program.batch, program.params)
    parts, layers, chosen = (trained(step, program) for step in made)
    assert_trained_alike(chosen, parts)
    assert_trained_alike(chosen, layers)
    assert made[2].plan.cuts == made[0].plan.cuts
    assert IN_LAYERS in str(made[2].plan)
    assert made[2].traffic == made[1].traffic
    assert foretold.drive_read_bytes == made[2].traffic.drive_read_bytes
    assert foretold.drive_write_bytes == made[2].traffic.drive_write_bytes
    assert str(made[2].plan) == str(made[1].plan)
    # A run that has begun in an order keeps its cuts.
    made[2].close()
    with streamed(program, CLIPPED, "auto", micro_batches=3) as resumed:
        resumed.load(program.params, batch=program.batch)
        assert resumed.plan.cuts == made[0].plan.cuts


def with_many_parts(open_store, **options):
    """A step of 32 parts, whose values do not fit all at once; and its program."""
    program = tied(width=64, depth=6, rows=4096)
    step = jaxinf.stream(
        program.loss,
        ADAM,
        open_store(**CHUNKS),
        memory_bytes="20MiB",
        has_aux=True,
        micro_batches=32,
        **options,
    )
    return step, program


@pytest.mark.long
def test_parts_come_one_after_another_where_layers_do_not_fit(open_store):
    step, program = with_many_parts(open_store)
    step.load(program.params, batch=program.batch)
    assert IN_LAYERS not in str(step.plan)
    step.close()


def test_parts_come_one_after_another_where_nothing_is_read(streamed):
    program = tied()
    with streamed(program, ADAM, micro_batches=3, resident="params") as step:
        step.load(program.params, batch=program.batch)
        assert IN_LAYERS not in str(step.plan)


# --- refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "layers"}, 'order="layers": expected several parts of a batch'),
        (
            {"order": "rows", "micro_batches": 2},
            "order='rows': expected one of auto, parts",
        ),
    ],
)
def test_an_order_without_effect_is_refused(options, message, open_store):
    with pytest.raises(ValueError, match=message):
        jaxinf.stream(tied().loss, ADAM, open_store(), memory_bytes=1 << 30, **options)


@pytest.mark.long
def test_too_little_memory_says_how_many_parts_would_fit(open_store):
    step, program = with_many_parts(open_store, order="layers")
    with pytest.raises(BudgetError, match=r"memory_bytes: .* parts of this size would"):
        step.load(program.params, batch=program.batch)
    assert not step.store.exists
