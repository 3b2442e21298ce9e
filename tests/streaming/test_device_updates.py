"""Updates that a JAX device computes: the bits of the host's, and what is refused."""

import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_stores
from device_updates import CHUNKS, TX, batches, open_step
from inject import at_call, raising
from raw_stores import memory_directory
from streaming_cases import assert_same_states, states

import jaxinf
from jaxinf.errors import StoreError, StreamError
from jaxinf.streaming.update import device_updates as on_device
from jaxinf.streaming.update.apply_gradients import StoreSink
from jaxinf.streaming.update.device_updates import (
    NUM_TRIED,
    NUM_UNDER_WAY,
    DeviceUpdater,
    next_interval,
)

pytestmark = pytest.mark.optimized

OPTIMIZERS = {
    "adamw": TX,
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "lion": optax.lion(1e-3, mu_dtype=jnp.bfloat16),
    "accumulated": optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
}
FIRST, SECOND, THIRD = batches()


@pytest.fixture
def opened(open_store):
    def make(every, name="store", tx=TX, dtype=np.float32, **options):
        place = open_store(name, **CHUNKS | options.pop("store", {}))
        return open_step(place, every, tx, dtype, **options)

    return make


def train(step, dtype=np.float32):
    losses = [float(step(batch)[0]) for batch in batches(dtype)[step.store.step :]]
    step.store.wait()
    return losses


@functools.cache
def on_the_host(name="adamw", dtype=np.float32):
    losses, found = [], {}
    with (
        memory_directory() as path,
        small_stores.open_store(path / "s", **CHUNKS) as store,
    ):
        step = open_step(store, None, OPTIMIZERS[name], dtype)
        for batch in batches(dtype):
            losses.append(float(step(batch)[0]))
            store.wait()
            found[store.step] = states(store)
        step.close()
    return losses, found


def num_assigned(step):
    return len(step.store._engine.files.assignment.subgroups)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, np.float32) for name in OPTIMIZERS), ("adamw", jnp.bfloat16)],
)
def test_the_stores_bits_are_those_of_the_host(opened, name, dtype):
    losses, expected = on_the_host(name, dtype)
    for every, durability in ((1, "step"), (2, 2), (3, "checkpoint")):
        own = {"store": {"durability": durability}}
        step = opened(every, f"every{every}", OPTIMIZERS[name], dtype, **own)
        assert train(step, dtype) == losses
        assert num_assigned(step) == 8 // every
        assert_same_states(states(step.store), expected[3])


@pytest.mark.long
def test_a_device_with_memory_of_its_own_gets_and_gives_pinned_memory(opened, late):
    own = {"device_memory_bytes": 64 << 20}
    plain = opened(None, "plain", **own)
    losses, num_copies = train(plain), len(late.copies)
    step = opened(2, "device", **own)
    assert train(step) == losses
    assert_same_states(states(step.store), states(plain.store))
    ways = {(one.source, one.target) for one in late.copies[num_copies:]}
    assert ways >= {("pinned_host", "device"), ("device", "pinned_host")}


@pytest.mark.long
def test_a_gradient_with_nan_is_noticed_on_the_device(opened):
    step = opened(1, nonfinite="skip")
    for batch in (FIRST, np.full_like(FIRST, np.nan), SECOND):
        step(batch)
    step.store.wait()
    assert (step.store.step, step.skipped_steps) == (2, 1)
    assert_same_states(states(step.store), on_the_host()[1][2])


def test_gradients_of_updates_under_way_have_room(open_store, monkeypatch):
    """Also short ones that one of several threads has taken together."""
    params = {f"w{n:02}": np.ones((256, 256), np.float32) for n in range(64)}
    held, most, guard, run = 0, 0, threading.Lock(), StoreSink._update_units

    def count(num_bytes):
        nonlocal held, most
        with guard:
            held += num_bytes
            most = max(most, held)

    def slow(sink, asked):
        num_bytes = sum(one.gradient.nbytes for own in asked.values() for one in own)
        count(num_bytes)
        time.sleep(0.05)
        run(sink, asked)
        count(-num_bytes)

    def loss(params, batch):
        return sum(jnp.sum(jnp.sin(leaf * batch)) for leaf in params.values())

    store, how = open_store(chunk_elements=1 << 16), {"memory_bytes": 48 << 20}
    step = jaxinf.stream(loss, TX, store, device_updates=1, **how)
    step.load(params, batch=np.float32(1))
    monkeypatch.setattr(StoreSink, "_update_units", slow)
    step(np.float32(1))
    largest = 256 << 10
    assert most <= step.plan.memory.gradient_bytes + (NUM_UNDER_WAY - 1) * largest


