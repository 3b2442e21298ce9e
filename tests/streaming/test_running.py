"""Programs of a step as they run: two at a time, compiled once, times, memory."""

import ctypes
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from streaming import until_it_waits
from zoo import normal

import jaxinf
from jaxinf.csd import HostCsd
from jaxinf.engine import StateReader
from jaxinf.streaming.move.scratch import Scratch

pytestmark = pytest.mark.optimized("long")

TX = optax.adam(1e-2)
LAYERS = [normal(i, 32, 32) / 6 for i in range(12)]
BATCH = normal(100, 8192, 32)


def wide(params, batch):
    x = batch
    for w in params:
        x = jnp.tanh(x @ w) @ w + x
    return jnp.mean(x**2)


@pytest.fixture
def opened(open_store):
    """A step, with memory for all values only if the policy keeps them."""

    def make(policy):
        memory_bytes = 256 << 20 if policy == "keep" else 28 << 20
        store = open_store(chunk_elements=4096, memory_bytes=4 << 20)
        step = jaxinf.stream(wide, TX, store, policy=policy, memory_bytes=memory_bytes)
        step.load(LAYERS)
        return step

    return make


def is_running(outputs):
    return not all(out.is_ready() for out in outputs if not out.is_deleted())


def test_at_most_two_programs_are_in_flight(opened, monkeypatch):
    """A call takes far less time than a program."""
    step = opened("keep")
    step(BATCH)
    call, made, running = jax.stages.Compiled.__call__, [], []

    def noting(self, *args):
        running.append(sum(map(is_running, made)))
        made.append(jax.tree.leaves(outputs := call(self, *args)))
        return outputs

    monkeypatch.setattr(jax.stages.Compiled, "__call__", noting)
    step(BATCH)
    assert len(running) == len(step.plan.calls)
    assert set(running) == {0, 1}


# --- freed memory ------------------------------------------------------------------


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_freed_memory_is_given_back(opened):
    """What glibc keeps below a block that is still in use."""
    libc, size = ctypes.CDLL(None), 100_000
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("not glibc")
    libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    step = opened("keep")
    step.compile(BATCH)
    blocks = [libc.memset(libc.malloc(size), 1, size) for _ in range(1000)]
    full_bytes = resident_bytes()
    last = blocks.pop()
    for block in blocks:
        libc.free(block)
    assert full_bytes - resident_bytes() < 50_000_000
    step.compile(BATCH[:4096])
    assert full_bytes - resident_bytes() > 50_000_000
    libc.free(last)


# --- waiting times -----------------------------------------------------------------

PAUSE_S = 0.05


@pytest.mark.parametrize(
    ("name", "owner", "method", "policy"),
    [
        ("waited_params_s", StateReader, "read", "keep"),
        pytest.param(
            *("waited_values_s", Scratch, "read", "offload"), marks=pytest.mark.long
        ),
        ("waited_updates_s", HostCsd, "write", "keep"),
    ],
)
def test_a_wait_is_measured(name, owner, method, policy, opened, monkeypatch):
    step = opened(policy)
    step(BATCH)
    step.store.wait()
    real, first = getattr(owner, method), threading.Lock()

    def late(self, *args, **options):
        if first.acquire(blocking=False):
            # The newest: steps that other tests have left may not be collected yet.
            *_, steps = (t for t in threading.enumerate() if t.name == "jaxinf-step")
            until_it_waits(steps)
            time.sleep(PAUSE_S)
        return real(self, *args, **options)

    monkeypatch.setattr(owner, method, late)
    waited_s = []
    for _ in range(2):  # a step leaves its updates to the next one
        began_s = time.perf_counter()
        step(BATCH)
        step_s = time.perf_counter() - began_s
        fields = vars(step.metrics)
        times = [value for key, value in fields.items() if key.endswith("_s")]
        assert fields["waited_device_s"] > 0
        assert fields["dispatched_s"] > 0
        assert sum(times) <= step_s
        waited_s.append(fields[name])
    assert max(waited_s) >= PAUSE_S
