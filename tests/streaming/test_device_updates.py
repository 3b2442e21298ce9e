"""Updates that a JAX device computes: the bits of the host's, and what is refused."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from device_updates import CHUNKS, TX, batches, open_step, params_of
from streaming import states

import jaxinf
from jaxinf.csd import Extent
from jaxinf.csd.host import HostCsd
from jaxinf.engine import SubgroupLayout
from jaxinf.errors import (
    AssignmentError,
    BudgetError,
    StoreError,
    StreamError,
)
from jaxinf.layout import Subgroup
from jaxinf.program import trace_update
from jaxinf.streaming.update.device_updates import DeviceUpdater, room_bytes

pytestmark = pytest.mark.optimized

OPTIMIZERS = {
    "adamw": TX,
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "lion": optax.lion(1e-3, mu_dtype=jnp.bfloat16),
    "accumulated": optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
}


@pytest.fixture
def opened(open_store):
    """Opens steps on stores, by name; with their params."""

    def make(every, name, tx=TX, dtype=np.float32, **options):
        place = open_store(name, **CHUNKS | options.pop("store", {}))
        return open_step(place, every, tx, dtype, **options)

    return make


def train(step, dtype=np.float32):
    losses = [float(step(batch)[0]) for batch in batches(dtype)]
    step.store.wait()
    return losses


def num_assigned(step):
    return len(step.store._engine.opened.assignment.subgroups)


def assert_same(step, expected):
    found = states(step.store)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        one, other = (np.asarray(x).view(np.uint8) for x in (found[name], array))
        np.testing.assert_array_equal(one, other, err_msg=str(name))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_stores_bits_are_those_of_the_host(opened, name, dtype):
    plain = opened(None, "plain", OPTIMIZERS[name], dtype)
    losses, expected = train(plain, dtype), states(plain.store)
    for every in (1, 3):
        step = opened(every, f"every{every}", OPTIMIZERS[name], dtype)
        assert train(step, dtype) == losses
        assert num_assigned(step) == 8 // every
        assert_same(step, expected)


@pytest.mark.long
@pytest.mark.parametrize("durability", [2, "checkpoint"])
def test_with_rare_commits_and_state_in_memory(opened, durability):
    plain = opened(None, "plain")
    losses, expected = train(plain), states(plain.store)
    step = opened(2, "kept", store={"durability": durability})
    assert train(step) == losses
    assert_same(step, expected)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_a_device_with_memory_of_its_own_gets_and_gives_pinned_memory(
    opened, late, dtype
):
    own = {"tx": TX, "dtype": dtype, "device_memory_bytes": 64 << 20}
    plain = opened(None, "plain", **own)
    losses, expected = train(plain, dtype), states(plain.store)
    num_copies = len(late.copies)
    step = opened(2, "device", **own)
    assert train(step, dtype) == losses
    assert_same(step, expected)
    ways = {(one.source, one.target) for one in late.copies[num_copies:]}
    assert ("pinned_host", "device") in ways
    assert ("device", "pinned_host") in ways


@pytest.mark.long
@pytest.mark.parametrize("name", ["adamw", "clipped"])
def test_a_gradient_with_nan_is_noticed_on_the_device(opened, name):
    found = []
    for every in (None, 1):
        step = opened(every, f"every-{every}", OPTIMIZERS[name], nonfinite="skip")
        for batch in (batches()[0], np.full_like(batches()[0], np.nan), batches()[1]):
            step(batch)
        step.store.wait()
        assert (step.store.step, step.num_skipped) == (2, 1)
        found.append(step)
    plain, step = found
    assert_same(step, states(plain.store))


def test_the_host_goes_on_while_the_device_computes(opened, monkeypatch):
    host, device = threading.Event(), threading.Event()
    update, number = DeviceUpdater.update, []

    def late(self, *arguments, **named):
        number.append(1)
        if len(number) == 1:
            device.set()
            assert host.wait(60), "the host's update of another subgroup"
        return update(self, *arguments, **named)

    host_update = HostCsd.update

    def on_host(self, *arguments, **named):
        result = host_update(self, *arguments, **named)
        if device.is_set():
            host.set()
        return result

    step = opened(4, "store")
    monkeypatch.setattr(DeviceUpdater, "update", late)
    monkeypatch.setattr(HostCsd, "update", on_host)
    step(batches()[0])
    step.store.wait()
    assert len(number) == 2


@pytest.mark.long
def test_state_that_crosses_the_link_is_counted(opened):
    traffic = {}
    for every in (None, 1):
        step = opened(every, f"every-{every}")
        step(batches()[0])
        step.store.wait()
        traffic[every] = step.store.metrics.traffic
    num_params, plain, found = 2 * 512 * 512, traffic[None], traffic[1]
    down_bytes = found.link_down_bytes - plain.link_down_bytes
    up_bytes = found.link_up_bytes - plain.link_up_bytes
    assert down_bytes == 12 * num_params
    assert up_bytes == (8 + 4 + 4) * num_params  # params from the program, or stored
    assert found.drive_write_bytes == plain.drive_write_bytes


@pytest.mark.long
def test_a_room_holds_what_its_programs_take():
    kernel = trace_update(TX, params_of()).leaves[1].kernel
    num = 1 << 16
    names = ("params", "mu", "nu")
    extents = tuple(Extent(np.dtype(np.float32), num, 0, 4 * num * n) for n in range(3))
    layout = SubgroupLayout(Subgroup(0, 0, 0, 0, num), names, names, extents)
    updates = DeviceUpdater(jax.devices()[0], is_host=True)
    part, half = jax.ShapeDtypeStruct((num,), np.float32), jnp.bfloat16
    codes = [jax.ShapeDtypeStruct((num,), dtype) for dtype in (half, np.int16)]
    scalars = [jax.ShapeDtypeStruct((), dtype) for dtype in kernel.scalar_dtypes]
    programs: list[tuple[Any, tuple[Any, ...]]] = [
        (updates.widen, (part, codes)),
        (updates.program(kernel), (part, part, [part, part], scalars)),
        (updates.add[True], (part, part)),
    ]
    for program, arguments in programs:
        memory = program.lower(*arguments).compile().memory_analysis()
        num_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes
        num_bytes += memory.temp_size_in_bytes - memory.alias_size_in_bytes
        assert 0 < num_bytes <= room_bytes(layout)


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 3, 4])
def test_a_failure_on_the_device_leaves_the_committed_step(opened, number, monkeypatch):
    plain = opened(None, "plain")
    plain(batches()[0])
    plain.store.wait()
    expected = states(plain.store)
    step = opened(2, "store")
    step(batches()[0])
    step.store.wait()
    computed, calls = DeviceUpdater._computed, []

    def failing(self, *arguments, **named):
        calls.append(1)
        if len(calls) == number:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
        return computed(self, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(DeviceUpdater, "_computed", failing)
        with pytest.raises(StoreError, match=r"failed on the device .*no memory"):
            step(batches()[1])
    with pytest.raises(StoreError):
        step.close()
    again = opened(2, "store")
    assert again.store.step == 1
    assert_same(again, expected)
    for batch in batches()[1:]:
        plain(batch)
        again(batch)
    plain.store.wait()
    again.store.wait()
    assert_same(again, states(plain.store))


@pytest.mark.long
def test_a_run_goes_on_as_its_commit_says(opened):
    plain = opened(None, "plain")
    losses, expected = train(plain), states(plain.store)
    step = opened(2, "store")
    found = [float(step(batches()[0])[0])]
    step.close()
    for every in (0, 3):
        with pytest.raises(
            AssignmentError,
            match=rf"with device_updates=2, found device_upda.*={every}",
        ):
            opened(every, "store")
        jaxinf.close(step.store.path)
    with pytest.raises(ValueError, match=r"give 0 for device_updates and replan=True"):
        opened(None, "store", store={"csd": "emulated"})
    jaxinf.close(step.store.path)
    step = opened(None, "store")
    assert num_assigned(step) == 0, "until it begins"
    found.append(float(step(batches()[1])[0]))
    step.close()
    step = opened(3, "store", replan=True)
    found.append(float(step(batches()[2])[0]))
    step.store.wait()
    assert step.store._engine.opened.commit.device_updates == 3
    assert found == losses
    assert_same(step, expected)


@pytest.mark.parametrize("every", [-1, 1.5, "auto", True])
def test_what_is_no_number_of_subgroups_is_refused(every, opened):
    with pytest.raises(ValueError, match=r"device_updates=.*expected"):
        opened(every, "store")


def test_what_the_device_cannot_compute_is_refused(opened, place):
    with pytest.raises(StreamError, match=r"expected more subgroups"):
        opened(9, "nine")
    with pytest.raises(StreamError, match=r"expected more subgroups"):
        opened(1, "coded", store={"state": "int8"})
    with pytest.raises(ValueError, match=r'on csd="emulated" cards update state'):
        opened(2, "cards", store={"csd": "emulated"})
    with pytest.raises(ValueError, match=r"device_updates out, or leave compress"):
        opened(2, "sent", compress=jaxinf.TopK(0.1))
    with pytest.raises(BudgetError, match=r"updates on the device"):
        opened(2, "small", device_memory_bytes=3 << 20)
    assert not any((place / name).exists() for name in ("nine", "small"))
