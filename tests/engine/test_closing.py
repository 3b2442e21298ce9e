"""Closing a store while JAX still computes: every step that was dispatched arrives."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from inject import at_each_call
from jax.experimental.buffer_callback import buffer_callback

import jaxinf
import jaxinf.engine.store
from jaxinf.errors import NonFiniteGradientError, StoreError

PARAMS = {"w": jnp.ones(1000), "b": jnp.ones(7)}


@jax.jit
def slowly(value):
    """Returns the value after a while, so that the program is ahead of JAX."""
    busy = jnp.ones((300, 300))
    busy = jax.lax.fori_loop(0, 300, lambda _, x: jnp.sin(x @ x), busy)
    return value + 0 * busy[0, 0]


@pytest.fixture
def gate():
    """A computation that ends when its event is set."""
    event = threading.Event()
    event.set()

    def hold(context, out, value):
        assert event.wait(60)
        np.asarray(out)[...] = np.asarray(value)

    held = jax.jit(buffer_callback(hold, jax.ShapeDtypeStruct((), np.float32)))
    gate = SimpleNamespace(event=event, value=lambda x: held(slowly(jnp.float32(x))))
    gate.value(0.0).block_until_ready()  # compiles
    event.clear()
    yield gate
    event.set()


@pytest.fixture
def opens_when_awaited(gate, monkeypatch):
    """Opens the gate when the store waits for dispatched computations, not before."""

    def open_soon():
        threading.Timer(0.1, gate.event.set).start()

    at_each_call(monkeypatch, jaxinf.engine.store, "wait_for_dispatched", open_soon)


def dispatch(store, scale, num_steps=5):
    tx = jaxinf.smart_update(optax.sgd(0.5), store)

    @jax.jit
    def step(params, state, scale):
        gradients = jax.tree.map(lambda p: scale * jnp.ones_like(p), params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(num_steps):
        params, state = step(params, state, scale)
    return params, state


@pytest.mark.parametrize("how", ["kept", "dropped", "raises"])
def test_steps_under_way_arrive(gate, opens_when_awaited, tmp_path, how):
    with (
        pytest.raises(ZeroDivisionError) if how == "raises" else nullcontext(),
        jaxinf.open_store(tmp_path) as store,
    ):
        left = dispatch(store, gate.value(1.0))
        if how == "dropped":
            del left
        assert not gate.event.is_set()
        if how == "raises":
            raise ZeroDivisionError
    with jaxinf.open_store(tmp_path) as store:
        assert store.step == 5
        np.testing.assert_array_equal(store.params(PARAMS)["w"], PARAMS["w"] - 2.5)


def test_a_step_that_fails_is_the_stores_own_error(gate, opens_when_awaited, tmp_path):
    store = jaxinf.open_store(tmp_path)
    left = dispatch(store, gate.value(np.nan), num_steps=2)
    with pytest.raises(NonFiniteGradientError, match="step 1: NaN or Inf"):
        store.close()
    del left
    with jaxinf.open_store(tmp_path) as store:
        assert store.step == 0


def test_close_in_a_callback_is_refused(tmp_path):
    with jaxinf.open_store(tmp_path) as store:
        dispatch(store, jnp.float32(1.0), num_steps=1)
        errors = []

        def in_callback(context, out, value):
            np.asarray(out)[...] = np.asarray(value)
            try:
                store.close()
            except StoreError as error:
                errors.append(str(error))

        held = buffer_callback(in_callback, jax.ShapeDtypeStruct((), np.float32))
        jax.jit(held)(slowly(jnp.float32(0))).block_until_ready()
        (error,) = errors
        assert f"{tmp_path}: close: expected a thread of the program's" in error
        assert store.step == 1


@pytest.mark.long
def test_a_process_that_has_not_used_jax_does_not_start_it(tmp_path, run_python):
    """A backend takes an accelerator's memory, and a fork after it hangs."""
    with jaxinf.open_store(tmp_path) as store:
        dispatch(store, jnp.float32(1.0), num_steps=1)
    program = """
import sys, jaxinf
from jaxinf import compat
with jaxinf.open_store(sys.argv[1]) as store:
    assert store.step == 1
print(compat.has_backend())
"""
    assert run_python(program, tmp_path).stdout == "False\n"
