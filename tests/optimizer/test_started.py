"""Updates that are started with a gradient and fetched later."""

import threading

import callback_form
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxinf
from jaxinf.optimizer.host_side import StartedUpdates

TIMEOUT_S = 60


@pytest.fixture
def store(tmp_path):
    with jaxinf.open_store(tmp_path / "store", memory_bytes=1000) as store:
        yield store


def test_gradients_that_wait_take_no_more_than_the_budget(store):
    started = StartedUpdates(store)
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


@pytest.mark.parametrize("value", [jnp.nan, 1.0])
def test_an_update_that_fails_or_is_of_another_step(open_store, monkeypatch, value):
    callback_form.use("start", monkeypatch)
    store = open_store()
    tx = jaxinf.smart_update(optax.adam(0.1), store)
    params = {"v": jnp.ones(9), "w": jnp.ones((3, 5))}
    state = tx.init(params)
    if value == 1.0:
        state = state._replace(step=state.step + 1)
    gradients = {"v": jnp.ones(9), "w": jnp.full((3, 5), value)}
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(jax.jit(tx.update)(gradients, state, params))
    expected = jaxinf.StaleStateError if value == 1.0 else jaxinf.NonFiniteGradientError
    with pytest.raises(expected):
        store.check()
    store.close()
    assert open_store().step == 0
