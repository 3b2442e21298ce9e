"""The master comes from the JAX device as far as it has its bits; none is lost.

Of float32 params nothing is read, of bfloat16 params 16-bit remainders.
"""

from itertools import product

import callback_form
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
import small_stores
from families import family
from raw_stores import stored

import jaxinf
from jaxinf.cli import main
from jaxinf.errors import DivergedParamsError, StoreMismatchError
from jaxinf.store import StoreDirectory, verify_step

pytestmark = pytest.mark.optimized

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = {"a": (300, 1025), "b": (), "c": (5,), "d": (4096, 3), "e": (40, 3, 77)}
NUM_PARAMS = sum(int(np.prod(s)) for s in SHAPES.values())
PADDING = 40 * 4096


def new_params(seed=0, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
        for name, shape in SHAPES.items()
    }


LIKE = new_params()


def gradients(params):
    return jax.tree.map(lambda p: jnp.sin(3 * p.astype(jnp.float32)), params)


def ties_away(master):
    """Rounds float32 to the nearest bfloat16, ties away from zero."""
    bits = np.asarray(master).view(np.uint32)
    return ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16).view(BF16)


def run(path, num_steps, *, params=None, tx=None, bad_steps=(), **options):
    """Trains; returns decoded state, params on the device, bytes of a step."""
    nonfinite = options.pop("nonfinite", "error")
    with small_stores.open_store(path, **options) as store:
        wrapped = jaxinf.smart_update(
            tx or optax.adamw(1e-2), store, nonfinite=nonfinite
        )
        if store.exists:
            params = store.params(LIKE)
        params = new_params() if params is None else params
        state = wrapped.init(params)

        @jax.jit
        def step(params, state, scale):
            grads = jax.tree.map(lambda g: g * scale, gradients(params))
            updates, state = wrapped.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for number in range(num_steps):
            scale = jnp.nan if number in bad_steps else 1.0
            params, state = jax.block_until_ready(step(params, state, scale))
        store.wait()
        held = {
            (leaf.name, s.name): store.read(s.name, leaf.name)
            for leaf in store._manifest.leaves
            for s in leaf.states
            if not s.is_beside
        }
        traffic = store.metrics.traffic if num_steps else None
        return held, jax.device_get(params), traffic


def reference(num_steps, tx):
    """Trains by optax on an fp32 master, with params rounded ties away from zero."""
    params = new_params()
    master = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    state = tx.init(master)
    update = jax.jit(tx.update)
    for _ in range(num_steps):
        updates, state = update(jax.jit(gradients)(params), state, master)
        master = jax.jit(optax.apply_updates)(master, updates)
        params = jax.tree.map(ties_away, jax.device_get(master))
    return jax.device_get((params, master, state))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.long
@pytest.mark.parametrize("tx", [optax.adamw(1e-2), optax.lion(1e-2)])
def test_the_bits_of_a_plain_master(tmp_path, tx):
    held, params, _ = run(tmp_path / "store", 6, tx=tx)
    wanted, master, state = reference(6, tx)
    equal(params, wanted)
    for name in SHAPES:
        np.testing.assert_array_equal(held[name, "params"], master[name])
        np.testing.assert_array_equal(held[name, "mu"], state[0].mu[name])


@pytest.mark.long
@pytest.mark.parametrize("memory_bytes", [1 << 20, 1 << 26])
@pytest.mark.parametrize("durability", ["step", 3])
def test_at_any_durability_and_budget_after_any_interruption(
    tmp_path, memory_bytes, durability
):
    options = {"memory_bytes": memory_bytes, "durability": durability}
    whole = run(tmp_path / "whole", 7)
    run(tmp_path / "parts", 2, **options)
    parts = run(tmp_path / "parts", 5, **options)
    equal(whole[:2], parts[:2])


@pytest.mark.long
@pytest.mark.parametrize(
    ("durability", "memory_bytes"), [(3, 1 << 20), ("step", 1 << 26)]
)
def test_float32_params_spare_a_third_of_the_reading(
    tmp_path, memory_bytes, durability, monkeypatch
):
    small_stores.keep_nothing(monkeypatch)
    options = {"memory_bytes": memory_bytes, "durability": durability}
    params = new_params(dtype=jnp.float32)
    found = run(tmp_path / "auto", 5, params=params, **options)
    wanted = run(tmp_path / "read", 5, params=params, csd="emulated", **options)
    equal(found[:2], wanted[:2])
    for name, value in found[1].items():
        np.testing.assert_array_equal(found[0][name, "params"], value)
    traffic, more = found[2], wanted[2]
    assert abs(traffic.drive_read_bytes - 16 * NUM_PARAMS) < NUM_PARAMS * 8 + PADDING
    saved = more.drive_read_bytes - traffic.drive_read_bytes
    # Where parts of chunks are overwritten, the master is read for a comparison.
    assert saved >= (4 * NUM_PARAMS if durability == "step" else 0)
    assert more.drive_write_bytes == traffic.drive_write_bytes


