"""Training on emulated cards is training on the host, for what takes 1 / sqrt(x)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxinf

TARGET = {
    "w": jax.random.normal(jax.random.key(0), (300, 33)),
    "b": jax.random.normal(jax.random.key(1), (5,)),
}


def trained(path, tx, csd, dtype):
    """Params after each of five steps on a quadratic, and all that is stored."""
    target = jax.tree.map(lambda x: x.astype(dtype), TARGET)
    with jaxinf.open_store(path, csd=csd, master="stored") as store:
        wrapped = jaxinf.smart_update(tx, store)
        params = jax.tree.map(jnp.zeros_like, target)
        state = wrapped.init(params)

        @jax.jit
        def step(params, state):
            grads = jax.tree.map(jnp.subtract, params, target)
            updates, state = wrapped.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        steps = []
        for _ in range(5):
            params, state = step(params, state)
            steps += jax.tree.leaves(jax.device_get(params))
        store.wait()
        return steps + [
            np.asarray(store.read(s.name, leaf.name))
            for leaf in store.manifest.leaves
            for s in leaf.states
        ]


@pytest.mark.cards
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "tx",
    [optax.adagrad(0.1), optax.rmsprop(1e-2, momentum=0.9)],
    ids=["adagrad", "rmsprop"],
)
def test_roots_have_the_hosts_bits(tmp_path, tx, dtype):
    host = trained(tmp_path / "host", tx, "host", dtype)
    cards = trained(tmp_path / "cards", tx, "emulated", dtype)
    for one, other in zip(cards, host, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
