"""Params on a device with memory of its own: the same path, forced on a CPU."""

import contextlib
import threading
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from families import family
from inject import at_each_call, raising
from jax.sharding import SingleDeviceSharding
from streaming_cases import assert_same_states, read_ahead, trained, unit
from zoo import ZOO

from jaxinf.errors import BudgetError, StreamError
from jaxinf.streaming.move.host_buffers import HostBuffers
from jaxinf.streaming.move.work_queues import WorkQueues
from jaxinf.streaming.plan.cut_to_fit import plan_or_advise
from jaxinf.streaming.plan.memory import Budget, DeviceLimit, check_pinned, limit_of
from jaxinf.streaming.plan.reads import Fetch
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.update import gradients

pytestmark = pytest.mark.optimized

PAGE_BYTES = 4096
ADAMW = optax.adamw(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAMW)


def params_of(num_leaves, device_pages, host_pages):
    """The leaves that were read, of which call n uses the n-th; what reads them."""
    fetches = [Fetch(unit(leaf), leaf, leaf) for leaf in range(num_leaves)]
    read, sizes = [], (device_pages * PAGE_BYTES, host_pages * PAGE_BYTES)
    return read, read_ahead(fetches, *sizes, read)


WARNING = r"could not be registered.*full.*ulimit -l"


@pytest.mark.parametrize("registers", [False, True, "full"])
def test_buffers_are_reused_only_after_their_copy(late, registers, monkeypatch):
    """Each param is copied once, or twice if no memory can be registered."""
    late.registers, full = registers, contextlib.nullcontext()
    if registers == "full":
        monkeypatch.setattr(late, "dma_map", raising(RuntimeError("it is full")))
        full = pytest.warns(UserWarning, match=WARNING)
    with full, contextlib.closing(params_of(12, 12, 2)[1]) as params:
        params.begin()
        for leaf in [*range(12)] * 2:
            array = params.get(leaf, Piece(leaf))
            assert array.sharding.memory_kind == "device"
        for leaf in range(12):
            found = params.get(leaf, Piece(leaf))
            np.testing.assert_array_equal(found, np.full(1024, leaf, np.float32))
    on_the_way = late.copied_bytes("pinned_host"), late.copied_bytes("device")
    pages = {False: (12, 12), True: (0, 12), "full": (0, 24)}[registers]
    assert on_the_way == tuple(n * PAGE_BYTES for n in pages)
    assert not late.registered


def test_no_more_is_read_ahead_than_the_device_holds():
    read, params = params_of(6, device_pages=2, host_pages=2)
    params.begin()
    for leaf in range(6):
        np.testing.assert_array_equal(params.get(leaf, Piece(leaf))[0], leaf)
        assert len(read) <= leaf + 4  # two there, two read
        if leaf:
            params.after_call(leaf - 1)
    params.close()


def test_what_is_pinned_on_its_way_has_its_memory(monkeypatch):
    """Short tensors that wait together, each for two devices."""
    jobs, goes_on, pinned_bytes = WorkQueues(), threading.Event(), []
    to = SingleDeviceSharding(jax.devices()[0])
    room = {"has_link": True, "pinned_bytes": 2 * PAGE_BYTES}
    buffers = HostBuffers(jobs, "pages", PAGE_BYTES, **room)

    def note(arrays, places):
        pinned_bytes.append(sum(x.nbytes for x in arrays if type(x) is np.ndarray))

    at_each_call(monkeypatch, jax, "device_put", note)
    jobs.submit(goes_on.wait, buffers._queue)  # the one thread
    found = []
    for number in range(7):
        page = np.full(1024, number, np.float32)
        buffers.start_copy([(page, to), (page, to)], found.append)
    goes_on.set()
    jobs.wait_all()
    assert sum(pinned_bytes) == 7 * PAGE_BYTES
    assert max(pinned_bytes) == 2 * PAGE_BYTES
    assert [float(x[0]) for copies in found for x in copies] == [
        n for n in range(7) for _ in range(2)
    ]
    jobs.close()


@pytest.mark.parametrize("host_pages", [None, 2])
def test_a_step_is_given_up_while_a_read_waits(host_pages):
    """For memory that an update has, or for room on the device."""
    fetches = [Fetch(unit(0), 0, 0, gradient=3), Fetch(unit(1), 1, 1)]
    host_bytes = host_pages and host_pages * PAGE_BYTES
    num_threads, jobs = threading.active_count(), WorkQueues()
    params = read_ahead(fetches, PAGE_BYTES, host_bytes, jobs=jobs)
    params.begin()
    params.get(0, Piece(0))
    if host_pages is None:
        params.after_call(0)
    jobs.reset()
    params.stop()
    params.begin()
    np.testing.assert_array_equal(params.get(0, Piece(0)), np.zeros(1024))
    params.after_call(0)
    np.testing.assert_array_equal(
        params.shards_for_update(unit(0)), np.zeros((1, 1024))
    )
    params.end_update(unit(0))
    assert params.shards_for_update(unit(0)) is None
    np.testing.assert_array_equal(params.get(1, Piece(1)), np.ones(1024))
    jobs.close()
    params.close()
    assert threading.active_count() == num_threads


