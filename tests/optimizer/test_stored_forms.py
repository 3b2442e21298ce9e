"""How params and optimizer state are stored: as remainders, in 16 or 8 bits.

The master comes from the JAX device as far as it has its bits: of float32 params none
are read, of bfloat16 params 16-bit remainders. No form loses what another one keeps.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import small_stores
from families import family
from raw_stores import chunk_file, flip_bit, stored
from small_stores import same, train
from streaming_cases import states

import jaxinf
from jaxinf.cli import main
from jaxinf.errors import DivergedParamsError, StoreCorruptError, StoreMismatchError
from jaxinf.store import StoreDirectory, verify_step

pytestmark = pytest.mark.optimized

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = {"a": (300, 1025), "b": (), "c": (5,), "d": (4096, 3), "e": (40, 3, 77)}


def new_params(dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
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


def run(path, num_steps, *, params=LIKE, tx=None, **options):
    with small_stores.open_store(path, **options) as store:
        tx = tx or optax.adamw(1e-2)
        _, params, _ = train(store, tx, params, [jax.jit(gradients)] * num_steps)
        store.wait()
        return states(store), jax.device_get(params)


@pytest.mark.long
def test_the_bits_of_a_plain_master(tmp_path):
    """Those of optax on an fp32 master, with params rounded ties away from zero."""
    tx, wanted = optax.adamw(1e-2), new_params()
    held, params = run(tmp_path / "store", 6)
    master = jax.tree.map(lambda p: p.astype(jnp.float32), wanted)
    state, update = tx.init(master), jax.jit(tx.update)
    for _ in range(6):
        updates, state = update(jax.jit(gradients)(wanted), state, master)
        master = jax.jit(optax.apply_updates)(master, updates)
        wanted = jax.tree.map(ties_away, jax.device_get(master))
    same(params, wanted)
    for name in SHAPES:
        np.testing.assert_array_equal(held["params", name], master[name])
        np.testing.assert_array_equal(held["mu", name], state[0].mu[name])


@pytest.mark.parametrize(
    ("dtype", "memory_bytes", "element"),
    family(
        [
            (jnp.float32, 1 << 20, (299, 1024)),
            (jnp.float32, 1 << 26, (0, 0)),
            (jnp.bfloat16, 1 << 20, (299, 1024)),
            (jnp.bfloat16, 1 << 26, (150, 500)),
        ],
        short=[
            (jnp.float32, 1 << 20, (299, 1024)),
            (jnp.bfloat16, 1 << 26, (150, 500)),
        ],
    ),
)
def test_other_params_are_caught_wherever_they_differ(
    open_store, dtype, element, memory_bytes
):
    params, store = new_params(dtype), open_store(memory_bytes=memory_bytes)
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    updates, state = tx.update(params, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    params["a"] = params["a"].at[element].multiply(1.01)
    with pytest.raises(DivergedParamsError, match=r"leaf a: .* unchanged"):
        tx.update(params, state, params)
    with pytest.raises(DivergedParamsError):
        store.check()


def test_what_is_stored_and_what_is_shown(tmp_path):
    path = tmp_path / "store"
    held, params = run(path, 3)
    with jaxinf.open_store(path) as store:
        kept = stored(store, "params", "a")
        rest = stored(store, "params_remainder", "a")
        np.testing.assert_array_equal(kept, params["a"])
        assert rest.dtype == np.int16
        bits = (kept.view(np.uint16).astype(np.int64) << 16) + rest
        np.testing.assert_array_equal(
            bits.astype(np.uint32).view(np.float32), held["params", "a"]
        )
        wide = store.params(new_params(jnp.float32))
        np.testing.assert_array_equal(wide["a"], held["params", "a"])
        same(jax.device_get(store.params(LIKE)), params)
        with pytest.raises(ValueError, match="params_remainder is a part of params"):
            store.read("params_remainder", "a")
    assert main(["verify", str(path)]) == 0


@pytest.mark.long
@pytest.mark.parametrize("state", ["bf16", "int8"])
def test_what_is_stored_of_a_moment(place, state):
    held, _ = run(place / "store", 3, state=state)
    plain, _ = run(place / "plain", 3)
    with jaxinf.open_store(place / "store") as store:
        coded = stored(store, "mu", "a")
        assert coded.dtype.name == {"int8": "uint8", "bf16": "bfloat16"}[state]
        assert coded.shape == SHAPES["a"]
        names = {(leaf.name, s.name) for leaf in store._manifest.leaves
                 for s in leaf.states}  # fmt: skip
        assert (("a", "mu_scale") in names) == (state == "int8")
        if state == "int8":  # a short leaf stays as it is
            assert stored(store, "mu_scale", "a").dtype == np.float32
            assert ("c", "mu_scale") not in names
            np.testing.assert_array_equal(stored(store, "mu", "c"), held["mu", "c"])
    scale = np.abs(plain["nu", "a"]).max()
    assert np.abs(held["nu", "a"] - plain["nu", "a"]).max() < 0.02 * scale


def test_a_flipped_bit_of_a_scale_is_found(place):
    path = place / "store"
    run(path, 2, state="int8")
    directory = StoreDirectory.open(path)
    file = chunk_file(directory, directory.committed_slot(), 0, "mu_scale")
    flip_bit(file, 11)
    (damage,) = verify_step(directory, path / "current")
    assert "leaf a, mu_scale, chunk 0" in damage.what
    with jaxinf.open_store(path) as store:
        params = store.params(LIKE)
        tx = jaxinf.smart_update(optax.adamw(1e-2), store)
        state = tx.init(params)
        with pytest.raises(StoreCorruptError, match="leaf a, mu_scale, chunk 0"):
            tx.update(params, state, params)


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
def test_the_choice_of_a_new_store(tmp_path):
    run(tmp_path / "store", 1, state="int8")
    for options, message in (
        ({"master": "none"}, "--master none"),
        ({"state": "bf16"}, "expected state='bf16', found 'int8'"),
    ):
        with pytest.raises(StoreMismatchError, match=message):
            jaxinf.open_store(tmp_path / "store", **options)
    run(tmp_path / "store", 1)  # it knows its format
    for _ in range(2):  # this state has nothing to code
        run(tmp_path / "plain", 1, state="int8", tx=optax.sgd(0.1))
    half, bf16 = jnp.ones(8, jnp.float16), jnp.ones(8, jnp.bfloat16)
    for name, params in (
        ("wide", {"w": jnp.ones(8)}),
        ("half", {"h": half, "b": bf16}),
    ):
        with pytest.raises(ValueError, match="expected params in bfloat16"):
            run(tmp_path / name, 0, params=params, master="none")
        assert not (tmp_path / name / "jaxinf.json").exists()
    with jaxinf.open_store(tmp_path / "mixed") as store:
        jaxinf.smart_update(optax.sgd(0.1), store).init({"h": half, "b": bf16})
        codecs = {leaf.name: leaf.states[0].codec for leaf in store._manifest.leaves}
    assert codecs == {"h": "", "b": "split"}
