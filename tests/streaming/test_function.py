"""Functions of a store's params without a gradient: results, memory, what stays."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from inject import at_each_call
from streaming_cases import SMALL, assert_near, assert_same_bits, bytes_held
from zoo import ZOO, normal

import jaxinf
from jaxinf.csd import HostCsd
from jaxinf.errors import (
    StoreClosedError,
    StoreFormatError,
    StoreMismatchError,
    StreamError,
)

pytestmark = pytest.mark.optimized("long")

MEMORY = {"memory_bytes": 256 << 20}
ADAM = optax.adam(1e-2)


def test_outputs_are_those_of_one_jit(begun):
    program = ZOO["scan_nested"]()
    step = begun(ADAM, program)

    def fn(params, batch):
        return {"loss": program.loss(params, batch), "batch": batch, "three": 3}

    f = jaxinf.stream_function(fn, step.store, **MEMORY)
    f.load(program.params)
    for _ in range(2):
        step(program.batch)
        params = step.store.params(like=program.params)
        found, expected = f(program.batch), jax.jit(fn)(params, program.batch)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        assert_near(found, expected, 1e-5)
        assert f.metrics.fetched_drive_bytes > 0
        f(program.batch)  # what it has read is still there
        assert f.metrics.fetched_drive_bytes == 0
        assert_same_bits(f.params(), params)
    f.close()
    with pytest.raises(StoreClosedError, match="make the function anew"):
        f(program.batch)
    assert f.plan is not None
    f.close()
    step(program.batch)  # the store is still open


@pytest.mark.long
def test_params_larger_than_memory_in_a_store_given_by_its_path(place):
    def deep(params, batch):
        for i in range(64):
            batch = batch + jnp.tanh(batch @ params[f"layer{i}"]["w"])
        return batch

    params = {f"layer{i}": {"w": normal(i, 128, 128) / 30} for i in range(64)}
    batch, path = normal(100, 8, 128), place / "store"

    def loss(params, batch):
        return jnp.sum(deep(params, batch))

    with jaxinf.stream(loss, optax.sgd(0.1), path, **MEMORY) as step:
        step.load(params, batch=batch)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) >= 4 << 20
    with jaxinf.stream_function(deep, path, memory_bytes=2 << 20) as f:
        np.testing.assert_allclose(f(batch), deep(params, batch), rtol=1e-4, atol=1e-4)
        assert f.plan.peak_bytes < 2 << 20
    jaxinf.open_store(path).close()  # the lock is free


def of_store(store, fn=SMALL.loss):
    f = jaxinf.stream_function(fn, store, **MEMORY)
    f.load(SMALL.params)
    return f


@pytest.mark.long
def test_a_function_waits_for_the_updates_of_a_step(begun, monkeypatch):
    step = begun(ADAM)
    f, may_write = of_store(step.store), threading.Event()
    step(SMALL.batch)
    before = float(f(SMALL.batch))
    step.store.wait()
    at_each_call(monkeypatch, HostCsd, "write", lambda *_: may_write.wait(60))
    step(SMALL.batch)
    threading.Timer(0.5, may_write.set).start()
    found = float(f(SMALL.batch))
    assert may_write.is_set()
    assert found == float(f(SMALL.batch)) != before


def test_batches_of_each_shape_read_in_one_memory(begun):
    step = begun(ADAM)
    step(SMALL.batch)
    f, half = of_store(step.store), jax.tree.map(lambda x: x[:1], SMALL.batch)
    step.free_memory()
    for batch in (SMALL.batch, half, SMALL.batch):
        f(batch)
        (held_bytes,) = bytes_held()  # what ran before has given its memory up
        assert held_bytes <= MEMORY["memory_bytes"]
    f.free_memory()
    assert not bytes_held()
    step(SMALL.batch)
    step.store.wait()
    assert step.store.step == 2


def test_what_takes_more_than_its_memory_is_refused(begun):
    step = begun(ADAM)
    step(SMALL.batch)
    past = np.zeros(MEMORY["memory_bytes"] // 4, np.float32)
    with pytest.raises(StreamError, match=r"and constants takes .*iB; .* works"):
        of_store(step.store, lambda p, b: jnp.sum(b))(past)
    f = jaxinf.stream_function(lambda p, b: p, step.store, memory_bytes=4096)
    f.load(SMALL.params)
    with pytest.raises(StreamError, match=r'memory_bytes="\d+MiB" works'):
        f(np.float32(1))


def test_another_tree_is_refused(open_store):
    params = [normal(i, 4, 4) for i in range(11)]

    def fn(params, batch):
        return sum(jnp.sum(leaf) for leaf in params) * batch

    store = open_store()
    f = jaxinf.stream_function(fn, store, **MEMORY)
    with pytest.raises(StoreFormatError, match=r"empty until tx.init has run"):
        f(np.float32(1))
    jaxinf.stream(fn, optax.sgd(0.1), store, **MEMORY).load(params)
    with pytest.raises(StreamError, match=r"no nested dicts; tell their tree first"):
        f(np.float32(1))
    with pytest.raises(StoreMismatchError, match="`like` has other leaves"):
        f.load(params[1:])
    for name in ("state", "shardings"):
        with pytest.raises(ValueError, match=f"{name}: .* leave it out"):
            f.load(params, **{name: params})
    f.load(params)
    np.testing.assert_allclose(f(np.float32(1)), fn(params, 1), rtol=1e-5)
