"""Params on a device with memory of its own: the same path, forced on a CPU."""

import contextlib
import time
from itertools import product

import jax
import numpy as np
import optax
import pytest
from families import family
from streaming import read_ahead, states
from zoo import ZOO

import jaxinf
from jaxinf.errors import StreamError
from jaxinf.streaming.plan.memory import DeviceLimit, divide
from jaxinf.streaming.plan.reads import Fetch
from jaxinf.streaming.program import shards
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.units import Unit

pytestmark = pytest.mark.optimized

PAGE_BYTES = 4096
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
CHUNKS = {"chunk_elements": 4096, "memory_bytes": 16 << 20}


def unit(leaf):
    return Unit(leaf, (), (1024,), np.dtype(np.float32))


class Numbers:
    """Units filled with their leaf's number."""

    version = 0, 0

    def __init__(self):
        self.read_leaves = []

    def begin(self, num_first):
        self.read_leaves.clear()

    def read(self, unit, shards):
        self.read_leaves.append(unit.leaf)
        shards[0][...] = unit.leaf

    def close(self):
        pass


def params_of(fetches, device_pages, host_pages):
    source = Numbers()
    sizes = device_pages * PAGE_BYTES, host_pages * PAGE_BYTES
    return source, read_ahead(source, fetches, *sizes)


def gets_its_own_bits():
    fetches = [Fetch(unit(leaf), leaf, leaf) for leaf in range(12)]
    _, params = params_of(fetches, device_pages=12, host_pages=2)
    with contextlib.closing(params):
        params.begin()
        for leaf in range(12):
            params.get(leaf, Piece(leaf))
        for leaf in range(12):
            array = params.get(leaf, Piece(leaf))
            assert array.sharding.memory_kind == "device"
            np.testing.assert_array_equal(array, np.full(1024, leaf, np.float32))


@pytest.mark.parametrize("registers", [False, True])
def test_buffers_are_reused_only_after_their_copy(late, registers):
    """Each param is copied once, or twice if no memory can be registered."""
    late.registers = registers
    gets_its_own_bits()
    assert late.copied_bytes("device") == 12 * PAGE_BYTES
    on_the_way = late.copied_bytes("pinned_host")
    assert on_the_way == (0 if registers else 12 * PAGE_BYTES)
    assert not late.registered


def test_units_that_wait_are_copied_by_one_call(late):
    fetches = [Fetch(unit(leaf), leaf, leaf) for leaf in range(12)]
    source, params = params_of(fetches, device_pages=12, host_pages=12)
    late.goes_on.clear()
    params.begin()
    while len(source.read_leaves) < 12:
        time.sleep(1e-3)
    late.goes_on.set()
    for leaf in range(12):
        params.get(leaf, Piece(leaf))
    params.close()
    # The copies of two calls were under way, and the last unit was just read.
    assert sum(late.calls) == 12
    assert len(late.calls) <= 4


def test_memory_that_is_not_registered_is_copied_once_more(late, monkeypatch):
    monkeypatch.setattr(late, "dma_map", fails)
    with pytest.warns(UserWarning, match=r"could not be registered.*full.*ulimit -l"):
        gets_its_own_bits()
    assert late.copied_bytes("device") == 2 * 12 * PAGE_BYTES


def fails(*_):
    raise RuntimeError("it is full")


@pytest.mark.parametrize("registers", [False, True])
def test_a_wait_that_is_left_out_is_noticed(late, registers, monkeypatch):
    late.registers = registers
    monkeypatch.setattr(jax, "block_until_ready", lambda arrays: arrays)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        gets_its_own_bits()
    late.faults.clear()  # memory may have been unregistered meanwhile


def test_no_more_is_read_ahead_than_the_device_holds():
    fetches = [Fetch(unit(leaf), leaf, leaf) for leaf in range(6)]
    source, params = params_of(fetches, device_pages=2, host_pages=2)
    params.begin()
    for leaf in range(6):
        np.testing.assert_array_equal(params.get(leaf, Piece(leaf))[0], leaf)
        assert len(source.read_leaves) <= leaf + 4  # two there, two read
        if leaf:
            params.done(leaf - 1)
    params.close()


def test_a_step_is_given_up_while_a_read_waits_for_the_device():
    fetches = [Fetch(unit(0), 0, 0), Fetch(unit(1), 1, 1)]
    _, params = params_of(fetches, device_pages=1, host_pages=2)
    for _ in range(2):
        params.begin()
        params.get(0, Piece(0))
        params.stop()
    params.close()


def test_units_for_updates_stay_on_the_host():
    fetches = [Fetch(unit(leaf), leaf, leaf, gradient=leaf) for leaf in range(3)]
    _, params = params_of(fetches, device_pages=3, host_pages=3)
    params.begin()
    for leaf in range(3):
        params.get(leaf, Piece(leaf))
        params.done(leaf)
    for leaf in range(3):
        taken = params.take(unit(leaf))
        np.testing.assert_array_equal(taken, np.full((1, 1024), leaf))
        params.free(unit(leaf))
        assert params.take(unit(leaf)) is None
    params.close()