@pytest.fixture
def same_bits(streamed, request):
    """Compares steps on the late device, which `given` gets, with those on the host."""

    def compare(name, policy, tx, given=None, **options):
        program, options = ZOO[name](), {"policy": policy, **options}
        losses, expected = trained(streamed(program, tx, "host", **options), program)
        late = request.getfixturevalue("late")
        if given is not None:
            given(late)
        options["device_memory_bytes"] = 64 << 20
        step = streamed(program, tx, "device", **options)
        late_losses, found = trained(step, program)
        assert_same_states(found, expected)
        assert late_losses == losses
        return late

    return compare


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "policy", "tx"),
    [
        ("stack_by_index", "recompute", CLIPPED),
        ("tied_and_unused", "keep", ADAMW),
        ("half_precision_loss", "recompute", ADAMW),
    ],
)
def test_steps_have_the_same_bits(name, policy, tx, same_bits):
    late = same_bits(name, policy, tx)
    ways = {(one.source, one.target, one.num_copies) for one in late.copies}
    assert ways == {("registered", "device", 1), ("device", "pinned_host", 1)}


GRADIENTS = {
    "an update each": (ADAMW, {}),
    "all wait": (CLIPPED, {}),
    "parts of a batch": (ADAMW, {"micro_batches": 2}),
}


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("way", family(GRADIENTS, short=["all wait"]))
def test_a_gradient_that_is_read_before_its_copy_has_ended_is_noticed(
    same_bits, monkeypatch, way, waits
):
    """Each copy of a gradient ends when somebody waits for it, and no earlier."""
    (tx, options), arrived = GRADIENTS[way], gradients.wait_for_copy

    def given(late):
        def read(copy):
            early = late.before_its_end(copy)
            return arrived(copy) if waits else early

        monkeypatch.setattr(gradients, "wait_for_copy", read)

    noticed = pytest.raises(AssertionError)
    with contextlib.nullcontext() if waits else noticed:
        same_bits("stack_by_index", "recompute", tx, given, **options)


@pytest.mark.parametrize("is_host", [False, True])
def test_a_device_that_is_too_small_is_named(is_host, streamed, request):
    """On a CPU it is a part of the host's memory."""
    program = ZOO["l2_penalty"](depth=3)
    if not is_host:
        request.getfixturevalue("own_memory")
    num_bytes = max(leaf.nbytes for leaf in jax.tree.leaves(program.params))
    step = streamed(program, optax.sgd(0.1), device_memory_bytes=2 * num_bytes)
    message = r"device_memory_bytes=.* works, or give another number of micro_"
    with pytest.raises(StreamError, match=message):
        trained(step, program)
    enough = streamed(program, optax.sgd(0.1), device_memory_bytes=64 << 20)
    trained(enough, program)


def test_a_budget_that_works_is_within_what_a_device_has_free():
    """A kept plan may need more than the share that is the default."""
    budget = Budget(1 << 30, device=DeviceLimit(900 << 20, is_host=False))

    def refused(needed):
        def plan(tried):
            missing = needed - (tried.device_memory_bytes or tried.device.num_bytes)
            if missing > 0:
                raise BudgetError("device_memory_bytes", "it is small", missing)

        with pytest.raises(BudgetError) as found:
            plan_or_advise(budget, plan, advises=True)
        return str(found.value)

    assert 'device_memory_bytes="981MiB" works' in refused(950 << 20)
    assert "raise device_memory_bytes by at least 110 MiB" in refused(1010 << 20)


# --- what a device says of itself -----------------------------------------------------


GIB = 1 << 30


class Device:
    """A device of a plugin, as far as JAX shows it."""

    def __init__(self, kind="NVIDIA H100", platform="gpu", **stats):
        self.id, self.device_kind, self.platform = 0, kind, platform
        self.stats = stats

    def __repr__(self):
        return f"CudaDevice(id={self.id})"

    def memory_stats(self):
        return self.stats or None


def limit(*devices, given=None):
    return limit_of(SimpleNamespace(local_devices=devices), given)


def test_the_default_is_what_a_device_has_free():
    device = Device(bytes_limit=3000, bytes_in_use=1000)
    assert limit(device) == DeviceLimit(1800, is_host=False, pool_factor=2)
    assert limit(device, given=5) == DeviceLimit(5, is_host=False, pool_factor=2)
    assert limit(Device(platform="tpu"), given=5).pool_factor == 1
    assert limit(*jax.devices("cpu")) == limit_of(None, None) == DeviceLimit()
    # The smallest device of a mesh counts.
    devices = [Device(bytes_limit=n * GIB, bytes_in_use=0) for n in (80, 20)]
    assert limit(*devices).num_bytes == 18 * GIB
    assert limit(*devices, given=GIB).num_bytes == GIB


VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
FULL = Device("NVIDIA H100 MIG 1g.10gb", bytes_limit=GIB, bytes_in_use=GIB)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: limit(Device()), "does not tell the size of its memory"),
        (lambda: limit(FULL), r"\(NVIDIA.*1g\.10gb\) has nothing free of 1.* Delete"),
        (lambda: check_pinned(100 * GIB), f"{VARIABLE}=100, a whole number, before"),
    ],
)
def test_what_cannot_be_planned_for_is_refused(call, message, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(StreamError, match=message):
        call()