@pytest.mark.long
@pytest.mark.parametrize("how", ["start", "16-bit", "no params"])
def test_from_the_drive_where_they_are_not_at_hand(tmp_path, how, monkeypatch):
    small_stores.keep_nothing(monkeypatch)
    options = {
        "params": new_params(dtype=jnp.float16 if how == "16-bit" else jnp.float32)
    }
    if how == "start":
        callback_form.use("start", monkeypatch)
    if how == "no params":
        options["tx"] = optax.sgd(0.1, momentum=0.9)
    *_, given = run(tmp_path / "auto", 5, **options)
    *_, stored = run(tmp_path / "read", 5, csd="emulated", **options)
    if how == "no params":
        assert given.drive_read_bytes < stored.drive_read_bytes
    else:
        assert given.drive_read_bytes == stored.drive_read_bytes


@pytest.mark.parametrize(
    ("dtype", "memory_bytes", "element"),
    family(
        product("fb", [1 << 20, 1 << 26], [(0, 0), (299, 1024), (150, 500)]),
        short=[("f", 1 << 20, (299, 1024)), ("b", 1 << 26, (150, 500))],
    ),
)
def test_other_params_are_caught_wherever_they_differ(
    tmp_path, dtype, element, memory_bytes
):
    params = new_params(dtype=jnp.float32 if dtype == "f" else jnp.bfloat16)
    with small_stores.open_store(tmp_path / "store", memory_bytes=memory_bytes) as one:
        tx = jaxinf.smart_update(optax.adam(1e-2), one)
        updates, state = tx.update(params, tx.init(params), params)
        params = optax.apply_updates(params, updates)
        params["a"] = params["a"].at[element].multiply(1.01)
        with pytest.raises(DivergedParamsError, match=r"leaf a: .* unchanged"):
            tx.update(params, state, params)
        with pytest.raises(DivergedParamsError):
            one.check()


@pytest.mark.long
@pytest.mark.parametrize(
    "state",
    ["fp32", "bf16", "int8"],
)
def test_bytes_on_the_drive(tmp_path, state, monkeypatch):
    """Reads two bytes of master, writes four; with 8-bit moments 10.1 in all."""
    small_stores.keep_nothing(monkeypatch)
    moments = {"fp32": 8, "bf16": 4, "int8": 2 + 2 / 64}[state]
    for master, read, written in (("auto", 2, 4), ("none", 0, 2)):
        path = tmp_path / master
        *_, traffic = run(path, 3, state=state, master=master)
        for found, wanted in (
            (traffic.drive_read_bytes, read + moments),
            (traffic.drive_write_bytes, written + moments),
        ):
            small = sum(16 * np.prod(s) for s in SHAPES.values() if np.prod(s) < 4096)
            assert abs(found - wanted * NUM_PARAMS) < PADDING + small


def test_what_is_stored_and_what_is_shown(tmp_path):
    path = tmp_path / "store"
    held, params, _ = run(path, 3)
    with jaxinf.open_store(path) as store:
        kept = stored(store, "params", "a")
        rest = stored(store, "params_remainder", "a")
        np.testing.assert_array_equal(kept, params["a"])
        assert rest.dtype == np.int16
        bits = (kept.view(np.uint16).astype(np.int64) << 16) + rest
        np.testing.assert_array_equal(
            bits.astype(np.uint32).view(np.float32), held["a", "params"]
        )
        wide = store.params(new_params(dtype=jnp.float32))
        np.testing.assert_array_equal(wide["a"], held["a", "params"])
        equal(jax.device_get(store.params(LIKE)), params)
        with pytest.raises(ValueError, match="params_remainder is a part of params"):
            store.read("params_remainder", "a")
    assert main(["verify", str(path)]) == 0


