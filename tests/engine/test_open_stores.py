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
    (place / "link").symlink_to(place / "store")
    second = open_store("link")
    assert open_store() is second is first
    _, state = tx.update(PARAMS, state, PARAMS)
    second.wait(state)
    assert first.step == 1
    second.close()
    with pytest.raises(jaxinf.StoreClosedError, match="open it again"):
        _ = first.step
    with open_store() as third:
        assert third is not first
        jaxinf.close(place / "store")
        jaxinf.close(place / "store")
        with pytest.raises(jaxinf.StoreClosedError):
            third.check()


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
        return jaxinf.smart_update(optax.sgd(0.5), place / "store")

    shapes = jax.eval_shape(lambda p: make().init(p), PARAMS)
    state = jax.jit(lambda p: make().init(p))(PARAMS)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    updates, state = jax.jit(lambda *given: make().update(*given))(
        PARAMS, state, PARAMS
    )
    np.testing.assert_array_equal(updates["w"], -0.5)
    assert int(state.step) == 1
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
