"""Functions of a store's params without a gradient: results, memory, what stays."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from streaming import bytes_held
from zoo import ZOO, normal

import jaxinf
from jaxinf.csd import HostCsd
from jaxinf.errors import (
    StoreClosedError,
    StoreFormatError,
    StoreMismatchError,
    StreamError,
)
from jaxinf.streaming.plan import memory

pytestmark = pytest.mark.optimized("long")

MEMORY_BYTES = 256 << 20
CHUNKS = {"chunk_elements": 4096, "memory_bytes": 16 << 20}
ADAM = optax.adam(1e-2)


def started(program, store, **options):
    """A step of a new store."""
    step = jaxinf.stream(
        program.loss,
        ADAM,
        store,
        memory_bytes=MEMORY_BYTES,
        has_aux=program.has_aux,
        **options,
    )
    step.load(program.params, batch=program.batch)
    return step


def assert_near(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_outputs_are_those_of_one_jit(open_store):
    program = ZOO["scan_nested"]()
    step = started(program, open_store(**CHUNKS))

    def fn(params, batch):
        return {"loss": program.loss(params, batch), "batch": batch, "three": 3}

    f = jaxinf.stream_function(fn, step.store, memory_bytes=MEMORY_BYTES)
    f.load(program.params)
    for _ in range(2):
        step(program.batch)
        params = step.store.params(like=program.params)
        assert_near(f(program.batch), jax.jit(fn)(params, program.batch))
        assert_near(f.params(), params)
    f.close()
    with pytest.raises(StoreClosedError, match="make the function anew"):
        f(program.batch)
    assert f.plan is not None
    f.close()
    step(program.batch)  # the store is still open


def deep(params, batch):
    for i in range(64):
        batch = batch + jnp.tanh(batch @ params[f"layer{i}"]["w"])
    return batch


DEEP = {f"layer{i}": {"w": normal(i, 128, 128) / 30} for i in range(64)}


@pytest.mark.long
def test_params_larger_than_memory_in_a_store_given_by_its_path(open_store):
    with started(ZOO["l2_penalty"](depth=2), open_store("other", **CHUNKS)):
        pass
    store = open_store("store", **CHUNKS)
    step = jaxinf.stream(
        lambda params, batch: jnp.sum(deep(params, batch)),
        optax.sgd(0.1),
        store,
        memory_bytes=MEMORY_BYTES,
    )
    batch = normal(100, 8, 128)
    step.load(DEEP, batch=batch)
    step.close()
    with jaxinf.stream_function(deep, store.path, memory_bytes=2 << 20) as f:
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(DEEP)) >= 4 << 20
        np.testing.assert_allclose(f(batch), deep(DEEP, batch), rtol=1e-4, atol=1e-4)
        assert f.plan is not None
        assert f.plan.peak_bytes < 2 << 20
        path = f.store.path
    jaxinf.open_store(path).close()  # the lock is free


def test_a_function_reads_the_last_finished_step(open_store):
    program = ZOO["l2_penalty"](depth=2)
    step = started(program, open_store(**CHUNKS))
    alone = jaxinf.stream_function(program.loss, step.store, memory_bytes=MEMORY_BYTES)
    alone.load(program.params)
    shared = step.function(program.loss)
    for f in (alone, shared):
        losses = [float(step(program.batch)[0])]
        found = float(f(program.batch))
        assert f.metrics.fetched_drive_bytes > 0
        f(program.batch)
        if f is alone:  # what it has read is still there
            assert f.metrics.fetched_drive_bytes == 0
        losses.append(float(step(program.batch)[0]))
        np.testing.assert_allclose(found, losses[1], rtol=1e-6)


@pytest.mark.long
def test_a_function_waits_for_the_updates_of_a_step(open_store, monkeypatch):
    program = ZOO["l2_penalty"](depth=2)
    step = started(program, open_store(**CHUNKS))
    f, may_write, write = step.function(program.loss), threading.Event(), HostCsd.write
    step(program.batch)
    before = float(f(program.batch))
    step.store.wait()

    def late(*args, **options):
        assert may_write.wait(60)
        return write(*args, **options)

    monkeypatch.setattr(HostCsd, "write", late)
    step(program.batch)
    threading.Timer(0.5, may_write.set).start()
    found = float(f(program.batch))
    assert may_write.is_set()
    assert found == float(f(program.batch)) != before


def test_functions_of_a_step_read_in_its_memory_in_turn(open_store):
    program = ZOO["l2_penalty"](depth=3)
    step = started(program, open_store(**CHUNKS))
    step(program.batch)
    one, other = step.function(program.loss), step.function(program.loss)
    half = jax.tree.map(lambda leaf: np.asarray(leaf)[:1], program.batch)

    for run, batch in (
        (one, program.batch),
        (other, program.batch),
        (other, half),
        (one, half),
        (step, program.batch),
    ):
        run(batch)
        step.store.wait()
        (held_bytes,) = bytes_held()  # what ran before has given its memory up
        assert held_bytes <= MEMORY_BYTES
        assert run.plan.peak_bytes <= step.plan.peak_bytes


def test_the_batch_of_a_function_is_in_its_memory(open_store):
    program = ZOO["l2_penalty"](depth=2)
    step = started(program, open_store(**CHUNKS))
    step(program.batch)
    past = np.zeros(MEMORY_BYTES // 4, np.float32)
    f = step.function(lambda p, b: jnp.sum(b))
    with pytest.raises(StreamError, match=r"and constants takes \d+; .* works"):
        f(past)
    f = jaxinf.stream_function(lambda p, b: p, step.store, memory_bytes=4096)
    f.load(program.params)
    with pytest.raises(StreamError, match=r'memory_bytes="\d+MiB" works'):
        f(np.float32(1))


def test_another_tree_is_refused(open_store):
    params = [normal(i, 4, 4) for i in range(11)]

    def fn(params, batch):
        return sum(jnp.sum(leaf) for leaf in params) * batch

    store = open_store(**CHUNKS)
    step = jaxinf.stream(fn, optax.sgd(0.1), store, memory_bytes=MEMORY_BYTES)
    f = jaxinf.stream_function(fn, store, memory_bytes=MEMORY_BYTES)
    with pytest.raises(StoreFormatError, match=r"empty until tx.init has run"):
        f(np.float32(1))
    step.load(params)
    with pytest.raises(StreamError, match=r"no nested dicts; tell their tree first"):
        f(np.float32(1))
    with pytest.raises(StoreMismatchError, match="`like` has other leaves"):
        f.load(params[1:])
    f.load(params)
    np.testing.assert_allclose(f(np.float32(1)), fn(params, 1), rtol=1e-5)


def test_on_a_device_with_memory_of_its_own(open_store, monkeypatch):
    program = ZOO["l2_penalty"](depth=2)
    step = started(program, open_store(**CHUNKS))
    expected = float(step(program.batch)[0])
    step.close()
    monkeypatch.setattr(memory, "device_is_host", lambda device: False)
    f = jaxinf.stream_function(
        program.loss,
        open_store(**CHUNKS),
        memory_bytes=MEMORY_BYTES,
        device_memory_bytes=64 << 20,
    )
    f.load(program.params)
    found = [float(f(program.batch)) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0] != expected  # the params of the step after
    one_jit = jax.jit(program.loss)(f.store.params(like=program.params), program.batch)
    np.testing.assert_allclose(found[0], one_jit, rtol=1e-5)
