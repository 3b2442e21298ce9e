"""`init` and `update` under vmap, grad and pmap: refused at trace time, or one run."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxinf

pytestmark = pytest.mark.optimized

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 5000), "b": jnp.ones(3)}
GRADIENTS = jax.tree.map(jnp.sin, PARAMS)

ON_DEVICES = Path(__file__).parents[1] / "programs" / "updates_on_devices.py"


def stacked(tree, num):
    return jax.tree.map(lambda x: jnp.stack([x] * num), tree)


def vmapped(tx, state, inside):
    update = jax.vmap(inside(tx.update), in_axes=(0, None, None))
    update(stacked(GRADIENTS, 2), state, PARAMS)


def differentiated(tx, state, inside):
    def updated(gradients):
        updates, _ = tx.update(gradients, state, PARAMS)
        return sum(jnp.sum(u) for u in jax.tree.leaves(updates))

    jax.grad(inside(updated))(GRADIENTS)


@pytest.mark.parametrize("inside", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (vmapped, r"update is called in jax.vmap over 2 exam"),
        (differentiated, r"update is differentiated \(jax.grad, jax.j"),
    ],
)
def test_an_update_is_refused(open_store, call, message, inside):
    store = open_store()
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match=message):
        call(tx, state, inside)
    store.check()
    assert store.step == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda tx: jax.vmap(tx.init)(stacked(PARAMS, 2)),
            r"init is called in jax.vmap over 2 examples",
        ),
        (
            lambda tx: jax.grad(lambda params: tx.init(params).step * 1.0)(PARAMS),
            r"give init what jax.lax.stop_gradient",
        ),
    ],
)
def test_init_is_refused(open_store, place, call, message):
    tx = jaxinf.smart_update(optax.adam(1e-2), open_store())
    with pytest.raises(ValueError, match=message):
        call(tx)
    assert not (place / "store").exists()


def train(tx):
    """Trains like programs that vmap over seeds, with `init` and `update` inside."""

    def run(scale):
        params = jax.tree.map(lambda x: scale * x, PARAMS)

        def step(carry, _):
            params, state = carry
            gradients = jax.tree.map(jnp.sin, params)
            updates, state = tx.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), params["b"][0]

        return jax.lax.scan(step, (params, tx.init(params)), length=3)

    return run


def test_vmap_over_one_seed_is_the_run_itself(open_store):
    scales = jnp.full(1, 0.5)
    (wanted, _), losses = jax.jit(jax.vmap(train(optax.adam(1e-2))))(scales)
    store = open_store()
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    (params, state), first = jax.jit(jax.vmap(train(tx)))(scales)
    assert state.step.tolist() == [3]
    assert params["w"].shape == (1, 5000)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        (params, first),
        (wanted, losses),
    )
    assert store.step == 3


@pytest.mark.long
def test_pmap_and_shard_map(run_python, place):
    devices = "--xla_force_host_platform_device_count=4"
    result = run_python(ON_DEVICES, place / "store", XLA_FLAGS=devices, PJRT_NPROC="8")
    said = result.stdout.splitlines()
    assert len(said) == 3
    assert "update is called in jax.pmap or jax.shard_map over {'i': 4}" in said[0]
    assert "init is called in jax.pmap" in said[1]
    assert "update is called in jax.pmap or jax.shard_map over {'d': 4}" in said[2]
