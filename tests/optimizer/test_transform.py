"""`smart_update` against plain optax: how it is called, odd leaves and gradients."""

import threading
from pathlib import Path

import callback_form
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from inject import at_each_call
from small_stores import same, steps, train

import jaxinf
from jaxinf.engine.step_runner import StepRunner
from jaxinf.optimizer.host_side import StartedUpdates

pytestmark = pytest.mark.optimized

INPUTS = jnp.asarray(np.random.default_rng(7).standard_normal((16, 33), np.float32))
TIMEOUT_S = 60
INTERRUPTED = Path(__file__).parents[1] / "programs" / "interrupted_steps.py"


def make_params(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w": jax.random.normal(keys[0], (33, 70)),
        "deep": (
            jax.random.normal(keys[1], (70, 5)),
            [jnp.zeros((5,)), jnp.asarray(1.5)],
        ),
        "none": None,
        "e": jnp.zeros((0, 4)),
    }
    return jax.tree.map(lambda x: x.astype(dtype), params)


def loss_of(params, number=0):
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    weights, (bias, scale) = params["deep"]
    hidden = jnp.tanh(INPUTS * (1 + number % 3) @ params["w"])
    return jnp.mean((scale * (hidden @ weights + bias) - 1.0) ** 2)


def scanned(tx, params, state):
    def step(carry, number):
        params, state = carry
        loss, gradients = jax.value_and_grad(loss_of)(params, number)
        updates, state = tx.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), loss

    return jax.lax.scan(step, (params, state), jnp.arange(6))


# --- how it is called -----------------------------------------------------------------


def test_eval_shape_has_no_side_effect(place):
    store = jaxinf.open_store(place / "store")
    tx = jaxinf.smart_update(optax.adamw(1e-3), store)
    state = jax.eval_shape(tx.init, make_params())
    jax.eval_shape(tx.update, make_params(), state, make_params())
    assert list(place.iterdir()) == []
    store.close()
    jax.eval_shape(lambda params: tx.init(params), make_params())  # not refused now


def test_init_under_jit_and_update_in_scan_with_donation(open_store):
    plain = optax.adamw(1e-2)
    tx = jaxinf.smart_update(plain, open_store())
    state = jax.jit(tx.init)(make_params())
    run = jax.jit(scanned, static_argnums=0, donate_argnums=(1, 2))
    (params, state), losses = run(tx, make_params(), state)
    _, expected = run(plain, make_params(), plain.init(make_params()))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert int(state.step) == 6
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(params))


def test_vmap_over_one_seed_is_the_run_itself(open_store):
    def run(tx):
        one = jax.tree.map(lambda x: x[None], make_params())
        seeds = jax.vmap(lambda params: scanned(tx, params, tx.init(params)))
        return jax.jit(seeds)(one)

    plain, store = optax.adam(1e-2), open_store()
    (params, state), losses = run(jaxinf.smart_update(plain, store))
    np.testing.assert_allclose(losses, run(plain)[1], rtol=1e-4)
    assert state.step.tolist() == [store.step] == [6]
    assert params["w"].shape == (1, 33, 70)


def test_read_params_are_as_free_to_move_as_the_given_ones(open_store):
    store = open_store()
    free = make_params()
    bound = jax.device_put(free, jax.devices()[0])
    jaxinf.smart_update(optax.adam(1e-3), store).init(free)
    for like, is_committed in ((free, False), (bound, True)):
        read = jax.tree.leaves(store.params(like=like))
        assert all(leaf.committed == is_committed for leaf in read)


@pytest.mark.parametrize("how", ["wait", "checkpoint", "params"])
def test_what_is_dispatched_is_waited_for(how, open_store):
    """With an update in a jit of its own, of which nothing has been read."""
    params, store = make_params(), open_store(how)
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    state, gradients = tx.init(params), jax.tree.map(jnp.ones_like, params)
    update = jax.jit(tx.update)
    for step in range(1, 9):
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        if how == "wait":
            store.wait()
            assert store.step == step
        elif how == "checkpoint":
            assert store.checkpoint() == str(step)
        else:
            same(store.params(like=params), params)


