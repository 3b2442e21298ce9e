"""What a device says of itself decides what a step may take of it, or is refused."""

from types import SimpleNamespace

import jax
import pytest

from jaxinf.errors import StreamError
from jaxinf.streaming.plan.device import check_pinned, device_limit, mesh_limit
from jaxinf.streaming.plan.memory import DeviceLimit

GIB = 1 << 30
H100 = "NVIDIA H100 80GB HBM3"
MIG = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
KINDS = ("device", "pinned_host", "unpinned_host")


class Device:
    """A device of a plugin, as far as JAX shows it."""

    def __init__(self, number=0, kind=H100, kinds=KINDS, platform="gpu", **stats):
        self.id, self.device_kind, self.platform = number, kind, platform
        self._kinds, self._stats = kinds, stats

    def __repr__(self):
        return f"CudaDevice(id={self.id})"

    def addressable_memories(self):
        return [SimpleNamespace(kind=kind) for kind in self._kinds]

    def memory_stats(self):
        return self._stats or None


@pytest.fixture(autouse=True)
def reserved(monkeypatch):
    """XLA reserves memory in advance, as it does unless told not to."""
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)


def test_the_default_is_what_a_device_has_free():
    device = Device(bytes_limit=3000, bytes_in_use=1000, pool_bytes=3000)
    assert device_limit(device, None) == DeviceLimit(1800, is_host=False)
    assert device_limit(device, 5) == DeviceLimit(5, is_host=False)
    assert device_limit(jax.devices("cpu")[0], None) == DeviceLimit()


def test_a_device_that_does_not_tell_its_size():
    with pytest.raises(StreamError, match="does not tell the size of its memory"):
        device_limit(Device(), None)


@pytest.mark.parametrize("num_bytes", [None, 5])
def test_a_platform_without_pinned_memory_of_the_host(num_bytes):
    device = Device(kinds=("device",), bytes_limit=GIB)
    with pytest.raises(StreamError, match=r"'pinned_host'.* found device; upgrade"):
        device_limit(device, num_bytes)


def test_a_device_that_this_process_has_filled():
    device = Device(bytes_limit=GIB, bytes_in_use=GIB, pool_bytes=GIB)
    with pytest.raises(StreamError, match=r"nothing free of 1\.00 GiB.* Delete them"):
        device_limit(device, None)


def test_a_device_that_another_process_has_filled():
    device = Device(bytes_limit=10 * GIB, bytes_in_use=0, pool_bytes=GIB)
    with pytest.warns(UserWarning, match=r"1\.00 GiB of 10\.0 GiB; another process"):
        assert device_limit(device, None).num_bytes == int(0.9 * GIB)


def test_memory_that_is_not_reserved(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    device = Device(bytes_limit=10 * GIB, bytes_in_use=0, pool_bytes=0)
    with pytest.warns(UserWarning, match="not reserved.* device_memory_bytes"):
        assert device_limit(device, None).num_bytes == 9 * GIB
    assert device_limit(device, GIB).num_bytes == GIB


def test_a_slice_of_a_gpu_counts_alone_and_is_named():
    device = Device(kind=MIG, bytes_limit=10 * GIB, bytes_in_use=0)
    assert device_limit(device, None).num_bytes == 9 * GIB
    full = Device(kind=MIG, bytes_limit=GIB, bytes_in_use=GIB)
    with pytest.raises(StreamError, match=r"id=0\) \(NVIDIA.*MIG 1g\.10gb\) has"):
        device_limit(full, None)


def test_the_smallest_device_of_a_mesh_counts():
    devices = [
        Device(0, bytes_limit=80 * GIB, bytes_in_use=0),
        Device(1, "NVIDIA RTX 4090", bytes_limit=20 * GIB, bytes_in_use=0),
    ]
    with pytest.warns(UserWarning, match=r"id=1\) \(NVIDIA RTX 4090\).* smallest"):
        assert mesh_limit(devices, None).num_bytes == 18 * GIB
    assert mesh_limit(devices, GIB).num_bytes == GIB
    assert mesh_limit(devices[:1], None).num_bytes == 72 * GIB


def test_pinned_memory_ends_where_xlas_pool_does(monkeypatch):
    check_pinned(Device(), 64 * GIB)
    check_pinned(Device(platform="tpu"), 100 * GIB)
    check_pinned(jax.devices("cpu")[0], 100 * GIB)
    text = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=200 before"
    with pytest.raises(StreamError, match=text):
        check_pinned(Device(), 100 * GIB)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "200")
    check_pinned(Device(), 100 * GIB)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "64G")
    with pytest.raises(StreamError, match="'64G': expected a whole number"):
        check_pinned(Device(), GIB)
