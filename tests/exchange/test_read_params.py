"""Params of stock Orbax and safetensors begin a store, by their exact names."""

import json
import re
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from families import family
from flax import nnx
from flax.training import train_state
from orbax.checkpoint.experimental import v1
from safetensors.numpy import save_file

import jaxinf
from jaxinf.errors import ExchangeError
from jaxinf.exchange import export_safetensors, read_params
from jaxinf.store import StoreDirectory, step_of

NUM_STEPS = 6


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


def save_standard(path, params, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"params": params, "opt_state": state})
    return path


def save_zarr2_files(path, params, state):
    tree = {"params": params, "opt_state": state, "step": NUM_STEPS}
    ocp.PyTreeCheckpointer(use_ocdbt=False).save(path, tree)
    return path


def save_zarr3_files(path, params, state):
    checkpointer = ocp.PyTreeCheckpointer(use_ocdbt=False, use_zarr3=True)
    checkpointer.save(path, {"model": {"params": params}, "opt_state": state})
    return path


def save_train_state(path, params, state):
    value = train_state.TrainState(NUM_STEPS, None, params, None, state)
    with ocp.CheckpointManager(path) as manager:
        manager.save(NUM_STEPS, args=ocp.args.StandardSave(value))
    return path / str(NUM_STEPS)


def save_newer_api(path, params, state):
    v1.save(path, {"params": params, "opt_state": state})
    return path


def save_in_small_chunks(path, params, state):
    tree = {"params": params, "opt_state": state}
    arguments = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=128), tree)
    ocp.PyTreeCheckpointer().save(path, tree, save_args=arguments)
    return path


SAVES = [
    save_in_small_chunks,
    save_standard,
    save_zarr2_files,
    save_zarr3_files,
    save_train_state,
    save_newer_api,
]


def make_store(path, tx, params):
    with jaxinf.open_store(path) as store:
        jaxinf.smart_update(tx, store).init(params)


def params_of(path, like):
    with jaxinf.open_store(path) as store:
        assert store.step == 0
        return store.params(like=like)


def equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


PLACES = {save_zarr3_files: "model/params"}


@pytest.mark.parametrize("save", SAVES)
def test_every_way_to_save(tmp_path, save):
    tx, params = optax.adamw(1e-2), make_params()
    source = save(tmp_path / "saved", params, tx.init(params))
    place = PLACES.get(save, "params")
    found = read_params(source, jax.eval_shape(lambda: params), place=place)
    make_store(tmp_path / "store", tx, found)
    equal(params_of(tmp_path / "store", params), params)


def test_flax_nnx(tmp_path):
    model = nnx.Sequential(
        nnx.Linear(8, 33, rngs=nnx.Rngs(0)), nnx.Linear(33, 1, rngs=nnx.Rngs(1))
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", {"model": nnx.state(model)})
    params = nnx.state(model, nnx.Param)
    found = read_params(tmp_path / "saved", params, place="model")
    make_store(tmp_path / "store", optax.adamw(1e-2), found)
    equal(params_of(tmp_path / "store", params), params)


def test_16_bit_params_become_an_exact_master(tmp_path):
    tx, params = optax.adam(1e-2), make_params(jnp.bfloat16)
    save_standard(tmp_path / "saved", params, tx.init(params))
    found = read_params(tmp_path / "saved", params, place="params")
    make_store(tmp_path / "store", tx, found)
    equal(params_of(tmp_path / "store", params), params)


@pytest.mark.parametrize(
    ("kind", "state"),
    family(
        product(["safetensors", "orbax"], ["fp32", "int8"]),
        short=[("safetensors", "int8")],
    ),
)
def test_training_begins_with_the_params(tmp_path, kind, state):
    tx, params = optax.adamw(1e-2), make_params()
    if kind == "orbax":
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "saved", params)
    else:
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
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", params)
    make_store(tmp_path / "store", tx, read_params(tmp_path / "saved", params))
    with jaxinf.open_store(tmp_path / "store") as store:
        equal(store.read("z", "out"), params["out"])


