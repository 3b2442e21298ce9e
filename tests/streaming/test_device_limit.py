"""What a device says of itself decides what a step may take of it, or is refused."""

from types import SimpleNamespace

import jax
import optax
import pytest
from families import family
from zoo import ZOO

import jaxinf
from jaxinf.errors import StreamError
from jaxinf.streaming.plan import memory
from jaxinf.streaming.plan import options as step_options
from jaxinf.streaming.plan.device import check_pinned, device_limit, mesh_limit
from jaxinf.streaming.plan.memory import DeviceLimit, divide

pytestmark = pytest.mark.optimized("long")

GIB = 1 << 30
H100 = "NVIDIA H100 80GB HBM3"
MIG = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
KINDS = ("device", "pinned_host", "unpinned_host")


class Device:
    """A device of a plugin, as far as JAX shows it."""

    def __init__(self, number=0, kind=H100, kinds=KINDS, platform="gpu", **stats):
        self.id, self.device_kind, self.platform = number, kind, platform
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


def test_the_default_is_what_a_device_has_free():
    device = Device(bytes_limit=3000, bytes_in_use=1000, pool_bytes=3000)
    expected = DeviceLimit(1800, is_host=False, spare_bytes=200, pool_factor=2)
    assert device_limit(device, None) == expected
    given = DeviceLimit(5, is_host=False, pool_factor=2)
    assert device_limit(device, 5) == given
    assert device_limit(Device(platform="tpu"), 5).pool_factor == 1
    assert device_limit(jax.devices("cpu")[0], None) == DeviceLimit()


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (Device(), "does not tell the size of its memory"),
        (
            Device(kinds=("device",), bytes_limit=GIB),
            r"'pinned_host'.* found device; upgrade",
        ),
        (
            Device(kind=MIG, bytes_limit=GIB, bytes_in_use=GIB, pool_bytes=GIB),
            r"id=0\) \(NVIDIA.*MIG 1g\.10gb\) has nothing free of 1\.00 GiB.* Delete",
        ),
    ],
)
def test_devices_without_memory_to_plan_for(device, message):
    with pytest.raises(StreamError, match=message):
        device_limit(device, None)


def test_a_device_that_another_process_has_filled():
    device = Device(bytes_limit=10 * GIB, bytes_in_use=0, pool_bytes=GIB)
    with pytest.warns(UserWarning, match=r"1\.00 GiB of 10\.0 GiB; another process"):
        assert device_limit(device, None).num_bytes == int(0.9 * GIB)


def test_memory_that_is_not_reserved(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    device = Device(bytes_limit=10 * GIB, bytes_in_use=0, pool_bytes=0)
    assert device_limit(device, None).num_bytes == 9 * GIB
    assert device_limit(device, GIB).num_bytes == GIB


def test_the_smallest_device_of_a_mesh_counts():
    devices = [
        Device(0, bytes_limit=80 * GIB, bytes_in_use=0),
        Device(1, "NVIDIA RTX 4090", bytes_limit=20 * GIB, bytes_in_use=0),
    ]
    assert mesh_limit(devices, None).num_bytes == 18 * GIB
    assert mesh_limit(devices, GIB).num_bytes == GIB
    assert mesh_limit(devices[:1], None).num_bytes == 72 * GIB


def test_pinned_memory_ends_where_xlas_pool_does(monkeypatch):
    check_pinned(Device(), 64 * GIB)
    check_pinned(Device(platform="tpu"), 100 * GIB)
    check_pinned(jax.devices("cpu")[0], 100 * GIB)
    text = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=100 before"
    with pytest.raises(StreamError, match=text):
        check_pinned(Device(), 100 * GIB)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "200")
    check_pinned(Device(), 100 * GIB)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "64G")
    with pytest.raises(StreamError, match="'64G': expected a whole number"):
        check_pinned(Device(), GIB)


@pytest.fixture
def apart(monkeypatch):
    """A CPU whose memory is not the host's, as far as planning sees it."""
    monkeypatch.setattr(memory, "device_is_host", lambda device: False)

    def put(**stats):
        found = Device(**stats)
        monkeypatch.setattr(
            step_options, "device_limit", lambda _, given: device_limit(found, given)
        )
        return found

    return put


def step_of(store, **options):
    program = ZOO["l2_penalty"]()
    step = jaxinf.stream(
        program.loss, optax.sgd(0.1), store, memory_bytes=256 << 20, **options
    )
    step.load(program.params, batch=program.batch)
    return step, program.batch


def test_a_kept_plan_on_a_fuller_device(open_store, apart):
    """A tenth of what is free is left when a step is planned, but not later."""
    apart(bytes_limit=GIB, bytes_in_use=0)
    step, batch = step_of(open_store())
    with step:
        step(batch)
        cuts, peak_bytes = step.plan.cuts, step.plan.peak_bytes
    # The largest gradients take an eighth; a bit less is left than was planned with.
    free_bytes = int(0.97 * peak_bytes / 0.9 * 8 / 7)
    apart(bytes_limit=GIB, bytes_in_use=GIB - free_bytes)
    step, batch = step_of(open_store())
    with step:
        assert step.plan.cuts == cuts
        step(batch)
    apart(bytes_limit=GIB, bytes_in_use=GIB - free_bytes * 8 // 10)
    with pytest.raises(StreamError, match=r"that the store was trained with.*replan"):
        step_of(open_store())


def test_the_rounding_of_a_pool_is_planned():
    given = {"memory_bytes": 1 << 30, "ring_bytes": 0, "gradient_bytes": 1 << 20}
    one, two = (
        divide(**given, device=DeviceLimit(GIB, is_host=False, pool_factor=factor))
        for factor in (1, 2)
    )
    assert one.gradients == 2 * two.gradients
    assert (one.staged, one.ring) == (two.staged, two.ring)
    for with_values in (False, True):
        pool_bytes = one.pool_bytes(with_values=with_values)
        assert two.pool_bytes(with_values=with_values) == pool_bytes
    assert one.pool_bytes(with_values=True) == one.gradients + one.staged


def makers(path):
    """What is made on a device: a step with a store, one without, a function."""
    program = ZOO["l2_penalty"]()
    options = {"memory_bytes": "200GiB", "policy": "offload"}
    stepped = jaxinf.stream(program.loss, optax.sgd(0.1), path / "new", **options)
    yield lambda: stepped.load(program.params, batch=program.batch)
    held = jaxinf.stream_in_memory(program.loss, optax.sgd(0.1), **options)
    yield lambda: held.load(program.params, batch=program.batch)
    step_of(path / "store", device_memory_bytes=GIB)[0].close()

    def called():
        function = jaxinf.stream_function(
            program.loss, path / "store", memory_bytes="200GiB"
        )
        function.load(program.params)
        function(program.batch)

    yield called


@pytest.mark.parametrize(
    "number", family(range(3), short=[2]), ids=["step", "in memory", "function"]
)
def test_steps_and_functions_look_at_the_device(place, apart, monkeypatch, number):
    make = list(makers(place))[number]
    device = apart(bytes_limit=GIB, bytes_in_use=GIB)
    with pytest.raises(StreamError, match="nothing free"):
        make()
    if number == 2:
        return  # no value of it leaves the device
    make = list(makers(place / "again"))[number]
    device.stats["bytes_in_use"] = 0
    monkeypatch.setattr(step_options, "default_device", lambda: device)
    with pytest.raises(StreamError, match="XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB="):
        make()
