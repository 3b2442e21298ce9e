"""Params and state that stay in memory: bits, bytes, ends."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from streaming_cases import (
    CHUNKS,
    assert_same_states,
    moved_as_planned,
    planned_bytes,
    run,
    states,
)
from zoo import ZOO

import jaxinf


def test_a_frozen_base_that_fits_is_read_once(streamed):
    program = ZOO["half_precision_loss"]()
    leaves, tree = jax.tree.flatten(program.params)
    labels = tree.unflatten(["tx", *["frozen"] * (len(leaves) - 1)])
    tx = optax.multi_transform(
        {"tx": optax.adamw(1e-2), "frozen": optax.set_to_zero()}, labels
    )
    found = {}
    for memory_bytes in ("256MiB", "24MiB"):
        step = streamed(program, tx, memory_bytes, memory_bytes=memory_bytes)
        step.load(program.params, batch=program.batch)
        read_bytes = []
        for _ in range(3):
            step(program.batch)
            step.store.wait()
            read_bytes.append(step.metrics.fetched_drive_bytes)
        moved_as_planned(step, "drive_read_bytes")
        assert max(read_bytes) <= sum(leaf.nbytes for leaf in leaves)
        found[memory_bytes] = states(step.store)
        if memory_bytes == "256MiB":
            assert "of params stay from step to step" in str(step.plan)
            assert read_bytes[1:] == [leaves[0].nbytes] * 2
            assert read_bytes[0] > 2 * leaves[0].nbytes
    assert_same_states(found["256MiB"], found["24MiB"])


FREEZING = optax.multi_transform(
    {"trained": optax.sgd(0.1), "frozen": optax.set_to_zero()},
    {"base": "frozen", "head": "trained"},
)
MEMORY = {"memory_bytes": 64 << 20}


def scaled(params, batch):
    return jnp.sum(batch * params["base"] * params["head"])


def constant(base):
    return {"base": np.full(2048, base, np.float32), "head": np.ones(2048, np.float32)}


def restarted(store, params):
    tx = jaxinf.smart_update(FREEZING, store, on_existing="restart")
    tx.init(jax.tree.map(jnp.asarray, params))


def loaded(store, params):
    store.load(params, FREEZING.init(params), step=1)


@pytest.mark.parametrize("replace", [restarted, loaded])
def test_what_stays_is_read_again_after_the_store_was_replaced(replace, open_store):
    store, batch = open_store(), np.ones(2048, np.float32)
    step = jaxinf.stream(scaled, FREEZING, store, **MEMORY)
    step.load(constant(1), batch=batch)
    with jaxinf.stream_function(scaled, store, **MEMORY) as f:
        assert f(batch) == 2048
        with pytest.raises(jaxinf.NonFiniteGradientError):
            step(batch * np.nan)  # the base is in memory, and the step given up
        replace(store, constant(3))
        assert f(batch) == step(batch)[0] == 3 * 2048
        step(batch)
        assert step.metrics.fetched_drive_bytes == batch.nbytes  # the base stays


def test_what_checkpoints_alone_write_is_none_of_a_steps(streamed, open_store):
    program = ZOO["tied_and_unused"]()
    store = open_store(**CHUNKS, durability="checkpoint")
    step = streamed(program, optax.adam(1e-2), store=store)
    step.load(program.params, batch=program.batch)
    meters = store._engine.files.meters
    for name in ("first", "second"):
        before = meters.snapshot().drive_write_bytes
        run(step, program, 3)
        store._engine.steps.join()
        after = meters.snapshot().drive_write_bytes
        assert after - before == 3 * planned_bytes(step).drive_write_bytes
        store.checkpoint(name)
        assert meters.snapshot().drive_write_bytes > after