def test_small_leaves_come_in_one_call(open_store, monkeypatch):
    calls = []

    def note(steps, step, *requests):
        calls.append([request.leaf for request in requests])

    at_each_call(monkeypatch, StepRunner, "update", note)
    shapes = {"a": (7,), "b": (0, 3), "c": (), "long": (600, 500), "table": (128, 64)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    store = open_store()
    train(store, optax.adamw(1e-2), params, [params] * 3)
    store.wait()
    assert sorted(map(sorted, calls)) == [[0, 1, 2, 4]] * 3 + [[3]] * 3


def test_gradients_that_wait_take_no_more_than_the_budget(open_store):
    """Those of updates that are started, and fetched later."""
    started = StartedUpdates(open_store(memory_bytes=1000))
    gates = [threading.Event() for _ in range(3)]

    def start(number, num_bytes):
        gate = gates[number]
        started.start((number,), lambda: gate.wait(TIMEOUT_S), num_bytes)

    start(0, 5000)  # alone longer than the limit
    second = threading.Thread(target=start, args=(1, 400))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    gates[0].set()
    second.join(TIMEOUT_S)
    start(2, 600)
    gates[1].set()
    gates[2].set()
    for number in range(3):
        assert started.finish((number,))


@pytest.mark.long
@pytest.mark.parametrize("form", ["", "start"])
def test_an_interrupt_in_a_callback_waits_for_its_end(run_python, place, form):
    """A program's handler stays."""
    assert run_python(INTERRUPTED, place, CALLBACK_FORM=form).stdout == "done\n"


# --- odd leaves and gradients ---------------------------------------------------------


def test_leaves_that_are_no_numbers_stay_as_they_are(open_store):
    """As of a model of Equinox: a function, a text, and integers without gradients."""
    others = {"activation": jax.nn.relu, "name": "a", "positions": jnp.arange(6)}
    params, store, plain = {"w": INPUTS, **others}, open_store(), optax.adamw(1e-2)
    tx = jaxinf.smart_update(plain, store)
    gradients = {"w": INPUTS, **dict.fromkeys(others)}
    updates, state = tx.update(gradients, tx.init(params), params)
    expected, _ = plain.update(INPUTS, plain.init(INPUTS), INPUTS)
    found = np.asarray(updates["w"])
    np.testing.assert_allclose(found, np.asarray(expected), rtol=1e-4)
    assert {leaf.name for leaf in store._manifest.leaves} == {"w"}
    read = store.params(like=params, state=state)
    assert (read["activation"], read["name"]) == (jax.nn.relu, "a")
    np.testing.assert_array_equal(read["positions"], others["positions"])


def adamw_bits(tx, others):
    def lines(number):
        return lambda params: jax.tree.map(
            lambda p: (p * 0.37 + number).astype(p.dtype), params
        )

    params = {"w": jnp.linspace(-1.0, 1.0, 4), **others}
    params, _ = steps(tx, params, map(lines, range(20)))
    return np.asarray(params["w"])


@pytest.mark.parametrize(
    ("others", "counts"),
    [({"empty": jnp.zeros((0, 3))}, True), ({"key": jax.random.PRNGKey(1)}, False)],
    ids=["without elements", "integers"],
)
def test_a_leaf_that_is_not_trained_changes_no_bit(open_store, others, counts):
    """In optax's program integers are a second use of what divides the moments."""
    tx = optax.adamw(1e-2)
    found = adamw_bits(jaxinf.smart_update(tx, open_store()), others)
    np.testing.assert_array_equal(found, adamw_bits(tx, others if counts else {}))


@pytest.mark.parametrize(
    ("durability", "compress", "callback"),
    [(2, None, "start"), ("step", jaxinf.top_k(0.5), "buffer")],
)
def test_a_missing_gradient_leaves_params_and_state_as_they_are(
    open_store, durability, compress, callback, monkeypatch
):
    callback_form.use(callback, monkeypatch)
    store = open_store(durability=durability)
    tx = jaxinf.smart_update(optax.adamw(1e-2), store, compress=compress)
    params = {"a": INPUTS, "b": INPUTS[:3]}
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(5):
        updates, state = update({"a": params["a"], "b": None}, state, params)
        params["a"] += updates["a"]
    store.wait(state)
    assert store.step == 5
    assert np.any(store.read("mu", "a"))
    assert not np.any(store.read("mu", "b"))
    np.testing.assert_array_equal(store.read("params", "b"), INPUTS[:3])


def test_a_frozen_leaf_causes_no_traffic(open_store):
    params = {"w": jnp.ones((100, 1000)), "b": jnp.zeros((1000,), jnp.bfloat16)}
    store = open_store()
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(3):
        gradients = {"w": None, "b": jnp.ones((1000,), jnp.bfloat16)}
        updates, state = update(gradients, state, params)
        assert updates["w"] is None
        params["b"] = (params["b"] + updates["b"]).astype(jnp.bfloat16)
        store.wait(state)
    traffic = store.metrics.traffic
    assert traffic.drive_write_bytes < 4 * params["w"].size
    assert traffic.link_down_bytes < params["w"].size
    # A later gradient finds moments that have waited, and counts that have not.
    updates, _ = update({"w": params["w"], "b": None}, state, params)
    expected = -0.01 * 0.1 / (1 - 0.9**4) / (np.sqrt(0.001 / (1 - 0.999**4)))
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-4)