@pytest.mark.long
def test_state_that_crosses_the_link_is_counted(opened):
    traffic = {}
    for every in (None, 1):
        step = opened(every, f"every-{every}")
        step(FIRST)
        step.store.wait()
        traffic[every] = step.store.metrics.traffic
    num_params, plain, found = 2 * 512 * 512, traffic[None], traffic[1]
    assert found.link_down_bytes - plain.link_down_bytes == 12 * num_params
    # Params from the program, or stored.
    assert found.link_up_bytes - plain.link_up_bytes == (8 + 4 + 4) * num_params
    assert found.drive_write_bytes == plain.drive_write_bytes


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 4])
def test_a_failure_on_the_device_leaves_the_committed_step(opened, number, monkeypatch):
    _, expected = on_the_host()
    step = opened(2)
    step(FIRST)
    step.store.wait()
    fail = raising(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory"))
    with monkeypatch.context() as patched:
        at_call(DeviceUpdater, "_new_states", number, fail, patch=patched)
        with pytest.raises(StoreError, match=r"failed on the device .*no memory"):
            step(SECOND)
    with pytest.raises(StoreError):
        step.close()
    again = opened(2)
    assert again.store.step == 1
    assert_same_states(states(again.store), expected[1])
    train(again)
    assert_same_states(states(again.store), expected[3])


@pytest.mark.long
def test_a_run_goes_on_as_its_commit_says(opened):
    losses, expected = on_the_host()
    step = opened(2)
    found = [float(step(FIRST)[0])]
    step.close()
    for every in (0, 3):
        message = rf"with device_updates=2, found device_upda.*={every}"
        with pytest.raises(StreamError, match=message):
            opened(every)
        jaxinf.close(step.store.path)
    with pytest.raises(ValueError, match=r"give 0 for device_updates and replan=True"):
        opened(None, store={"csd": "emulated"})
    jaxinf.close(step.store.path)
    step = opened(None)
    assert num_assigned(step) == 0, "until it begins"
    found.append(float(step(SECOND)[0]))
    step.close()
    step = opened(3, replan=True)
    found.append(float(step(THIRD)[0]))
    step.store.wait()
    assert step.store._engine.files.commit.device_updates == 3
    assert found == losses
    assert_same_states(states(step.store), expected[3])


INT8, CARDS = {"store": {"state": "int8"}}, {"store": {"csd": "emulated"}}


@pytest.mark.parametrize(
    ("every", "options", "message"),
    [
        *((wrong, {}, "device_updates=.*exp") for wrong in (-1, 1.5, "2", True)),
        (9, {}, "expected more subgroups"),
        (1, INT8, "expected more subgroups"),
        (2, CARDS, r'on csd="emulated" cards update state'),
        ("auto", CARDS, r"device_updates='auto': on csd=.*leave"),
        (2, {"compress": jaxinf.TopK(0.1)}, "device_updates out, or leave compress"),
        (2, {"device_memory_bytes": 3 << 20}, "updates on the device"),
    ],
)
def test_what_the_device_cannot_compute_is_refused(
    opened, every, options, message, place
):
    with pytest.raises((StreamError, ValueError), match=message):
        opened(every, **options)
    assert not (place / "store/jaxinf.json").exists()


# --- k, as measured ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host_s", "device_s", "shared_s", "most", "shared", "every"),
    [
        (4, 10, 3, 8, 4, 4),
        (4, 1, 2, 8, 2, 1),  # all on the device is fastest
        (4, 5, 3.9, 8, 3, 0),  # it would save less than 5 %
        (4, 400, 4, 8, 8, 0),  # the device has one at least
    ],
)
def test_k_is_what_shortens_the_updates(
    host_s, device_s, shared_s, most, shared, every
):
    steps = [(1, 60), (0, host_s), (0, 60), (1, 60), (1, device_s)]
    steps += [(shared, shared_s), (shared, 60)]
    seconds = []
    for tried, seconds_of_step in steps:
        assert next_interval(seconds, most) == tried
        seconds.append(seconds_of_step)
    assert len(seconds) == NUM_TRIED
    assert next_interval(seconds, most) == every


@pytest.mark.long
@pytest.mark.parametrize("every", [4, 0])
def test_k_is_measured_once_and_kept(opened, monkeypatch, caplog, every):
    measured = []

    def chosen(seconds, most):
        measured.append((len(seconds), most))
        assert all(0 < one < 60 for one in seconds)
        return every if len(seconds) == NUM_TRIED else next_interval(seconds, most)

    monkeypatch.setattr(on_device, "next_interval", chosen)
    plain = opened(None, "plain")

    def go_on(asked, num_steps):
        """Trains for some steps; returns k of the last one, and the assigned."""
        step = opened(asked)
        for number in range(num_steps):
            batch = batches()[number % 3]
            assert float(step(batch)[0]) == float(plain(batch)[0])
        step.store.wait()
        assert_same_states(states(step.store), states(plain.store))
        found = step.store._engine.files.commit.device_updates, num_assigned(step)
        step.close()
        return found

    assert go_on("auto", 2) == ("auto", 0)
    assert go_on(None, NUM_TRIED)[0] == "auto"
    with pytest.raises(StreamError, match=r"device_updates=auto, found device_upd.*=2"):
        opened(2)
    jaxinf.close(plain.store.path.with_name("store"))
    assert not caplog.text
    measured.clear()
    kept = every, 8 // every if every else 0
    assert go_on("auto", NUM_TRIED + 2) == kept
    assert measured == [(number, 8) for number in range(NUM_TRIED + 1)]
    assert caplog.text.count(f"device_updates={every}, as measured") == 1
    for asked in ("auto", None, every):
        assert go_on(asked, 1) == kept
    assert len(measured) == NUM_TRIED + 1


@pytest.mark.long
def test_of_coded_state_the_device_computes_none(opened, caplog):
    step = opened("auto", **INT8)
    step(FIRST)
    step.store.wait()
    assert not step.store._engine.files.commit.device_updates
    assert "device_updates=0: the device can compute none" in caplog.text
