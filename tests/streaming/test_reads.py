"""Params that updates take from memory, where a program has just read them."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_stores
from families import family
from streaming import read_ahead, states
from zoo import ZOO

import jaxinf
from jaxinf.streaming.plan import reads
from jaxinf.streaming.plan.reads import (
    Fetch,
    Reading,
    hand_over,
    held_bytes,
    keep_between,
)
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.units import Unit

PAGE_BYTES = 4096
NUM_CALLS = 8


def unit(leaf):
    return Unit(leaf, (), (1024,), np.dtype(np.float32))


def handed(fetches, gradients, limit_pages, can_take=lambda unit: True):
    """The leaves whose updates take their params from memory."""
    held = held_bytes(fetches, NUM_CALLS)
    found = hand_over(fetches, gradients, can_take, held, limit_pages * PAGE_BYTES)
    assert held.tolist() == held_bytes(found, NUM_CALLS).tolist()
    assert held.max() <= limit_pages * PAGE_BYTES
    assert [(f.unit, f.first, f.last) for f in found] == [
        (f.unit, f.first, f.last) for f in fetches
    ]
    return {f.unit.leaf: f.gradient for f in found if f.gradient is not None}


def test_the_last_read_before_the_gradient_serves_the_update():
    fetches = [
        Fetch(unit(0), 0, 0),
        Fetch(unit(1), 1, 1),
        Fetch(unit(0), 3, 4),
        Fetch(unit(1), 6, 6),
    ]
    gradients = {unit(0): 4, unit(1): 5}
    assert handed(fetches, gradients, 9) == {0: 4, 1: 5}
    held = held_bytes(fetches, NUM_CALLS)
    with_one = hand_over(fetches, gradients, lambda _: True, held, 1 << 20)
    assert [fetch.gradient for fetch in with_one] == [None, 5, 4, None]


def test_units_that_wait_least_are_handed_over_first():
    fetches = [Fetch(unit(0), 0, 0), Fetch(unit(1), 0, 1), Fetch(unit(2), 4, 4)]
    gradients = {unit(0): 7, unit(1): 4, unit(2): 4}
    assert handed(fetches, gradients, 3) == {0: 7, 1: 4, 2: 4}
    assert handed(fetches, gradients, 2) == {1: 4, 2: 4}
    assert handed(fetches, gradients, 2, lambda unit: unit.leaf != 1) == {0: 7, 2: 4}


def joined(fetches, room_pages, frozen=()):
    """The reads of the first step, and the leaves that later ones read."""
    held = held_bytes(fetches, NUM_CALLS)
    most = held.max() + room_pages * PAGE_BYTES
    is_frozen = lambda unit: unit.leaf in frozen  # noqa: E731
    found = keep_between(fetches, held, room_pages * PAGE_BYTES, is_frozen)
    assert held.max() <= most
    again = [fetch.unit.leaf for fetch in Reading(found).repeated]
    return [(fetch.unit.leaf, fetch.first, fetch.last) for fetch in found], again


THERE_AND_BACK = [
    Fetch(unit(0), 0, 0),
    Fetch(unit(1), 1, 1),
    Fetch(unit(2), 2, 3),
    Fetch(unit(1), 5, 5),
    Fetch(unit(0), 7, 7),
]
ALONE = [(fetch.unit.leaf, fetch.first, fetch.last) for fetch in THERE_AND_BACK]
EVERYTHING = [(0, 0, 7), (1, 1, 5), (2, 2, 3)]


def test_units_stay_between_calls_as_far_as_memory_goes():
    assert joined(THERE_AND_BACK, 0)[0] == [(0, 0, 0), (1, 1, 5), (2, 2, 3), (0, 7, 7)]
    assert joined(THERE_AND_BACK, 2)[0] == EVERYTHING  # half is to read ahead
    thrice = [Fetch(unit(0), n, n) for n in (0, 3, 6)]
    assert joined(thrice, 0)[0] == [(0, 0, 6)]
    larger = [*THERE_AND_BACK[:3], Fetch(unit(3), 3, 4), *THERE_AND_BACK[3:]]
    assert joined(larger, 0)[0] == [(f.unit.leaf, f.first, f.last) for f in larger]


def test_units_that_no_update_changes_stay_from_step_to_step():
    assert joined(THERE_AND_BACK, 8) == (EVERYTHING, [0, 1, 2])
    assert joined(THERE_AND_BACK, 3, {0, 1, 2}) == (EVERYTHING, [])
    assert joined(THERE_AND_BACK, 8, {1}) == (EVERYTHING, [0, 2])
    assert joined(THERE_AND_BACK, 4, {0, 1, 2, 3}) == (EVERYTHING, [])
    found, again = joined(THERE_AND_BACK, 0, {0, 1, 2})
    assert len(again) < len(found)
    assert again


def test_staged_units_are_in_memory_only_for_their_update():
    fetches = [Fetch(unit(0), 0, 1), Fetch(unit(1), 2, 2), Fetch(unit(2), 3, 3)]
    found = hand_over(
        fetches,
        {unit(0): 2, unit(1): 2, unit(2): 3},
        lambda _: True,
        held_bytes((), NUM_CALLS),
        limit_bytes=2 * PAGE_BYTES,
        is_staged=True,
    )
    assert [fetch.gradient for fetch in found] == [None, 2, 3]


class Ones:
    """Units of ones."""

    version = 0, 0

    def begin(self, num_first):
        pass

    def read(self, unit, shards):
        shards[0][...] = 1

    def close(self):
        pass


def test_a_step_is_given_up_while_a_read_waits_for_an_update():
    fetches = [Fetch(unit(0), 0, 0, gradient=3), Fetch(unit(1), 1, 1)]
    params = read_ahead(Ones(), fetches, PAGE_BYTES)
    params.begin()
    np.testing.assert_array_equal(params.get(0, Piece(0)), np.ones(1024))
    params.done(0)
    params.stop()  # there is no room for the second unit
    assert params.counts.num_read_bytes == PAGE_BYTES
    params.begin()
    np.testing.assert_array_equal(params.get(0, Piece(0)), np.ones(1024))
    params.done(0)
    np.testing.assert_array_equal(params.take(unit(0)), np.ones((1, 1024)))
    params.free(unit(0))
    np.testing.assert_array_equal(params.get(1, Piece(1)), np.ones(1024))
    params.close()


class Held(Ones):
    """Reads that end when they are let go, from the second one on."""

    def __init__(self):
        self.num_read, self.reached = 0, threading.Event()
        self.goes_on = threading.Event()

    def read(self, unit, shards):
        self.num_read += 1
        if self.num_read > 1:
            self.reached.set()
            assert self.goes_on.wait(60)
        super().read(unit, shards)


def test_a_step_is_given_up_while_a_read_has_no_room_on_the_device():
    fetches = [Fetch(unit(0), 0, 0, gradient=3), Fetch(unit(1), 1, 1)]
    reader = Held()
    params = read_ahead(reader, fetches, PAGE_BYTES, host_bytes=2 * PAGE_BYTES)
    params.begin()
    params.get(0, Piece(0))  # the device has room for no other
    assert reader.reached.wait(60)
    threading.Timer(0.1, reader.goes_on.set).start()
    params.stop()
    params.begin()
    for number in range(2):
        found = params.get(number, Piece(number))
        np.testing.assert_array_equal(found, np.ones(1024))
        params.done(number)
        params.free(unit(number))
    params.close()


def test_a_frozen_base_that_fits_is_read_once(open_store):
    program = ZOO["half_precision_loss"]()
    paths = jax.tree.leaves_with_path(program.params)
    trained = {jax.tree_util.keystr(paths[0][0])}
    labels = jax.tree_util.tree_map_with_path(
        lambda path, _: "tx" if jax.tree_util.keystr(path) in trained else "frozen",
        program.params,
    )
    tx = optax.multi_transform(
        {"tx": optax.adamw(1e-2), "frozen": optax.set_to_zero()}, labels
    )
    found = {}
    for memory_bytes in ("256MiB", "24MiB"):
        store = open_store(memory_bytes, chunk_elements=4096, memory_bytes=16 << 20)
        step = jaxinf.stream(
            program.loss,
            tx,
            store,
            memory_bytes=memory_bytes,
            has_aux=program.has_aux,
        )
        step.load(program.params, batch=program.batch)
        read_bytes = []
        for _ in range(3):
            step(program.batch)
            store.wait()
            assert step.metrics.fetched_drive_bytes <= sum(
                np.asarray(leaf).nbytes for _, leaf in paths
            )
            read_bytes.append(step.metrics.fetched_drive_bytes)
        found[memory_bytes] = states(store), read_bytes
        traffic, planned = store.metrics.traffic, step.traffic
        assert traffic.drive_read_bytes == planned.drive_read_bytes
        if memory_bytes == "256MiB":
            assert "of params stay from step to step" in str(step.plan)
    own_bytes = np.asarray(paths[0][1]).nbytes
    first, *others = found["256MiB"][1]
    assert first > 2 * own_bytes
    assert others == [own_bytes, own_bytes]
    for key, array in found["24MiB"][0].items():
        np.testing.assert_array_equal(found["256MiB"][0][key], array, err_msg=str(key))


FREEZING = optax.multi_transform(
    {"trained": optax.sgd(0.1), "frozen": optax.set_to_zero()},
    {"base": "frozen", "head": "trained"},
)


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
    memory = {"memory_bytes": 64 << 20}
    step = jaxinf.stream(scaled, FREEZING, store, **memory)
    step.load(constant(1), batch=batch)
    with jaxinf.stream_function(scaled, store, **memory) as f:
        assert f(batch) == 2048
        with pytest.raises(jaxinf.NonFiniteGradientError):
            step(batch * np.nan)  # the base is in memory, and the step given up
        replace(store, constant(3))
        assert f(batch) == 3 * 2048
        assert step(batch)[0] == 3 * 2048
        step(batch)
        assert step.metrics.fetched_drive_bytes == batch.nbytes  # the base stays


def test_a_function_reads_again_after_a_step_was_done_again(open_store):
    store, params = open_store(), {"w": jnp.ones(2048)}
    tx = jaxinf.smart_update(optax.sgd(1.0), store)
    first = tx.init(params)
    with jaxinf.stream_function(
        lambda p, b: jnp.sum(p["w"]) * b, store, memory_bytes="64MiB"
    ) as f:
        for gradient in (1, 3):  # the first result is discarded
            given = {"w": jnp.full(2048, gradient, jnp.float32)}
            jax.block_until_ready(tx.update(given, first, params))
            assert store.step == 1
            assert f(np.float32(1)) == 2048 * (1 - gradient)


def trained(step, program):
    """States after three steps, and the bytes of the last one on the drive."""
    step.load(program.params, batch=program.batch)
    for _ in range(3):
        step(program.batch)
    store = step.store
    store.wait()
    traffic, planned = store.metrics.traffic, step.traffic
    assert traffic.drive_read_bytes == planned.drive_read_bytes
    assert traffic.drive_write_bytes == planned.drive_write_bytes
    return states(store), traffic.drive_read_bytes


@pytest.mark.parametrize(
    "name",
    family(["half_precision_loss", "stack_by_index"], short=["half_precision_loss"]),
)
def test_params_from_memory_give_the_bits_of_params_from_the_drive(
    name, open_store, monkeypatch
):
    small_stores.keep_nothing(monkeypatch)  # of params, too, if they can stay
    program = ZOO[name]()

    def make(folder):
        store = open_store(folder, chunk_elements=4096, memory_bytes=16 << 20)
        return jaxinf.stream(
            program.loss,
            optax.adamw(1e-2),
            store,
            memory_bytes=256 << 20,
            has_aux=program.has_aux,
        )

    found, read_bytes = trained(make("memory"), program)
    monkeypatch.setattr(reads, "hand_over", lambda fetches, *_, **__: fetches)
    expected, all_bytes = trained(make("drive"), program)
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array, err_msg=str(key))
    param_bytes = sum(np.asarray(x).nbytes for x in jax.tree.leaves(program.params))
    assert all_bytes - read_bytes > param_bytes // 2