def test_params_that_no_update_reaches_are_read_from_the_store(tmp_path):
    """A master 1 - 2^-24 is rounded to 1, and no float32 update leads to -2^-24."""
    tiny = 2.0**-24
    params = {"w": jnp.ones((5000,), jnp.bfloat16)}
    master = np.float32(1)
    with jaxinf.open_store(tmp_path / "store") as store:
        tx = jaxinf.smart_update(optax.sgd(1.0), store)
        state = tx.init(params)

        @jax.jit
        def step(params, state, gradient):
            updates, state = tx.update({"w": gradient}, state, params)
            return optax.apply_updates(params, updates), state

        for update in (-tiny, -1.0, 0.25, 0.25):
            gradient = jnp.full((5000,), -update, jnp.float32)
            params, state = step(params, state, gradient)
            store.wait(state)
            master = np.float32(master + np.float32(update))
            held = store.read("params", "w")
            np.testing.assert_array_equal(held, master)
            if update == -1.0:  # the store reaches it; the params cannot
                assert master == -tiny
                assert (np.asarray(params["w"], np.float32) == 0).all()
        np.testing.assert_array_equal(params["w"], ties_away(held))


@pytest.mark.long
@pytest.mark.parametrize("master", ["auto", "none"])
def test_checkpoints_exports_and_stock_orbax(tmp_path, master):
    path = tmp_path / "store"
    held, params, _ = run(path, 3, master=master, state="int8")
    with jaxinf.open_store(path) as store:
        store.checkpoint()
    first = run(path, 2)
    with jaxinf.open_store(path, restore="3"):
        pass
    equal(first[:2], run(path, 2)[:2])
    raw = ocp.PyTreeCheckpointer().restore(path / "checkpoints" / "3")
    np.testing.assert_array_equal(raw["params"]["a"], params["a"])
    assert ("params_remainder" in raw) == (master == "auto")
    out, back = tmp_path / "out", tmp_path / "back"
    words = ["checkpoint", "export", str(path), str(out), "--checkpoint", "3"]
    assert main(words) == 0
    assert main(["store", "copy", str(out), str(back)]) == 0
    directory = StoreDirectory.open(back)
    assert verify_step(directory, back / "current") == []
    with jaxinf.open_store(back) as store:
        assert store.step == 3
        for (leaf, state), values in held.items():
            np.testing.assert_array_equal(store.read(state, leaf), values)
    words = ["checkpoint", "export", str(path), str(tmp_path / "tensors")]
    words += ["--checkpoint", "3", "--format", "safetensors"]
    assert main(words) == 0
    tensors = safetensors.numpy.load_file(tmp_path / "tensors" / "model.safetensors")
    np.testing.assert_array_equal(tensors["a"], held["a", "params"])


@pytest.mark.long
def test_no_master_converges_on_average(tmp_path):
    """Updates far below the params' precision have an effect on average."""
    params = {"w": jnp.ones((100_000,), jnp.bfloat16)}
    with jaxinf.open_store(tmp_path / "store", master="none") as store:
        tx = jaxinf.smart_update(optax.sgd(1.0), store)
        state = tx.init(params)
        gradient = {"w": jnp.full((100_000,), -1e-4, jnp.float32)}
        for _ in range(20):
            updates, state = tx.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
        store.wait(state)
        np.testing.assert_array_equal(store.read("params", "w"), params["w"])
    mean = np.asarray(params["w"], np.float64).mean()
    assert abs(mean - 1.002) < 2e-4


@pytest.mark.long
def test_the_choice_of_a_new_store(tmp_path):
    run(tmp_path / "store", 1)
    with pytest.raises(ValueError, match="master='device': expected 'auto' or 'none'"):
        jaxinf.open_store(tmp_path / "new", master="device")
    with pytest.raises(StoreMismatchError, match=r"--master none"):
        jaxinf.open_store(tmp_path / "store", master="none")
    for name, dtypes in (
        ("wide", [jnp.float32]),
        ("half", [jnp.float16, jnp.bfloat16]),
    ):
        params = {str(n): jnp.ones((8,), dtype) for n, dtype in enumerate(dtypes)}
        with jaxinf.open_store(tmp_path / name, master="none") as store:
            tx = jaxinf.smart_update(optax.sgd(0.1), store)
            with pytest.raises(ValueError, match="expected params in bfloat16"):
                tx.init(params)
        assert not (tmp_path / name / "jaxinf.json").exists()
    mixed = {"h": jnp.ones((8,), jnp.float16), "b": jnp.ones((8,), jnp.bfloat16)}
    with jaxinf.open_store(tmp_path / "mixed") as store:
        jaxinf.smart_update(optax.sgd(0.1), store).init(mixed)
        codecs = {leaf.name: leaf.states[0].codec for leaf in store._manifest.leaves}
    assert codecs == {"h": "", "b": "split"}
