"""Params of safetensors files begin a store, by their exact names."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

import jaxinf
from jaxinf.errors import ExchangeError
from jaxinf.exchange import read_params


def make_params(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "h": [
            {"kernel": jax.random.normal(keys[0], (8, 33), dtype)},
            {"kernel": jax.random.normal(keys[1], (33, 16), dtype)},
        ],
        "out": jax.random.normal(keys[2], (16,), dtype),
    }


def save(path, params, place=""):
    """Saves params as safetensors, with names of keys joined by a dot."""
    arrays = {
        place + ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in keys): x
        for keys, x in jax.tree_util.tree_leaves_with_path(params)
    }
    path.mkdir()
    held = {name: np.asarray(array) for name, array in arrays.items()}
    save_file(held, path / "model.safetensors")
    return path


def equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_params_become_an_exact_master(tmp_path, open_store, dtype):
    """And a state that is computed from params is of what was read."""
    params, store = make_params(dtype), open_store()
    source = save(tmp_path / "saved", params, "model.params.")
    like = jax.eval_shape(lambda: params)
    found = read_params(source, like, place="model/params")
    jaxinf.smart_update(optax.contrib.schedule_free_adamw(1e-2), store).init(found)
    equal(store.params(like=params), params)
    equal(store.read("z", "out"), params["out"].astype(jnp.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_values_are_rounded_to_the_params_dtype(tmp_path, dtype):
    wide = np.random.default_rng(0).standard_normal(99)
    save_file({"w": wide}, tmp_path / "saved.safetensors")
    like = {"w": jax.ShapeDtypeStruct((99,), dtype)}
    found = read_params(tmp_path / "saved.safetensors", like)["w"].read()
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, wide.astype(np.float32).astype(dtype))
    if dtype == jnp.float16:
        save_file({"w": wide * 1e6}, tmp_path / "saved.safetensors")
        with pytest.raises(ExchangeError, match=r"w: expected values that float16 ho"):
            read_params(tmp_path / "saved.safetensors", like)["w"].read()


# --- refusals ----------------------------------------------------------------------


def test_everything_wrong_is_in_one_error(tmp_path):
    params = make_params()
    params["h"][0]["kernel"] = jnp.zeros((8, 34))
    params["h"][1]["kernel"] = jnp.zeros((33, 16), jnp.int32)
    del params["out"]
    save(tmp_path / "saved", params, "params.")
    with pytest.raises(ExchangeError) as caught:
        read_params(tmp_path / "saved", make_params(), place="params")
    text = str(caught.value)
    assert "params.out: missing" in text
    assert "params.h.0.kernel: (8, 34), in the params (8, 33)" in text
    assert "params.h.1.kernel: int32, in the params float32" in text
    with pytest.raises(ExchangeError, match=r'out: missing[^.]*\.[\s\S]*place="NAME"'):
        read_params(tmp_path / "saved", make_params())


def test_no_safetensors(tmp_path):
    with pytest.raises(ExchangeError, match=r"nothing: expected .* found nothing"):
        read_params(tmp_path / "nothing", make_params())
    with pytest.raises(ExchangeError, match=r"~nosuch/a: expected .* found nothing"):
        read_params("~nosuch/a", make_params())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExchangeError, match=r"none there; .* restored with Orbax"):
        read_params(tmp_path / "empty", make_params())
