"""Params that updates take from memory, where a program has just read them."""

import jax
import numpy as np
import optax
import pytest
import small_stores
from families import family
from streaming import read_ahead, states
from zoo import ZOO

import jaxinf
from jaxinf.streaming.plan import reads
from jaxinf.streaming.plan.reads import Fetch, hand_over, held_bytes, keep_between
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


def test_without_room_units_are_read_again():
    fetches = [Fetch(unit(0), 0, 0), Fetch(unit(1), 3, 3)]
    assert handed(fetches, {unit(0): 5, unit(1): 3}, 1) == {1: 3}


def joined(fetches, limit_pages):
    held = held_bytes(fetches, NUM_CALLS)
    found = keep_between(fetches, held, limit_pages * PAGE_BYTES)
    assert held.tolist() == held_bytes(found, NUM_CALLS).tolist()
    assert held.max() <= limit_pages * PAGE_BYTES
    return [(fetch.unit.leaf, fetch.first, fetch.last) for fetch in found]


def test_units_stay_between_calls_as_far_as_memory_goes():
    fetches = [
        Fetch(unit(0), 0, 0),
        Fetch(unit(1), 1, 1),
        Fetch(unit(2), 2, 3),
        Fetch(unit(1), 5, 5),
        Fetch(unit(0), 7, 7),
    ]
    assert joined(fetches, 2) == [(0, 0, 0), (1, 1, 5), (2, 2, 3), (0, 7, 7)]
    assert joined(fetches, 3) == [(0, 0, 7), (1, 1, 5), (2, 2, 3)]
    larger = [*fetches[:3], Fetch(unit(3), 3, 4), *fetches[3:]]
    assert joined(larger, 2) == [(f.unit.leaf, f.first, f.last) for f in larger]


def test_a_unit_stays_for_all_calls_that_read_it():
    fetches = [Fetch(unit(0), n, n) for n in (0, 3, 6)]
    assert joined(fetches, 1) == [(0, 0, 6)]


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

    def begin(self):
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
    ("name", "policy"),
    family(
        [
            ("stack_by_index", "keep"),
            ("tied_and_unused", "recompute"),
            ("half_precision_loss", "recompute"),
        ],
        short=[("half_precision_loss", "recompute")],
    ),
)
def test_params_from_memory_give_the_bits_of_params_from_the_drive(
    name, policy, open_store, monkeypatch
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
            policy=policy,
        )

    found, read_bytes = trained(make("memory"), program)
    monkeypatch.setattr(reads, "hand_over", lambda fetches, *_, **__: fetches)
    expected, all_bytes = trained(make("drive"), program)
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array, err_msg=str(key))
    param_bytes = sum(np.asarray(x).nbytes for x in jax.tree.leaves(program.params))
    assert all_bytes - read_bytes > param_bytes // 2
