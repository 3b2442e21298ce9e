"""Leaves of the params that are no floating-point arrays, and missing gradients."""

from collections.abc import Callable

import callback_form
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxinf

INPUTS = jnp.asarray(np.random.default_rng(7).standard_normal((16, 6), np.float32))


class Network(eqx.Module):
    """Layers, a function, a string, and integers that no gradient exists for."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear
    positions: jax.Array
    activation: Callable[[jax.Array], jax.Array]
    name: str

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.first = eqx.nn.Linear(6, 20, key=keys[0])
        self.second = eqx.nn.Linear(20, 2, key=keys[1])
        self.positions = jnp.arange(6)
        self.activation = jax.nn.relu
        self.name = "network"

    def __call__(self, x):
        hidden = self.activation(self.first(x[self.positions]))
        return self.second(hidden)


def train(tx, init, given):
    """Losses, model and state of a program in Equinox's style."""
    model = Network()
    state = tx.init(init(model))

    @eqx.filter_value_and_grad
    def loss_of(model):
        return jnp.mean((jax.vmap(model)(INPUTS) - 1.0) ** 2)

    @eqx.filter_jit
    def step(model, state):
        loss, gradients = loss_of(model)
        updates, state = tx.update(gradients, state, given(model))
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for _ in range(5):
        model, state, loss = step(model, state)
        losses.append(float(loss))
    return losses, model, state


def inexact(model):
    return eqx.filter(model, eqx.is_inexact_array)


def itself(model):
    return model


@pytest.mark.parametrize("init", [itself, inexact])
def test_equinox_models_train_whatever_is_filtered(open_store, init):
    store = open_store()
    tx = jaxinf.smart_update(optax.adamw(1e-2), store)
    losses, model, state = train(tx, init, itself)
    expected, plain, _ = train(optax.adamw(1e-2), inexact, inexact)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    np.testing.assert_array_equal(model.positions, plain.positions)
    read = store.params(like=model, state=state)
    assert eqx.tree_equal(read, model)
    names = {leaf.name for leaf in store._manifest.leaves}
    assert names == {"first/weight", "first/bias", "second/weight", "second/bias"}


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
