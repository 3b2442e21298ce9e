"""Averages of params near storage: bits, traffic, ways to read them, refusals."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
import zarr
from small_stores import same, train

import jaxinf
from jaxinf.cli import main
from jaxinf.errors import StoreMismatchError

pytestmark = pytest.mark.optimized

SHAPES = {"w": (70, 100), "b": (5,)}
ONE = {"w": (70, 100)}
DECAY = 0.9
UPDATE = jax.jit(optax.incremental_update, static_argnums=2)
UPDATE_BY_ARRAY = jax.jit(optax.incremental_update)


def new_params(shapes=SHAPES, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
        for name, shape in shapes.items()
    }


def like(params, dtype=np.float32):
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), params)


def trained(store, average, num_steps, *, tx=None, params=None, first=1, seen=None):
    numbers = range(first, first + num_steps)
    left = iter(numbers)

    def sines(number):
        return lambda params: jax.tree.map(lambda p: jnp.sin(3 * p + number), params)

    def each(_, state):
        store.wait(state)
        if seen is not None:
            seen(next(left))

    tx = optax.adamw(1e-2) if tx is None else tx
    params = new_params() if params is None else params
    return train(store, tx, params, map(sines, numbers), each=each, average=average)[2]


def rising(count):
    return jnp.minimum(0.999, (1 + count) / (10 + count))


def by_function(decay):
    def updated(params, average, number):
        step_size = 1 - jnp.asarray(decay(jnp.int32(number - 1)), jnp.float32)
        return UPDATE_BY_ARRAY(params, average, step_size)

    return updated


def by_number(params, average, number):
    return UPDATE(params, average, 1 - DECAY)


CASES = {
    "number": ({"decay": DECAY}, None, by_number),
    "function": ({"decay": rising}, None, by_function(rising)),
    "every": (
        {"decay": DECAY, "every": 2},
        None,
        lambda p, e, n: e if n % 2 else by_number(p, e, n),
    ),
    "emissions": (
        {"decay": DECAY},
        optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2),
        lambda p, e, n: e if n % 2 else by_number(p, e, n),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "number" else pytest.mark.long)
        for name in CASES
    ],
)
def test_bits_are_those_of_optax(name, open_store):
    arguments, tx, expected = CASES[name]
    store, params = open_store(), new_params()
    average = params

    def seen(number):
        nonlocal average
        found = store.params(like(params), average=True)
        average = expected(store.params(like(params)), average, number)
        same(found, average)

    trained(store, jaxinf.ema(**arguments), 6, tx=tx, seen=seen)
    assert np.any(np.asarray(average["w"]) != np.asarray(params["w"]))


@pytest.mark.long
def test_a_debiased_average_is_that_of_a_moment(open_store):
    store, total = open_store(), 0.0

    def seen(number):
        nonlocal total
        total = DECAY * total + (1 - DECAY) * store.read("params", "w")

    trained(store, jaxinf.ema(DECAY, debias=True), 5, seen=seen)
    expected = total / (1 - DECAY**5)
    np.testing.assert_allclose(store.read("average", "w"), expected, rtol=2e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decay": 1.1}, r"decay=1.1: expected a number from 0 to 1"),
        ({"decay": "0.9"}, "a number or a function"),
        ({"decay": 0.9, "every": 0}, "every=0"),
        ({"decay": 0.9, "form": "int8"}, "form='int8'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        jaxinf.ema(**arguments)


@pytest.mark.long
def test_other_averages_than_the_store_s_are_refused(open_store):
    trained(plain := open_store("plain"), None, 1)
    with pytest.raises(StoreMismatchError, match="expected an average of the params"):
        plain.params(like(new_params()), average=True)
    trained(open_store("bf16"), jaxinf.ema(DECAY, form="bf16"), 1)
    for name, average, message in (
        ("plain", jaxinf.ema(DECAY), "in the form .fp32., found .none."),
        ("bf16", None, "found .bf16.; .*store.load"),
        ("bf16", jaxinf.ema(DECAY), "found .bf16.; give smart_update"),
    ):
        store = open_store(name)
        with pytest.raises(StoreMismatchError, match=message):
            trained(store, average, 1)


def test_other_tools_read_it(place, capsys):
    path = place / "store"
    with jaxinf.open_store(path) as store:
        trained(store, jaxinf.ema(DECAY), 2)
        average = {name: store.read("average", name) for name in SHAPES}
        assert np.any(average["w"] != store.read("params", "w"))
    group = zarr.open_group(path / "current", mode="r")
    np.testing.assert_array_equal(group["average.w"], average["w"])
    with ocp.StandardCheckpointer() as reader:
        held = reader.restore(path / "current")
    np.testing.assert_array_equal(held["average"]["w"], average["w"])
    tensors = place / "tensors"
    words = ["checkpoint", "export", str(path), str(tensors), "--average"]
    assert not main([*words, "--format", "safetensors"])
    same(safetensors.numpy.load_file(tensors / "model.safetensors"), average)
    capsys.readouterr()
    assert not main(["inspect", str(path), "--json"])
    assert "average" in json.dumps(json.loads(capsys.readouterr().out))


@pytest.mark.long
def test_resumed_is_uninterrupted(open_store):
    average = jaxinf.ema(rising, every=2, form="bf16")
    whole, parts = open_store("whole"), open_store("parts", durability=3)
    trained(whole, average, 5, params=new_params(ONE))
    trained(parts, average, 3, params=new_params(ONE))
    parts.close()
    parts = open_store("parts", durability=3)
    state = trained(parts, average, 2, params=new_params(ONE), first=4)
    assert int(state.average_count) == 5
    for name in ("params", "average"):
        same(parts.read(name, "w"), whole.read(name, "w"))


@pytest.mark.long
def test_streaming_updates_and_evaluates_it(open_store):
    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"] + params["b"]) ** 2)

    params = new_params({"w": (64, 80), "b": (80,)})
    batch = jnp.ones((2, 64))
    average, store = params, open_store()
    with jaxinf.stream(
        loss_fn,
        optax.adam(1e-2),
        store,
        memory_bytes=256 << 20,
        average=jaxinf.ema(DECAY),
    ) as step:
        step.load(params, batch=batch)
        for number in range(3):
            step(batch)
            average = by_number(store.params(params), average, number)
    store = open_store()
    same(store.params(params, average=True), average)
    f = jaxinf.stream_function(loss_fn, store, memory_bytes=256 << 20, average=True)
    np.testing.assert_allclose(f(batch), loss_fn(average, batch), rtol=1e-6)
    f.close()
