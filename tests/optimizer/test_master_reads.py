"""The master params come from the JAX device if it has them to the bit."""

from itertools import product

import callback_form
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_stores
from families import family

import jaxinf

pytestmark = pytest.mark.optimized

SHAPES = {"a": (300, 1025), "b": (), "c": (5,), "d": (4096, 3)}
NUM_PARAMS = sum(int(np.prod(s)) for s in SHAPES.values())


def new_params(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
        for name, shape in SHAPES.items()
    }


def run(path, *, num_steps=5, tx=None, params=None, bad_steps=(), **options):
    """Trains; returns master params, moments, device params, drive bytes a step."""
    nonfinite = options.pop("nonfinite", "error")
    params = new_params() if params is None else params
    with small_stores.open_store(path, **options) as store:
        chain = tx or optax.adamw(1e-2)
        wrapped = jaxinf.smart_update(chain, store, nonfinite=nonfinite)
        state = wrapped.init(params)

        @jax.jit
        def step(params, state, scale):
            grads = jax.tree.map(lambda p: jnp.sin(p) * scale, params)
            updates, state = wrapped.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for number in range(num_steps):
            scale = jnp.nan if number in bad_steps else 1.0
            params, state = jax.block_until_ready(step(params, state, scale))
        store.wait()
        held = {
            (leaf.name, s.name): store.tensorstore(s.name, leaf.name).read().result()
            for leaf in store._manifest.leaves
            for s in leaf.states
        }
        return held, jax.device_get(params), store.metrics.traffic


@pytest.mark.long
@pytest.mark.parametrize(
    ("durability", "memory_bytes"),
    [
        (3, 1 << 20),
        pytest.param("step", 1 << 26, marks=pytest.mark.long),
        pytest.param("step", 1 << 20, marks=pytest.mark.long),
        pytest.param(3, 1 << 26, marks=pytest.mark.long),
    ],
)
def test_the_same_bits_for_a_third_less_reading(
    place, memory_bytes, durability, monkeypatch
):
    small_stores.keep_nothing(monkeypatch)
    options = {"memory_bytes": memory_bytes, "durability": durability}
    held, params, traffic = run(place / "auto", num_workers=2, **options)
    wanted, same, more = run(place / "read", num_workers=2, csd="emulated", **options)
    jax.tree.map(np.testing.assert_array_equal, (held, params), (wanted, same))
    for name, value in params.items():
        np.testing.assert_array_equal(held[name, "params"], value)
    padding = 2 * 4 * 4096
    assert abs(traffic.drive_read_bytes - 2 * 8 * NUM_PARAMS) < NUM_PARAMS * 8 + padding
    saved = more.drive_read_bytes - traffic.drive_read_bytes
    if durability == "step" or memory_bytes > 1 << 20:
        assert saved >= 4 * NUM_PARAMS
    else:  # parts of chunks are overwritten, so the master is read for a comparison
        assert saved >= 0
    assert more.drive_write_bytes == traffic.drive_write_bytes


@pytest.mark.long
@pytest.mark.parametrize("how", family(["io", "16-bit", "no params"], short=["16-bit"]))
def test_from_the_drive_where_they_are_not_at_hand(place, how, monkeypatch):
    small_stores.keep_nothing(monkeypatch)
    options = {}
    if how == "io":
        callback_form.use("io", monkeypatch)
    if how == "16-bit":
        options["params"] = new_params(jnp.float16)
    if how == "no params":
        options["tx"] = optax.sgd(0.1, momentum=0.9)
    _, _, with_given = run(place / "auto", **options)
    _, _, stored = run(place / "read", csd="emulated", **options)
    if how == "no params":
        assert with_given.drive_read_bytes < stored.drive_read_bytes
    else:
        assert with_given.drive_read_bytes == stored.drive_read_bytes


@pytest.mark.parametrize(
    ("memory_bytes", "element"),
    family(
        product([1 << 20, 1 << 26], [(0, 0), (299, 1024), (150, 500)]),
        short=[(1 << 20, (299, 1024)), (1 << 26, (0, 0))],
    ),
)
def test_other_params_are_caught_wherever_they_differ(place, element, memory_bytes):
    params = new_params()
    with small_stores.open_store(
        place / "store", memory_bytes=memory_bytes, num_workers=2
    ) as store:
        tx = jaxinf.smart_update(optax.adam(1e-2), store)
        state = tx.init(params)
        updates, state = tx.update(params, state, params)
        params = optax.apply_updates(params, updates)
        params["a"] = params["a"].at[element].add(1e-3)
        with pytest.raises(jaxinf.DivergedParamsError, match=r"leaf a: .* unchanged"):
            tx.update(params, state, params)
        with pytest.raises(jaxinf.DivergedParamsError):
            store.check()


def test_the_choice_is_checked(place):
    with pytest.raises(ValueError, match="master='device': expected 'auto' or 'none'"):
        jaxinf.open_store(place / "store", master="device")
