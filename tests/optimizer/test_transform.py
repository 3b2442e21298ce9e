"""`smart_update` against plain optax: in jit, scan, chains, accumulation and Flax."""

from pathlib import Path

import callback_form
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxinf

pytestmark = pytest.mark.optimized

INPUTS = jnp.asarray(np.random.default_rng(7).standard_normal((16, 33), np.float32))

WITHOUT_CLOSE = Path(__file__).parents[1] / "programs" / "store_without_close.py"


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


def loss_of(params, inputs=INPUTS):
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    weights, (bias, scale) = params["deep"]
    hidden = jnp.tanh(inputs @ params["w"])
    return jnp.mean((scale * (hidden @ weights + bias) - 1.0) ** 2)


def train(tx, params, num_steps):
    """Returns losses, params and state after some jitted steps."""
    state = tx.init(params)

    @jax.jit
    def step(params, state, inputs):
        loss, gradients = jax.value_and_grad(loss_of)(params, inputs)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for number in range(num_steps):
        params, state, loss = step(params, state, INPUTS * (1 + number % 3))
        losses.append(float(loss))
    return losses, params, state


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_eval_shape_has_no_side_effect(place):
    store = jaxinf.open_store(place / "store")
    tx = jaxinf.smart_update(optax.adamw(1e-3), store)
    state = jax.eval_shape(tx.init, make_params())
    assert state.step.shape == ()
    jax.eval_shape(tx.update, make_params(), state, make_params())
    assert not store.exists
    assert list(place.iterdir()) == []
    store.close()


def test_init_under_jit_and_update_in_scan_with_donation(open_store):
    tx = jaxinf.smart_update(optax.adamw(1e-2), open_store())
    expected, _, _ = train(optax.adamw(1e-2), make_params(), 6)
    state = jax.jit(tx.init)(make_params())

    def body(carry, number):
        params, state = carry
        inputs = INPUTS * (1 + number % 3)
        loss, gradients = jax.value_and_grad(loss_of)(params, inputs)
        updates, state = tx.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), loss

    @jax.jit
    def run(params, state):
        return jax.lax.scan(body, (params, state), jnp.arange(6))

    run = jax.jit(run, donate_argnums=(0, 1))
    (params, state), losses = run(make_params(), state)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert int(state.step) == 6
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(params))


@pytest.mark.long
def test_both_kinds_of_callbacks_give_the_same_bits(open_store, monkeypatch):
    results = []
    for kind in ("buffer", "start"):
        callback_form.use(kind, monkeypatch)
        tx = jaxinf.smart_update(optax.adamw(1e-2), open_store(kind))
        results.append(train(tx, make_params(jnp.bfloat16), 4)[:2])
    assert_same(*results)


@pytest.mark.long
def test_a_script_that_never_closes_loses_nothing(place, run_python, open_store):
    run_python(WITHOUT_CLOSE, place / "store")
    store = open_store()
    assert store.step == 3
    params = store.params(like={"w": jnp.ones((1000, 100))})
    np.testing.assert_allclose(params["w"], 0.97, rtol=1e-3)


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
            assert_same(store.params(like=params), params)