def trained(store, program, tx, policy, num_steps=3, **options):
    """Losses and states; the meters show what the plan says."""
    step = jaxinf.stream(
        program.loss,
        tx,
        store,
        memory_bytes=256 << 20,
        has_aux=program.has_aux,
        policy=policy,
        **options,
    )
    step.load(program.params, batch=program.batch)
    losses = [float(step(program.batch)[0]) for _ in range(num_steps)]
    store.wait()
    traffic, planned = store.metrics.traffic, step.traffic
    assert traffic.drive_read_bytes == planned.drive_read_bytes
    assert traffic.drive_write_bytes == planned.drive_write_bytes
    return losses, states(store)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "policy", "tx"),
    [
        ("stack_by_index", "recompute", CLIPPED),
        ("tied_and_unused", "keep", optax.adamw(1e-2)),
        pytest.param(
            *("half_precision_loss", "recompute", optax.adamw(1e-2)),
            marks=pytest.mark.long,
        ),
    ],
)
def test_steps_have_the_same_bits(name, policy, tx, open_store, request):
    late = has_the_same_bits(open_store, request, ZOO[name](), tx, policy)
    ways = {(one.source, one.target, one.num_copies) for one in late.copies}
    assert ways == {("registered", "device", 1), ("device", "pinned_host", 1)}


def has_the_same_bits(open_store, request, program, tx, policy, given=None, **options):
    """Compares steps on the late device, which `given` gets, with those on the host."""
    made_of = program, tx, policy
    losses, expected = trained(open_store("host", **CHUNKS), *made_of, **options)
    late = request.getfixturevalue("late")
    if given is not None:
        given(late)
    options |= {"device_memory_bytes": 64 << 20}
    late_losses, found = trained(open_store("device", **CHUNKS), *made_of, **options)
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array, err_msg=str(key))
    assert late_losses == losses
    return late


GRADIENTS = {
    "an update each": (optax.adamw(1e-2), {}),
    "all wait": (CLIPPED, {}),
    "parts of a batch": (optax.adamw(1e-2), {"micro_batches": 2}),
}


@pytest.mark.parametrize(
    ("way", "waits"),
    family(
        product(GRADIENTS, [True, False]),
        short=[("all wait", True), ("an update each", False)],
    ),
)
def test_a_gradient_that_is_read_before_its_copy_has_ended_is_noticed(
    open_store, request, monkeypatch, way, waits
):
    """Each copy of a gradient ends when somebody waits for it, and no earlier."""
    tx, options = GRADIENTS[way]
    arrived = shards.arrived

    def given(late):
        def read(copy):
            early = late.before_its_end(copy)
            return arrived(copy) if waits else early

        monkeypatch.setattr(shards, "arrived", read)

    made_of = open_store, request, ZOO["stack_by_index"](), tx, "recompute"
    if waits:
        has_the_same_bits(*made_of, given, **options)
        return
    with pytest.raises(AssertionError, match="Mismatched elements"):
        has_the_same_bits(*made_of, given, **options)


@pytest.mark.long
def test_a_pool_of_pinned_memory_that_is_full(late, streamed):
    """The step ends with XLA's error, the store stays as it was, and goes on."""
    program = ZOO["l2_penalty"](depth=3)
    options = {"device_memory_bytes": 64 << 20}
    with streamed(program, optax.sgd(0.1), **options) as step:
        step.load(program.params, batch=program.batch)
        late.pool_bytes = 1 << 12
        with pytest.raises(jax.errors.JaxRuntimeError, match="Out of host memory"):
            step(program.batch)
        assert step.store.step == 0
        late.pool_bytes = 4 << 20
        step(program.batch)
        assert step.store.step == 1


@pytest.mark.usefixtures("own_memory")
def test_a_device_that_is_too_small_is_named(open_store):
    program = ZOO["l2_penalty"](depth=3)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(program.params))
    with pytest.raises(StreamError, match=r"device_memory_bytes=.* works"):
        trained(
            open_store("store", **CHUNKS),
            program,
            optax.sgd(0.1),
            "recompute",
            device_memory_bytes=2 * largest,
        )


def test_on_a_cpu_it_limits_a_part_of_the_host_memory(open_store):
    program, tx = ZOO["l2_penalty"](depth=3), optax.sgd(0.1)
    with pytest.raises(StreamError, match=r"device_memory_bytes=.* works"):
        trained(
            open_store("store", **CHUNKS),
            program,
            tx,
            "recompute",
            device_memory_bytes=1 << 12,
        )
    trained(
        open_store("store", **CHUNKS),
        program,
        tx,
        "recompute",
        device_memory_bytes=64 << 20,
    )


def test_no_device_memory_is_refused(open_store):
    with pytest.raises(ValueError, match="device_memory_bytes=0: expected at least 1"):
        jaxinf.stream(
            lambda p, b: 0.0,
            optax.sgd(0.1),
            open_store(),
            memory_bytes=1 << 30,
            device_memory_bytes=0,
        )


def test_memory_is_divided_between_host_and_device():
    own = divide(1 << 30, 0, 1 << 20, DeviceLimit(256 << 20, is_host=False))
    alone = divide(1 << 30, 0, 1 << 20)
    assert own.staged == alone.programs
    assert own.programs + own.leaving == 256 << 20
    assert own.limit == "device_memory_bytes"
    limited = divide(1 << 30, 0, 1 << 20, DeviceLimit(1 << 20))
    assert (limited.programs, limited.staged) == (1 << 20, 0)
    with pytest.raises(StreamError, match=r"on their way to the device \(\d+ bytes\)"):
        divide(64 << 20, 0, 15 << 20, DeviceLimit(1 << 30, is_host=False))
    with pytest.raises(StreamError, match="device_memory_bytes: expected room"):
        divide(1 << 30, 0, 1 << 20, DeviceLimit(1024, is_host=False))
