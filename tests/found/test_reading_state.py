"""What the state in JAX says, what a store gives back, and what a step may carry."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxinf

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 64), "b": jnp.ones(3)}
CARRIED = {"mean": jnp.linspace(0.0, 1.0, 5), "key": jax.random.key(3), "n": 7}


def take_steps(tx, num_steps, **arguments):
    params, state = PARAMS, tx.init(PARAMS)
    update, apply = jax.jit(tx.update), jax.jit(optax.apply_updates)
    for _ in range(num_steps):
        updates, state = update(params, state, params, **arguments)
        params = apply(params, updates)
    return params, state


def test_a_function_of_stored_state_is_refused_with_the_line_to_write(open_store):
    _, state = take_steps(jaxinf.smart_update(optax.adam(1e-2), open_store()), 2)
    with pytest.raises(jaxinf.JaxinfError, match=r"store\.state\(like="):
        optax.tree.norm(optax.tree.get(state, "mu"))


def test_a_step_carries_further_arrays(open_store):
    store = open_store()
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    state = tx.init(PARAMS)
    _, state = tx.update(PARAMS, state, PARAMS, carry=CARRIED)
    store.wait(state)
    store.close()
    found = open_store().carried(like=CARRIED)
    np.testing.assert_array_equal(found["mean"], CARRIED["mean"])
    same = jax.random.key_data(found["key"]) == jax.random.key_data(CARRIED["key"])
    assert same.all()
    assert int(found["n"]) == 7


def test_what_a_step_carries_goes_with_its_checkpoint(open_store):
    store = open_store()
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    params, state = PARAMS, tx.init(PARAMS)
    for number in range(3):
        carry = {"n": jnp.int32(number)}
        updates, state = tx.update(PARAMS, state, params, carry=carry)
        params = optax.apply_updates(params, updates)
        if number == 1:
            store.checkpoint("two", state=state)
    store.close()
    with open_store(restore="two") as back:
        assert int(back.carried(like={"n": jnp.int32(0)})["n"]) == 1


def test_a_streamed_step_carries_what_its_loss_gives(open_store):
    def loss(params, batch):
        mean = jnp.mean(batch)
        return jnp.mean((batch @ params["w"] - 1) ** 2), {"mean": mean}

    store = open_store()
    step = jaxinf.stream(
        loss,
        optax.sgd(0.1),
        store,
        memory_bytes=256 << 20,
        has_aux=True,
        carry=lambda aux: aux,  # pyright: ignore
    )
    batch = np.ones((2, 64), np.float32)
    step.load({"w": PARAMS["w"]}, batch=batch)
    step(batch)
    assert float(store.carried(like={"mean": jnp.float32(0)})["mean"]) == 1
