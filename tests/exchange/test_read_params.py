"""Params of safetensors files begin a store, by their exact names."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from families import family
from safetensors.numpy import save_file

import jaxinf
from jaxinf.errors import ExchangeError
from jaxinf.exchange import export_safetensors, read_params
from jaxinf.store import StoreDirectory, step_of


def make_params(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "h": [
            {"kernel": jax.random.normal(keys[0], (8, 33), dtype)},
            {"kernel": jax.random.normal(keys[1], (33, 16), dtype)},
        ],
        "out": jax.random.normal(keys[2], (16,), dtype),
    }


@jax.jit
def loss_and_grads(params, step):
    x = jax.random.normal(jax.random.key(step), (4, 8))

    def loss(params):
        hidden = jnp.tanh(x @ params["h"][0]["kernel"]) @ params["h"][1]["kernel"]
        return jnp.mean((jnp.tanh(hidden) @ params["out"] - x.sum(1)) ** 2)

    return jax.value_and_grad(loss)(params)


def train(tx, params, state, first, last):
    """Returns losses of the steps [first, last), each in three jits."""
    update, apply = jax.jit(tx.update), jax.jit(optax.apply_updates)
    losses = []
    for step in range(first, last):
        loss, grads = loss_and_grads(params, step)
        losses.append(np.asarray(loss))
        updates, state = update(grads, state, params)
        params = apply(params, updates)
    return params, state, losses


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


def make_store(path, tx, params):
    with jaxinf.open_store(path) as store:
        jaxinf.smart_update(tx, store).init(params)


def params_of(path, like):
    with jaxinf.open_store(path) as store:
        assert store.step == 0
        return store.params(like=like)


def equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_params_become_an_exact_master(tmp_path, dtype):
    params = make_params(dtype)
    source = save(tmp_path / "saved", params, "model.params.")
    like = jax.eval_shape(lambda: params)
    found = read_params(source, like, place="model/params")
    make_store(tmp_path / "store", optax.adamw(1e-2), found)
    equal(params_of(tmp_path / "store", params), params)


@pytest.mark.parametrize("state", family(["fp32", "int8"], short=["int8"]))
def test_training_begins_with_the_params(tmp_path, state):
    tx, params = optax.adamw(1e-2), make_params()
    make_store(tmp_path / "other", tx, params)
    with jaxinf.open_store(tmp_path / "other") as store, store.snapshot() as path:
        step = step_of(StoreDirectory(tmp_path / "other", store._manifest), path)
        export_safetensors(step, tmp_path / "saved")
    read = read_params(tmp_path / "saved", params)
    for name, first in (("store", read), ("expected", params)):
        with jaxinf.open_store(tmp_path / name, state=state) as store:
            jaxinf.smart_update(tx, store).init(first)
    found, expected = (
        trained(tmp_path / name, tx, params) for name in ("store", "expected")
    )
    equal(found, expected)
    if state == "fp32":
        equal(found, plain(tx, params))


def trained(path, tx, params):
    with jaxinf.open_store(path) as store:
        smart, params = jaxinf.smart_update(tx, store), store.params(like=params)
        return train(smart, params, smart.init(params), 0, 4)[2]


def plain(tx, params):
    return train(tx, params, tx.init(params), 0, 4)[2]


def test_state_computed_from_params_is_of_what_was_read(tmp_path):
    tx, params = optax.contrib.schedule_free_adamw(1e-2), make_params()
    source = save(tmp_path / "saved", params)
    make_store(tmp_path / "store", tx, read_params(source, params))
    with jaxinf.open_store(tmp_path / "store") as store:
        equal(store.read("z", "out"), params["out"])


def test_floats_are_rounded_to_the_params_dtype(tmp_path):
    params = make_params()
    save(tmp_path / "saved", params)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    found = read_params(tmp_path / "saved", half)
    equal(jax.tree.map(np.asarray, found), half)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_float64_is_rounded(tmp_path, dtype):
    wide = np.random.default_rng(0).standard_normal(99)
    save_file({"w": wide}, tmp_path / "saved.safetensors")
    like = {"w": jax.ShapeDtypeStruct((99,), dtype)}
    found = read_params(tmp_path / "saved.safetensors", like)["w"].read()
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, wide.astype(np.float32).astype(dtype))


def test_a_value_that_the_dtype_does_not_hold_is_refused(tmp_path):
    save(tmp_path / "saved", {"w": jnp.array([1e6, 1.0])})
    like = {"w": jax.ShapeDtypeStruct((2,), jnp.float16)}
    with pytest.raises(ExchangeError, match=r"w: expected values that float16 holds"):
        jax.tree.map(np.asarray, read_params(tmp_path / "saved", like))


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


def test_orbax_says_so_and_we_name_the_way(tmp_path):
    """A checkpoint of plain optax does not fit; docs/integrations.md quotes Orbax."""
    params, plain = {"w": jnp.ones((8, 4))}, optax.adamw(1e-3)
    with ocp.StandardCheckpointer() as checkpointer:
        held = {"params": params, "opt_state": plain.init(params)}
        checkpointer.save(tmp_path / "saved", held)
    tx = jaxinf.smart_update(plain, tmp_path / "store")
    like = {"params": params, "opt_state": tx.init(params)}
    with ocp.StandardCheckpointer() as checkpointer:
        with pytest.raises(ValueError, match="tree structures do not match") as error:
            checkpointer.restore(tmp_path / "saved", like)
        restored = checkpointer.restore(tmp_path / "saved")
    page = Path(__file__).parents[2] / "docs" / "integrations.md"
    quoted = re.search(r'"(User-provided [^"]*)"', page.read_text())
    assert quoted
    assert " ".join(quoted[1].split()) in str(error.value)
    with pytest.raises(TypeError, match=r"store\.load\(params, opt_state, step="):
        tx.update(params, restored["opt_state"], params)
    jaxinf.close(tmp_path / "store")