def test_floats_are_rounded_to_the_params_dtype(tmp_path):
    params = make_params()
    save_standard(tmp_path / "saved", params, ())
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    found = read_params(tmp_path / "saved", half, place="params")
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
    save_standard(tmp_path / "saved", {"w": jnp.array([1e6, 1.0])}, ())
    like = {"w": jax.ShapeDtypeStruct((2,), jnp.float16)}
    with pytest.raises(ExchangeError, match=r"w: expected values that float16 holds"):
        jax.tree.map(np.asarray, read_params(tmp_path / "saved", like, place="params"))


# --- refusals ----------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """An adamw run's checkpoint."""
    params = make_params()
    return save_standard(tmp_path / "saved", params, optax.adamw(1e-2).init(params))


def test_everything_wrong_is_in_one_error(tmp_path):
    params = make_params()
    params["h"][0]["kernel"] = jnp.zeros((8, 34))
    params["h"][1]["kernel"] = jnp.zeros((33, 16), jnp.int32)
    del params["out"]
    save_standard(tmp_path / "saved", params, ())
    with pytest.raises(ExchangeError) as caught:
        read_params(tmp_path / "saved", make_params(), place="params")
    text = str(caught.value)
    assert "params.out: missing" in text
    assert "params.h.0.kernel: (8, 34), in the params (8, 33)" in text
    assert "params.h.1.kernel: int32, in the params float32" in text


def test_no_place_is_guessed(saved):
    with pytest.raises(ExchangeError, match=r'out: missing[^.]*\.[\s\S]*place="NAME"'):
        read_params(saved, make_params())


def test_no_checkpoint(tmp_path):
    with pytest.raises(ExchangeError, match=r"nothing: expected .* found nothing"):
        read_params(tmp_path / "nothing", make_params())
    with pytest.raises(ExchangeError, match=r"~nosuch/a: expected .* found nothing"):
        read_params("~nosuch/a", make_params())
    (tmp_path / "file").touch()
    with pytest.raises(ExchangeError, match=r"found another file"):
        read_params(tmp_path / "file", make_params())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExchangeError, match=r"found no _METADATA; give the"):
        read_params(tmp_path / "empty", make_params())


def test_a_manager_is_not_one_step(tmp_path):
    tx, params = optax.adam(1e-2), make_params()
    save_train_state(tmp_path / "saved", params, tx.init(params))
    with pytest.raises(ExchangeError, match=r"found 6.default; give the directory"):
        read_params(tmp_path / "saved", params)


def test_a_damaged_checkpoint(saved):
    for file in (saved / "ocdbt.process_0" / "d").iterdir():
        file.write_bytes(b"")
    with pytest.raises(ExchangeError, match=r"saved: "):
        jax.tree.map(np.asarray, read_params(saved, make_params(), place="params"))


def test_a_damaged_tree(saved):
    (saved / "_METADATA").write_text("{}")
    with pytest.raises(ExchangeError, match=r"_METADATA: expected the tree"):
        read_params(saved, make_params())


def test_a_chunk_that_is_larger_than_its_array(tmp_path):
    """It would be decoded whole, of however few bytes it is made."""
    saved = save_zarr3_files(tmp_path / "saved", {"w": jnp.ones((4, 8))}, ())
    [file] = saved.glob("**/*w/zarr.json")
    document = json.loads(file.read_text())
    document["chunk_grid"]["configuration"]["chunk_shape"] = [1 << 29, 8]
    file.write_text(json.dumps(document))
    with pytest.raises(ExchangeError, match=r"chunks of .*w of about its shape"):
        read_params(saved, {"w": jnp.ones((4, 8))}, place="model/params")


def test_orbax_says_so_and_we_name_the_way(tmp_path):
    """A checkpoint of plain optax does not fit; docs/integrations.md quotes Orbax."""
    params, plain = {"w": jnp.ones((8, 4))}, optax.adamw(1e-3)
    save_standard(tmp_path / "saved", params, plain.init(params))
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
