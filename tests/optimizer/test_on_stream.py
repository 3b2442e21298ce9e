"""Updates that are copied on a stream, on a CPU with a late device's streams."""

import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp
import late_device
import numpy as np
import optax
import pytest
from families import family

import jaxinf

MESH = Path(__file__).parents[1] / "programs" / "on_stream_sharded.py"
VARIANTS = {
    "adamw": (optax.adamw(1e-2), {}, jnp.float32),
    "clipped": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
        {},
        jnp.float32,
    ),
    "bfloat16": (optax.adam(1e-2), {}, jnp.bfloat16),
    "top_k after a dense step": (
        optax.adam(1e-2),
        {"compress": jaxinf.top_k(0.1, warmup_steps=1)},
        jnp.float32,
    ),
    "MultiSteps": (optax.MultiSteps(optax.adam(1e-2), 2), {}, jnp.float32),
    "a frozen leaf": (
        optax.multi_transform(
            {"train": optax.adam(1e-2), "freeze": optax.set_to_zero()},
            {"kernel": "train", "table": "freeze", "bias": "train", "scale": "train"},
        ),
        {},
        jnp.float32,
    ),
}


@pytest.fixture
def on_stream(monkeypatch):
    """Has updates copied on the late device's streams; it finds no fault."""
    monkeypatch.setenv("JAXINF_CUDA_DRIVER", str(late_device.driver()))
    monkeypatch.setenv("JAXINF_CALLBACK", "stream")
    late_device.connect()
    model = late_device.library()
    yield model
    model.late_device_fail(0, 0, 0)
    model.late_device_limit(1 << 40)
    assert model.late_device_faults() == b""


def make(seed, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = {"kernel": (600, 500), "table": (700, 400), "bias": (33,), "scale": ()}
    return {
        name: jax.random.normal(key, shape, dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def trained(tx, dtype, num_steps=4):
    """Returns params and state after steps that wait for nothing."""
    params, update = make(0, dtype), jax.jit(tx.update)
    state = tx.init(params)
    for seed in range(1, num_steps + 1):
        updates, state = update(make(seed, dtype), state, params)
        params = optax.apply_updates(params, updates)
    return jax.tree.map(np.asarray, (params, state))


@pytest.mark.long
@pytest.mark.parametrize(
    "variant", family(VARIANTS, short=["adamw", "MultiSteps", "a frozen leaf"])
)
def test_bits_are_those_of_callbacks(open_store, monkeypatch, on_stream, variant):
    tx, options, dtype = VARIANTS[variant]
    before = on_stream.late_device_count(b"cuStreamWaitValue32")
    found = trained(jaxinf.smart_update(tx, open_store("stream"), **options), dtype)
    assert on_stream.late_device_count(b"cuStreamWaitValue32") > before
    monkeypatch.setenv("JAXINF_CALLBACK", "io")
    expected = trained(jaxinf.smart_update(tx, open_store("io"), **options), dtype)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.long
def test_several_devices(run_python, on_stream, place):
    del on_stream
    run_python(
        MESH,
        place,
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
        PJRT_NPROC="8",
        PYTHONPATH=str(late_device.HERE),
    )


def test_a_non_finite_gradient_stops_the_store(open_store, on_stream):
    del on_stream
    store = open_store()
    tx, params = jaxinf.smart_update(optax.adam(1e-2), store), make(0)
    state, bad = tx.init(params), make(1) | {"scale": jnp.float32(jnp.nan)}
    with pytest.raises(jaxinf.NonFiniteGradientError, match="gradient of scale"):
        tx.update(bad, state, params)


@pytest.mark.parametrize("lasts", [False, True])
def test_a_driver_that_fails_stops_the_store(place, on_stream, lasts):
    """Every part of a step meets it: what it starts, and, if it lasts, the fetching."""
    store, params = jaxinf.open_store(place / "store"), make(0)
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    update = jax.jit(tx.update)
    _, state = jax.block_until_ready(update(make(1), tx.init(params), params))
    store.wait()  # its commit
    on_stream.late_device_fail(1, 700, lasts)
    with pytest.raises(jax.errors.JaxRuntimeError, match="CUDA error 700"):
        jax.block_until_ready(update(make(2), state, params))
    with pytest.raises(
        jaxinf.DeviceError, match=r"stream failed: .*\(CUDA error 700\)"
    ):
        store.check()
    on_stream.late_device_fail(0, 0, 0)
    store.close()
    with jaxinf.open_store(place / "store") as again:
        assert again.step == 1


def test_pinned_memory_that_is_lacking(place, on_stream):
    store, params = jaxinf.open_store(place / "store"), make(0)
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    state = tx.init(params)
    on_stream.late_device_limit(on_stream.late_device_pinned() + (1 << 20))
    with pytest.raises(jaxinf.DeviceError, match=r"pinned memory of 1.* out of memory"):
        tx.update(make(1), state, params)
    store.close()


def test_closing_in_the_middle_of_a_step(place, on_stream):
    """The step ends with an error, or was committed; its memory is free."""
    before = on_stream.late_device_pinned()
    store, params = jaxinf.open_store(place / "store"), make(0)
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    updates, _ = jax.jit(tx.update)(make(1), tx.init(params), params)
    store.close()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.block_until_ready(updates)
    assert on_stream.late_device_pinned() == before


def test_what_is_refused(open_store, monkeypatch):
    tx, params = jaxinf.smart_update(optax.adam(1e-2), open_store()), make(0)
    state = tx.init(params)
    monkeypatch.setenv("JAXINF_CALLBACK", "stream")
    monkeypatch.delenv("JAXINF_CUDA_DRIVER", raising=False)
    with pytest.raises(
        ValueError, match="only CUDA has streams, found 'stream' on cpu"
    ):
        tx.update(params, state, params)
    monkeypatch.setenv("JAXINF_CUDA_DRIVER", "libno-such-driver.so.1")
    with pytest.raises(jaxinf.DeviceConfigurationError, match=r"libno-such-driver\.so"):
        tx.update(params, state, params)
