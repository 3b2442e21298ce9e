"""Params that stay in memory for updates and for other steps: bits, bytes, ends."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_stores
from families import family
from streaming import (
    Numbers,
    assert_same_states,
    moved_as_planned,
    read_ahead,
    states,
    trained,
    unit,
)
from zoo import ZOO

import jaxinf
from jaxinf.streaming.plan import reads
from jaxinf.streaming.plan.reads import Fetch
from jaxinf.streaming.program.graph import Piece

PAGE_BYTES = 4096
FETCHES = [Fetch(unit(0), 0, 0, gradient=3), Fetch(unit(1), 1, 1)]


def assert_step(params):
    """Reads both units, as a step does that takes the first one for its update."""
    params.begin()
    np.testing.assert_array_equal(params.get(0, Piece(0)), np.zeros(1024))
    params.done(0)
    np.testing.assert_array_equal(params.take(unit(0)), np.zeros((1, 1024)))
    params.free(unit(0))
    assert params.take(unit(0)) is None
    np.testing.assert_array_equal(params.get(1, Piece(1)), np.ones(1024))
    params.close()


def test_a_step_is_given_up_while_a_read_waits_for_an_update():
    params = read_ahead(Numbers(), FETCHES, PAGE_BYTES)
    params.begin()
    params.get(0, Piece(0))
    params.done(0)
    params.stop()  # there is no room for the second unit
    assert params.counts.num_read_bytes == PAGE_BYTES
    assert_step(params)


def test_a_step_is_given_up_while_a_read_has_no_room_on_the_device():
    reader = Numbers(num_free=1)
    params = read_ahead(reader, FETCHES, PAGE_BYTES, host_bytes=2 * PAGE_BYTES)
    params.begin()
    params.get(0, Piece(0))  # the device has room for no other
    assert reader.reached.wait(60)
    threading.Timer(0.1, reader.goes_on.set).start()
    params.stop()
    assert_step(params)


def test_the_last_read_before_the_gradient_serves_the_update():
    calls = [(0, 0, 0), (1, 1, 1), (0, 3, 4), (1, 6, 6)]
    fetches = [Fetch(unit(leaf), *first_and_last) for leaf, *first_and_last in calls]
    made = {unit(0): 4, unit(1): 5}
    held = reads.held_bytes(fetches, 8)
    found = reads.hand_over(fetches, made, lambda unit: True, held, 1 << 20)
    assert [fetch.gradient for fetch in found] == [None, 5, 4, None]


@pytest.mark.parametrize(
    "name",
    family(["half_precision_loss", "stack_by_index"], short=["half_precision_loss"]),
)
def test_params_from_memory_give_the_bits_of_params_from_the_drive(
    name, streamed, monkeypatch
):
    small_stores.keep_nothing(monkeypatch)  # of params, too, if they can stay
    program, tx = ZOO[name](), optax.adamw(1e-2)
    memory = streamed(program, tx, "memory")
    losses, found = trained(memory, program)
    monkeypatch.setattr(reads, "hand_over", lambda fetches, *_, **__: fetches)
    drive = streamed(program, tx, "drive")
    same_losses, expected = trained(drive, program)
    assert losses == same_losses
    assert_same_states(found, expected)
    param_bytes = sum(np.asarray(x).nbytes for x in jax.tree.leaves(program.params))
    saved = drive.traffic.drive_read_bytes - memory.traffic.drive_read_bytes
    assert saved > param_bytes // 2


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
    """Params of which each element is the same."""
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
