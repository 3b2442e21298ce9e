"""Micro-batches: losses and updates of the whole batch, failures, refusals."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import family
from zoo import normal

import jaxinf
from jaxinf.engine.steps import StepEngine
from jaxinf.errors import StreamError
from jaxinf.streaming.update.store_sink import StoreSink

pytestmark = pytest.mark.optimized("long")

CHUNKS = {"chunk_elements": 4096, "memory_bytes": 16 << 20}
ADAM = optax.adam(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAM)
ROWS, WIDTH, DEPTH = 12, 32, 4


def loss_fn(params, batch):
    x, means = jax.lax.scan(
        lambda x, w: (x + jnp.tanh(x @ w), jnp.mean(x)), batch["x"], params["layers"]
    )
    x = batch["scale"] * (x @ params["out"]) @ params["out"].T
    return jnp.mean((x - batch["y"]) ** 2), means


PARAMS = {"layers": normal(0, DEPTH, WIDTH, WIDTH) / 6, "out": normal(1, WIDTH, 8) / 3}
BATCH = {
    "x": normal(2, ROWS, WIDTH),
    "y": normal(3, ROWS, WIDTH),
    "scale": np.float32(0.5),
}


@pytest.fixture
def started(open_store):
    def make(name, tx=ADAM, params=PARAMS, **options):
        step = jaxinf.stream(
            loss_fn,
            tx,
            open_store(name, **CHUNKS),
            memory_bytes=256 << 20,
            has_aux=True,
            **options,
        )
        step.load(params, batch=BATCH)
        return step

    return make


def run(step, num_steps=3):
    return [float(step(BATCH)[0]) for _ in range(num_steps)]


def assert_near(one, other, **tolerance):
    for found, expected in zip(
        *(
            jax.tree.leaves(
                step.store.params(
                    like=step.plan.traced.params_tree.unflatten(step.plan.traced.params)
                )
            )
            for step in (one, other)
        ),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, **tolerance)


@pytest.mark.long
@pytest.mark.parametrize(
    ("tx", "count"),
    [pytest.param(ADAM, 2, marks=pytest.mark.long), (CLIPPED, 3)],
    ids=["adam", "clipped"],
)
def test_losses_are_those_of_the_whole_batch(tx, count, started):
    whole = started("whole", tx)
    parts = started("parts", tx, micro_batches=count)
    np.testing.assert_allclose(run(parts), run(whole), rtol=1e-5)
    assert_near(parts, whole, rtol=0, atol=1e-4)
    _, means = parts(BATCH)
    assert means.shape == (count, DEPTH)
    np.testing.assert_allclose(means.mean(axis=0), whole(BATCH)[1], atol=1e-4)


def line(params, batch):
    """A mean over the elements that a mask names."""
    errors = (batch["x"] @ params["w"] - batch["y"]) ** 2
    return jnp.sum(batch["mask"] * errors) / jnp.maximum(jnp.sum(batch["mask"]), 1)


MASK = np.zeros((ROWS, WIDTH), np.float32)
MASK[:2], MASK[2:4, :1], MASK[8:, 5:] = 1, 1, 1  # the second of three parts has none
MASKED = {"x": BATCH["x"], "y": BATCH["y"], "mask": MASK}
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
            return float(loss), np.asarray(step.params(WEIGHT)["w"])

    return run


RUNS = [{}, {"in_memory": True}]


@pytest.mark.parametrize("how", RUNS, ids=["store", "memory"])
@pytest.mark.parametrize("batch", [EVERYTHING, MASKED], ids=["alike", "unlike"])
def test_a_step_of_parts_is_that_of_the_whole_batch(batch, how, after_one):
    """With plain SGD, which sees the scale of gradients."""
    loss, gradients = jax.value_and_grad(line)(WEIGHT, batch)
    expected = WEIGHT["w"] - gradients["w"]
    weights = None if batch is EVERYTHING else number_of
    found_loss, found = after_one(batch, micro_batches=3, weights=weights, **how)
    assert found_loss == pytest.approx(float(loss), rel=1e-6)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", family(RUNS, short=RUNS[:1]), ids=["store", "memory"])
def test_equal_weights_change_no_bits(how, after_one):
    weighed = after_one(EVERYTHING, micro_batches=3, weights=number_of, **how)
    plain = after_one(EVERYTHING, micro_batches=3, **how)
    assert weighed[0] == plain[0]
    np.testing.assert_array_equal(weighed[1], plain[1])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (lambda part: part["mask"][0], r"a number for each part.*found \[\(32,\)\]"),
        (lambda part: -1.0, r"at least 0.*found \[-1\.0, -1\.0, -1\.0\]"),
        (lambda part: jnp.nan, r"finite.*found \[nan, nan, nan\]"),
        (
            lambda part: 0 * jnp.sum(part["mask"]),
            "not all 0.*something counts",
        ),
    ],
    ids=["array", "negative", "nan", "zeros"],
)
def test_weights_that_are_none_are_refused(weights, message, after_one):
    with pytest.raises(StreamError, match=message):
        after_one(micro_batches=3, weights=weights)


def test_weights_without_parts_are_refused(after_one):
    with pytest.raises(ValueError, match="weights: expected several parts"):
        after_one(weights=number_of)


def test_a_step_that_fails_leaves_the_store_at_the_step_before(started, monkeypatch):
    plain = started("plain", micro_batches=2)
    expected = run(plain)
    step = started("store", micro_batches=2)
    found = run(step, 1)
    put, calls = StoreSink.put, []

    def failing(self, piece, gradient):
        calls.append(piece)
        if len(calls) == 2:
            raise OSError("the drive is gone")
        put(self, piece, gradient)

    with monkeypatch.context() as patch:
        patch.setattr(StoreSink, "put", failing)
        with pytest.raises(OSError, match="the drive is gone"):
            step(BATCH)
    assert step.store.step == 1
    assert found + run(step, 2) == expected


@pytest.mark.parametrize(
    ("count", "batch", "message"),
    [
        (5, BATCH, r"micro_batches=5: expected .* that 5 divides, found x of shape"),
        (
            2,
            {**BATCH, "y": normal(3, 4, 4)},
            r"found y of shape \(4, 4\) beside others",
        ),
        (2, np.float32(1), "expected a batch to divide, found no arrays"),
    ],
)
def test_a_batch_that_it_does_not_divide_is_refused(count, batch, message, open_store):
    step = jaxinf.stream(
        loss_fn,
        ADAM,
        open_store(**CHUNKS),
        memory_bytes=256 << 20,
        has_aux=True,
        micro_batches=count,
    )
    with pytest.raises(StreamError, match=message):
        step.load(PARAMS, batch=batch)
    assert not step.store.exists


@pytest.mark.timeout(240)
def test_a_step_after_one_whose_updates_failed_has_room_for_its_params(
    open_store, monkeypatch
):
    def loss(params, x):
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def failing(self, *_):
        raise RuntimeError("given up")

    params = [normal(i, 256, 256) / 16 for i in range(24)]
    store = open_store(chunk_elements=1 << 16)
    step = jaxinf.stream(
        loss,
        optax.adam(1e-3),
        store,
        memory_bytes=16 << 20,
        micro_batches=2,
    )
    step.load(params, batch=np.ones((8, 256), np.float32))
    with monkeypatch.context() as patch:
        patch.setattr(StepEngine, "update", failing)
        with pytest.raises(RuntimeError, match="given up"):
            step(np.ones((8, 256), np.float32))
    first, _ = step(np.ones((8, 256), np.float32))
    np.testing.assert_allclose(first, loss(params, np.ones((8, 256))), rtol=1e-5)
