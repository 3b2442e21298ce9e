"""What a device says of itself decides what a step may take of it, or is refused."""

from types import SimpleNamespace

import jax
import optax
import pytest
from families import family
from zoo import ZOO

import jaxinf
from jaxinf.errors import StreamError
from jaxinf.streaming.plan import cut_to_fit as cutting
from jaxinf.streaming.plan import memory
from jaxinf.streaming.plan.memory import (
    DeviceLimit,
    StepNeeds,
    check_pinned,
    device_limit,
    divide,
)

pytestmark = pytest.mark.optimized("long")

GIB = 1 << 30
MIG = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
KINDS = ("device", "pinned_host", "unpinned_host")


class Device:
    """A device of a plugin, as far as JAX shows it."""

    def __init__(self, kind="NVIDIA H100", kinds=KINDS, platform="gpu", **stats):
        self.id, self.device_kind, self.platform = 0, kind, platform
        self._kinds, self.stats = kinds, stats

    def __repr__(self):
        return f"CudaDevice(id={self.id})"

    def addressable_memories(self):
        return [SimpleNamespace(kind=kind) for kind in self._kinds]

    def memory_stats(self):
        return self.stats or None


@pytest.fixture(autouse=True)
def reserved(monkeypatch):
    """XLA reserves memory in advance, as it does unless told not to."""
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)


def test_the_default_is_what_a_device_has_free(monkeypatch):
    device = Device(bytes_limit=3000, bytes_in_use=1000, pool_bytes=3000)
    expected = DeviceLimit(1800, is_host=False, spare_bytes=200, pool_factor=2)
    assert device_limit(device, None) == expected
    assert device_limit(device, 5) == DeviceLimit(5, is_host=False, pool_factor=2)
    assert device_limit(Device(platform="tpu"), 5).pool_factor == 1
    assert device_limit(jax.devices("cpu")[0], None) == DeviceLimit()
    filled = Device(bytes_limit=10 * GIB, bytes_in_use=0, pool_bytes=GIB)
    assert device_limit(filled, None).num_bytes == int(0.9 * GIB)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert device_limit(filled, None).num_bytes == 9 * GIB
    # The smallest device of a mesh counts.
    devices = [Device(bytes_limit=n * GIB, bytes_in_use=0) for n in (80, 20)]
    mesh = SimpleNamespace(local_devices=devices)
    limits = [memory.limit_of(mesh, given) for given in (None, GIB)]
    assert [one.num_bytes for one in limits] == [18 * GIB, GIB]


def limit_of(**device):
    return device_limit(Device(**device), None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (limit_of, "does not tell the size of its memory"),
        (
            lambda: limit_of(kinds=("device",), bytes_limit=GIB),
            r"'pinned_host'.* found device; upgrade",
        ),
        (
            lambda: limit_of(
                kind=MIG, bytes_limit=GIB, bytes_in_use=GIB, pool_bytes=GIB
            ),
            r"id=0\) \(NVIDIA.*MIG 1g\.10gb\) has nothing free of 1\.00 GiB.* Delete",
        ),
        (
            lambda: check_pinned(Device(), 100 * GIB),
            "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=100, a whole number, before",
        ),
    ],
)
def test_what_cannot_be_planned_for_is_refused(call, message):
    with pytest.raises(StreamError, match=message):
        call()


def test_pinned_memory_ends_where_xlas_pool_does(monkeypatch):
    check_pinned(Device(), 64 * GIB)
    check_pinned(Device(platform="tpu"), 100 * GIB)
    check_pinned(jax.devices("cpu")[0], 100 * GIB)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "200")
    check_pinned(Device(), 100 * GIB)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "200G")  # XLA's default
    with pytest.raises(StreamError, match=r"ends at 64 GiB.*=100, a whole number"):
        check_pinned(Device(), 100 * GIB)


def test_the_rounding_of_a_pool_is_planned():
    needs = StepNeeds(ring_bytes=0, gradient_bytes=1 << 20)
    one, two = (
        divide(GIB, needs, DeviceLimit(GIB, is_host=False, pool_factor=factor))
        for factor in (1, 2)
    )
    assert one.gradients == 2 * two.gradients
    assert (one.staged, one.ring) == (two.staged, two.ring)


@pytest.fixture
def apart(monkeypatch):
    """A CPU whose memory is not the host's, as far as planning sees it."""
    monkeypatch.setattr(memory, "device_is_host", lambda device: False)

    def put(**stats):
        found = Device(**stats)
        monkeypatch.setattr(
            memory, "device_limit", lambda _, given: device_limit(found, given)
        )
        return found

    return put


PROGRAM, TX = ZOO["l2_penalty"](), optax.sgd(0.1)
OFFLOAD = {"memory_bytes": "200GiB", "policy": "offload"}


def load(step):
    step.load(PROGRAM.params, batch=PROGRAM.batch)
    return step


def test_a_kept_plan_on_a_fuller_device(open_store, apart):
    """A tenth of what is free is left when a step is planned, but not later."""

    def stepped():
        options = {"memory_bytes": 256 << 20}
        with load(jaxinf.stream(PROGRAM.loss, TX, open_store(), **options)) as step:
            step(PROGRAM.batch)
        return step.plan

    apart(bytes_limit=GIB, bytes_in_use=0)
    plan = stepped()
    # The largest gradients take an eighth; a bit less is left than was planned with.
    free_bytes = int(0.97 * plan.peak_bytes / 0.9 * 8 / 7)
    apart(bytes_limit=GIB, bytes_in_use=GIB - free_bytes)
    assert stepped().cuts == plan.cuts
    apart(bytes_limit=GIB, bytes_in_use=GIB - free_bytes * 8 // 10)
    with pytest.raises(StreamError, match=r"that the store was trained with.*replan"):
        stepped()


def step_of(path):
    load(jaxinf.stream(PROGRAM.loss, TX, path / "new", **OFFLOAD))


def in_memory(path):
    load(jaxinf.stream_in_memory(PROGRAM.loss, TX, **OFFLOAD))


def function_of(path):
    own = {"memory_bytes": 256 << 20, "device_memory_bytes": GIB}
    load(jaxinf.stream(PROGRAM.loss, TX, path / "store", **own)).close()
    f = jaxinf.stream_function(PROGRAM.loss, path / "store", memory_bytes="200GiB")
    f.load(PROGRAM.params)
    f(PROGRAM.batch)


MAKERS = [step_of, in_memory, function_of]


@pytest.mark.parametrize("make", family(MAKERS, short=[function_of]))
def test_steps_and_functions_look_at_the_device(place, apart, monkeypatch, make):
    device = apart(bytes_limit=GIB, bytes_in_use=GIB)
    with pytest.raises(StreamError, match="nothing free"):
        make(place)
    if make is not function_of:  # no value of it leaves the device
        device.stats["bytes_in_use"] = 0
        monkeypatch.setattr(cutting, "default_device", lambda: device)
        with pytest.raises(StreamError, match="XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB="):
            make(place / "again")
