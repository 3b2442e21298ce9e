"""Micro-batches: bits of one part after another, losses of the whole, refusals."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from inject import at_each_call, raising
from streaming_cases import (
    assert_same_bits,
    assert_same_states,
    planned_bytes,
    prepared,
    smallest_bytes,
    spill_beyond,
    trained,
)
from streaming_cases import streamed as streamed_plan
from zoo import ZOO, normal

import jaxinf
from jaxinf.engine.step_runner import StepRunner
from jaxinf.errors import StreamError
from jaxinf.streaming.micro_batches import combine_parts, first_part, parts_of
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.plan.compiled import Executables
from jaxinf.streaming.plan.cut_to_fit import cut_to_fit
from jaxinf.streaming.plan.order import make_plan

pytestmark = pytest.mark.optimized("long")

ADAM = optax.adam(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAM)


# --- programs ----------------------------------------------------------------------


def mean(*parts):
    """The mean of gradients, summed by NumPy in 32 bits at least."""
    wide = [x.astype(np.promote_types(x.dtype, np.float32)) for x in parts]
    return (functools.reduce(np.add, wide) / len(parts)).astype(parts[0].dtype)


def assert_bits_of_one_part_after_another(program, count, policy):
    ready = prepared(replace(program, batch=first_part(program.batch, count)))
    cuts = cut_to_fit(ready, smallest_bytes(ready) * 5 // 4).cuts
    plan, executables = make_plan(ready, cuts), Executables()
    parts = [
        streamed_plan(replace(program, batch=part), plan, executables)
        for part in parts_of(program.batch, count)
    ]
    *results, gradients = zip(*parts, strict=True)
    expected = combine_parts(list(zip(*results, strict=True)), [1.0] * count)
    plan, held = make_plan(ready, cuts, policy, count), []

    def note(values, _):
        held.append(sum(value.nbytes for value in values._held.values()))

    with pytest.MonkeyPatch.context() as patch:
        at_each_call(patch, Values, "before_call", note)
        loss, aux, found = streamed_plan(program, plan, executables)
    assert held == plan.value_bytes()
    assert_same_bits((loss, aux), expected)
    assert_same_bits(found, list(map(mean, *gradients)))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ZOO if name != "conv_batch_norm"])
def test_bits_are_those_of_one_part_after_another(name):
    program = ZOO[name]()
    num_rows = max(x.shape[0] for x in jax.tree.leaves(program.batch) if x.ndim)
    for count, policy in ((min(4, num_rows), "recompute"), (2, "keep")):
        assert_bits_of_one_part_after_another(program, count, policy)


def test_16_bit_gradients_add_up_in_32():
    program = ZOO["tied_and_unused"]()
    halves = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), program.params)
    assert_bits_of_one_part_after_another(replace(program, params=halves), 4, "keep")


@pytest.mark.long
@pytest.mark.parametrize(
    ("tx", "policy"), [(ADAM, "recompute"), (CLIPPED, "keep"), (ADAM, "offload")]
)
def test_a_step_moves_the_bytes_of_one_part(tx, policy, streamed, monkeypatch):
    spill_beyond(monkeypatch, 4096)
    program = ZOO["tied_and_unused"]()
    with streamed(program, tx, "plain", micro_batches=4) as plain:
        losses, expected = trained(plain, program)
    with streamed(program, tx, "other", micro_batches=4, policy=policy) as step:
        found_losses, found = trained(step, program)
        assert found_losses == losses
        assert_same_states(found, expected)
        assert "4 parts of a batch" in str(step.plan)
        with streamed(program, tx, "one", policy=policy) as one:
            one.load(program.params, batch=first_part(program.batch, 4))
            assert planned_bytes(step) == planned_bytes(one)


# --- losses of the whole batch -----------------------------------------------------

ROWS, WIDTH = 12, 32
X, Y = normal(2, ROWS, WIDTH), normal(3, ROWS, WIDTH)


def line(params, batch):
    """A mean over the elements that a mask names."""
    errors = (batch["x"] @ params["w"] - batch["y"]) ** 2
    return jnp.sum(batch["mask"] * errors) / jnp.maximum(jnp.sum(batch["mask"]), 1)


MASK = np.zeros((ROWS, WIDTH), np.float32)
MASK[:2], MASK[2:4, :1], MASK[8:, 5:] = 1, 1, 1  # the second of three parts has none
MASKED = {"x": X, "y": Y, "mask": MASK}
EVERYTHING = {**MASKED, "mask": np.ones_like(MASK)}
WEIGHT = {"w": normal(5, WIDTH, WIDTH) / 6}
MEMORY = {"memory_bytes": 256 << 20}


def number_of(part):
    return jnp.sum(part["mask"])


@pytest.fixture
def after_one(open_store):
    """Returns loss and params after a step of plain SGD, whose rate is 1."""
    numbers = itertools.count()

    def run(batch=MASKED, **options):
        tx = optax.sgd(1.0)
        if options.pop("in_memory", False):
            step = jaxinf.stream_in_memory(line, tx, **MEMORY, **options)
        else:
            store = open_store(f"store-{next(numbers)}")
            step = jaxinf.stream(line, tx, store, **MEMORY, **options)
        with step:
            step.load(WEIGHT, batch=batch)
            loss, _ = step(batch)
            return float(loss), np.asarray(step.params()["w"])

    return run


RUNS = [{}, {"in_memory": True}]


@pytest.mark.parametrize("how", RUNS, ids=["store", "memory"])
def test_a_step_of_parts_is_that_of_the_whole_batch(how, after_one):
    """With plain SGD, which sees the scale of gradients."""
    losses = []
    runs = (EVERYTHING, None), (EVERYTHING, number_of), (MASKED, number_of)
    for batch, weights in runs:
        loss, gradients = jax.value_and_grad(line)(WEIGHT, batch)
        expected = WEIGHT["w"] - gradients["w"]
        found_loss, found = after_one(batch, micro_batches=3, weights=weights, **how)
        assert found_loss == pytest.approx(float(loss), rel=1e-6)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        losses.append(found_loss)
    assert losses[0] == losses[1]  # equal weights change no bits


# --- refused, failed ------------------------------------------------------------------


ODD = {**MASKED, "y": normal(3, 4, 4)}


@pytest.mark.parametrize(
    ("options", "batch", "message"),
    [
        ({"weights": lambda part: part["mask"][0]}, MASKED, "finite number"),
        ({"weights": lambda part: -1.0}, MASKED, r"at least 0.*-1\.0"),
        ({"weights": lambda part: jnp.nan}, MASKED, r"finite.*nan"),
        ({"weights": lambda part: 0.0}, MASKED, "not all 0.*some do"),
        ({"weights": number_of, "micro_batches": 1}, MASKED, "weights: .*several"),
        ({"micro_batches": 0}, MASKED, "micro_batches=0: .* at least 1"),
        ({"micro_batches": 5}, MASKED, "that 5 divides, found mask"),
        ({}, ODD, r"found .*y of shape \(4, 4\)"),
        ({}, np.float32(1), "that 3 divides, found no arrays"),
    ],
)
def test_parts_that_cannot_be_are_refused(options, batch, message, after_one):
    with pytest.raises((StreamError, ValueError), match=message):
        after_one(batch, **{"micro_batches": 3} | options)


@pytest.mark.timeout(240)
def test_a_step_after_one_whose_updates_failed_has_room_for_its_params(
    open_store, monkeypatch
):
    def loss(params, x):
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    params = [normal(i, 256, 256) / 16 for i in range(24)]
    batch, options = np.ones((8, 256), np.float32), {"memory_bytes": 16 << 20}
    store = open_store(chunk_elements=1 << 16)
    step = jaxinf.stream(loss, ADAM, store, **options, micro_batches=2)
    step.load(params, batch=batch)
    with monkeypatch.context() as patch:
        patch.setattr(StepRunner, "update", raising(RuntimeError("given up")))
        with pytest.raises(RuntimeError, match="given up"):
            step(batch)
    np.testing.assert_allclose(step(batch)[0], loss(params, batch), rtol=1e-5)
