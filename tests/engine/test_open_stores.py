"""One process, one path, one store."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxinf

PARAMS = {"w": jnp.ones((40, 30))}


def test_a_second_opening_gets_the_same_store(open_store, place):
    first = open_store()
    tx = jaxinf.smart_update(optax.adam(1e-2), first)
    state = tx.init(PARAMS)
    second = open_store()
    assert second is first
    link = place / "link"
    link.symlink_to(place / "store")
    assert open_store("link") is first
    _, state = tx.update(PARAMS, state, PARAMS)
    second.wait(state)
    assert second.step == first.step == 1


def test_closing_one_closes_all(open_store, place):
    first, second = open_store(), open_store()
    jaxinf.smart_update(optax.adam(1e-2), first).init(PARAMS)
    second.close()
    second.close()
    with pytest.raises(jaxinf.StoreClosedError, match="open it again"):
        _ = first.step
    with open_store() as third:
        assert third.step == 0
        assert third is not first
        jaxinf.close(place / "store")
        jaxinf.close(place / "store")
        with pytest.raises(jaxinf.StoreClosedError):
            third.check()


def test_store_of_a_path(open_store, place):
    tx = jaxinf.smart_update(optax.adam(1e-2), place / "store")
    state = tx.init(PARAMS)
    _, state = tx.update(PARAMS, state, PARAMS)
    store = jaxinf.store_of(place / "store")
    store.wait(state)
    assert store.step == 1
    assert store.checkpoint() == "1"
    jaxinf.close(place / "store")
    with pytest.raises(ValueError, match=r"is open in this process, found "):
        jaxinf.store_of(place / "store")


def test_options_of_the_open_store(open_store, place):
    first = open_store(memory_bytes=1 << 20, durability=2)
    assert open_store(durability=2) is first
    for options, message in (
        ({"memory_bytes": 1 << 21}, "memory_bytes=2097152: the store is open"),
        ({"durability": "step"}, r"with durability=2, .*leave it out, or close"),
        ({"csds": [place]}, "csds="),
        ({"restore": "best"}, "restore='best'"),
        ({"csd": "emulated"}, "csd="),
    ):
        with pytest.raises(ValueError, match=message):
            open_store(**options)
    first.close()


def test_factories_called_in_init_and_in_update(place):
    """Some programs make their optimizer wherever they need it."""

    def make():
        return jaxinf.smart_update(optax.adam(1e-2), place / "store")

    @jax.jit
    def step(params, state):
        updates, state = make().update(params, state, params)
        return optax.apply_updates(params, updates), state

    shapes = jax.eval_shape(lambda p: make().init(p), PARAMS)
    state = jax.jit(lambda p: make().init(p))(PARAMS)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    params, plain = PARAMS, optax.adam(1e-2)
    expected, plain_state = PARAMS, plain.init(PARAMS)
    for _ in range(3):
        params, state = step(params, state)
        updates, plain_state = plain.update(expected, plain_state, expected)
        expected = optax.apply_updates(expected, updates)
    found, wanted = (np.asarray(tree["w"]) for tree in (params, expected))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert int(state.step) == 3
    jaxinf.close(place / "store")


def test_a_store_that_failed_is_opened_anew(place, caplog):
    tx = jaxinf.smart_update(optax.adam(1e-2), place / "store")
    state = tx.init(PARAMS)
    with pytest.raises(jaxinf.NonFiniteGradientError):
        tx.update({"w": jnp.full((40, 30), jnp.nan)}, state, PARAMS)
    tx = jaxinf.smart_update(optax.adam(1e-2), place / "store")
    assert "was stopped by NonFiniteGradientError" in caplog.text
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert int(state.step) == 1
    jaxinf.close(place / "store")
