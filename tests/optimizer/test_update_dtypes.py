"""Updates of 16-bit params have the gradient's dtype, and lose nothing over time."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxinf

pytestmark = pytest.mark.optimized

SIZE = 5000


def numbers(seed, dtype, scale=1.0):
    return (scale * jax.random.normal(jax.random.key(seed), (SIZE,))).astype(dtype)


def steps_of(tx):
    """A jitted step; the update is applied in another computation, as it is given."""
    update = jax.jit(tx.update)

    def step(params, state, gradients):
        updates, state = update(gradients, state, params)
        assert updates["w"].dtype == params["w"].dtype
        return jax.jit(optax.apply_updates)(params, updates), state

    return step


def bounds_of(store):
    record = json.loads((store.path / "current" / "commit.json").read_text())
    return {
        name: np.frombuffer(bytes.fromhex(text), ">f4")[0]
        for name, text in record.get("inexact", {}).items()
    }


def differences(store, params):
    """Params less the rounded master; at most what the record says."""
    jax.block_until_ready(params)
    store.wait()
    held = np.asarray(store.params(like=params)["w"], np.float64)
    found = np.abs(np.asarray(params["w"], np.float64) - held)
    assert found.max() <= bounds_of(store).get("w", 0.0)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "scale"), [(jnp.bfloat16, 1e-2), (jnp.float16, 1e-4)]
)
def test_small_updates_are_exact(tmp_path, dtype, scale):
    """No element changes its sign or loses half of its magnitude."""
    params = {"w": jnp.abs(numbers(0, dtype)) + jnp.ones((), dtype)}
    with jaxinf.open_store(tmp_path / "store") as store:
        tx = jaxinf.smart_update(optax.sgd(scale), store)
        step, state = steps_of(tx), tx.init(params)
        for seed in range(1, 9):
            params, state = step(params, state, {"w": numbers(seed, dtype)})
            assert not differences(store, params).any()
            assert not bounds_of(store)


@pytest.mark.long
@pytest.mark.parametrize(("scale", "dtype"), [(0.7, jnp.bfloat16), (30.0, jnp.float16)])
def test_huge_updates_are_a_rounding_away_until_the_next(tmp_path, dtype, scale):
    params = {"w": numbers(0, dtype)}
    plain = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    path = tmp_path / "store"
    tx = jaxinf.smart_update(optax.sgd(scale), path)
    step, state = steps_of(tx), tx.init(params)
    store = jaxinf.store_of(path)
    for seed in range(1, 6):
        gradients = {"w": numbers(seed, dtype)}
        before = np.abs(np.asarray(params["w"], np.float64))
        params, state = step(params, state, gradients)
        plain = optax.apply_updates(
            plain, jax.tree.map(lambda g: -scale * g.astype(jnp.float32), gradients)
        )
        found = differences(store, params)
        np.testing.assert_array_equal(store.read("params", "w"), plain["w"])
        # One rounding of the update, whose magnitude is at most the sum of both.
        most = before + np.abs(np.asarray(plain["w"]))
        assert (found <= most * float(jnp.finfo(dtype).eps)).all()
    assert found.any()
    params, state = step(params, state, {"w": jnp.zeros((SIZE,), dtype)})
    assert np.median(differences(store, params)) == 0
    store.close()
    # The run goes on with params that differ from the store's, and not with others.
    tx = jaxinf.smart_update(optax.sgd(scale), path)
    state, gradients = tx.init(params), {"w": numbers(7, dtype)}
    wrong = {"w": params["w"] + jnp.ones((), dtype)}
    with pytest.raises(jaxinf.StoreMismatchError, match="the params are not those"):
        tx.update(gradients, state, wrong)
    jaxinf.close(path)
    tx = jaxinf.smart_update(optax.sgd(scale), path)
    params, state = steps_of(tx)(params, tx.init(params), gradients)
    differences(jaxinf.store_of(path), params)
    jaxinf.close(path)


def test_float32_updates_reach_the_rounded_master(tmp_path):
    params = {"w": numbers(0, jnp.bfloat16)}
    with jaxinf.open_store(tmp_path / "store") as store:
        tx = jaxinf.smart_update(optax.sgd(0.7), store, updates="float32")
        state = tx.init(params)
        for seed in range(1, 4):
            gradients = {"w": numbers(seed, jnp.bfloat16)}
            updates, state = jax.jit(tx.update)(gradients, state, params)
            assert updates["w"].dtype == jnp.float32
            params = optax.apply_updates(params, updates)
            assert not differences(store, params).any()
    # Those of gradients of another dtype are in float32, too.
    params = {"w": numbers(0, jnp.bfloat16), "x": numbers(0, jnp.float32)}
    tx = jaxinf.smart_update(optax.sgd(0.7), tmp_path / "other")
    gradients = {"w": numbers(1, jnp.float32), "x": numbers(1, jnp.bfloat16)}
    updates, _ = jax.jit(tx.update)(gradients, tx.init(params), params)
    assert {leaf.dtype for leaf in updates.values()} == {jnp.dtype(jnp.float32)}
    jaxinf.close(tmp_path / "other")


def test_a_step_is_skipped_by_cond(tmp_path):
    params = {"w": numbers(0, jnp.float16)}
    with jaxinf.open_store(tmp_path / "store") as store:
        tx = jaxinf.smart_update(optax.adam(1e-2), store)
        state = tx.init(params)

        @jax.jit
        def step(params, state, gradients, ok):
            updates, state = jax.lax.cond(
                ok,
                lambda: tx.update(gradients, state, params),
                lambda: (jax.tree.map(jnp.zeros_like, gradients), state),
            )
            return optax.apply_updates(params, updates), state

        for number, ok in enumerate((True, False, False, True)):
            old, gradients = params, {"w": numbers(number, jnp.float16)}
            params, state = step(params, state, gradients, ok)
            assert bool(jnp.all(old["w"] == params["w"])) != ok
        store.wait(state)
        assert store.step == int(state.step) == 2
        differences(store, params)
