"""Values on their way to the host, to drives and back: bits, order, room, failures."""

import errno
import gc
import os
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinf.errors import StoreIOError, StoreSpaceError
from jaxinf.io.pages import page_ceil
from jaxinf.streaming.move.scratch import Scratch
from jaxinf.streaming.move.tiered_cache import TieredCache
from jaxinf.streaming.plan.forms import PART_BYTES
from jaxinf.streaming.plan.tiers import NUM_COPIES

SIZES = {"a": 4, "b": 70_000, "c": PART_BYTES + 4, "d": 4096}
ON_DRIVE = ("c", "b")  # in the order of their next use
LARGEST = page_ceil(max(SIZES.values()))


def values():
    rng = np.random.default_rng(0)
    return {
        key: jnp.asarray(rng.integers(0, 1 << 30, num_bytes // 4, np.int32))
        for key, num_bytes in SIZES.items()
    }


def all_pinned_bytes():
    arrays = jax.live_arrays()
    return sum(x.nbytes for x in arrays if x.sharding.memory_kind == "pinned_host")


@pytest.fixture
def pinned_bytes():
    """Counts pinned memory that the test takes."""
    gc.collect()
    before = all_pinned_bytes()
    return lambda: all_pinned_bytes() - before


@pytest.fixture
def cache(tmp_path):
    scratch = Scratch([tmp_path])
    avals = {key: jax.typeof(value) for key, value in values().items()}
    places = {key: scratch.allocate(SIZES[key]) for key in ON_DRIVE}
    scratch.reserve()
    found = TieredCache(scratch, avals, places, NUM_COPIES * LARGEST, LARGEST)
    yield found
    found.close()
    scratch.close()


def left(cache, held, keys):
    """Lets values leave; nothing here holds them on the device."""
    cache.advance(LARGEST)
    for key in keys:
        cache.leave(key, held[key])
    dropped = []
    for key in keys:
        cache.gone(key)
        dropped.append(weakref.ref(held.pop(key)))
    assert not any(one() for one in dropped)


def test_values_come_back(cache):
    for _ in range(2):
        expected, held = values(), values()
        left(cache, held, list(SIZES))
        for key in ("d", "c", "b", "a"):
            cache.bring(key)
            found = cache.take(key)
            assert found.sharding == expected[key].sharding
            np.testing.assert_array_equal(found, expected[key])
            cache.release(key)
        counts = cache.take_counts()
        on_drive = sum(SIZES[key] for key in ON_DRIVE)
        assert counts.num_out_bytes == counts.num_back_bytes == sum(SIZES.values())
        assert counts.num_written_bytes == on_drive
        assert (counts.num_read_bytes == on_drive) == (not counts.num_forwarded)
        assert min(counts.out_s, counts.back_s) > 0
        cache.reset()


def test_what_stays_on_the_host_is_not_written(cache, monkeypatch, pinned_bytes):
    monkeypatch.setattr(os, "pwritev", lambda *args: pytest.fail("written"))
    held, expected = values(), values()
    left(cache, held, ["a", "d"])
    assert pinned_bytes() == SIZES["a"] + SIZES["d"]
    for key in ("d", "a"):
        np.testing.assert_array_equal(cache.look(key), expected[key])
        cache.bring(key)
        np.testing.assert_array_equal(cache.take(key), expected[key])
        cache.release(key)
    assert pinned_bytes() == 0


class Gate:
    """Holds calls of a function of `os` back until it is opened, or left."""

    def __init__(self, patched, call):
        self.opened, self.reached = threading.Event(), threading.Event()
        real = getattr(os, call)

        def wait(*args):
            self.reached.set()
            assert self.opened.wait(60)
            return real(*args)

        patched.setattr(os, call, wait)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.opened.set()


def test_the_host_is_not_filled_while_a_drive_is_slow(cache, monkeypatch, pinned_bytes):
    held, expected = values(), values()
    cache.advance(LARGEST)
    with Gate(monkeypatch, "pwritev") as gate:
        cache.leave("c", held["c"])
        cache.leave("b", held["b"])
        assert gate.reached.wait(60)
        cache.gone("c")  # the host has it
        assert pinned_bytes() == SIZES["c"]
        assert cache.take_counts().num_out_bytes == SIZES["c"]  # no room for the other
    cache.gone("b")
    for key in ON_DRIVE:
        cache.bring(key)
        np.testing.assert_array_equal(cache.take(key), expected[key])
        cache.release(key)


def test_a_value_that_is_still_on_the_host_comes_back_from_there(
    cache, monkeypatch, pinned_bytes
):
    monkeypatch.setattr(os, "preadv", lambda *args: pytest.fail("read"))
    held, expected = values(), values()
    with Gate(monkeypatch, "pwritev"):
        left(cache, held, ["c"])
        cache.bring("c")
        np.testing.assert_array_equal(cache.take("c"), expected["c"])
        assert pinned_bytes() == SIZES["c"]  # the drive still reads it
    cache.release("c")
    assert pinned_bytes() == 0
    left(cache, held, ["b"])  # it has the room of the other when that is written
    assert cache.take_counts().num_forwarded == 1


def test_values_are_read_ahead_as_far_as_there_is_room(cache, monkeypatch):
    held, expected = values(), values()
    reads = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: reads.append(args) or real(*args))
    left(cache, held, list(ON_DRIVE))
    while cache.counts.num_written_bytes < sum(SIZES[key] for key in ON_DRIVE):
        time.sleep(1e-3)
    np.testing.assert_array_equal(cache.look("b"), expected["b"])  # not read ahead
    cache.bring("c")
    np.testing.assert_array_equal(cache.take("c"), expected["c"])
    cache.release("c")
    cache.bring("b")
    np.testing.assert_array_equal(cache.take("b"), expected["b"])
    cache.release("b")
    assert len(reads) == 4  # c has two parts; b was read twice


def test_reset_drops_everything(cache, pinned_bytes):
    cache.advance(LARGEST)
    for key, value in values().items():
        cache.leave(key, value)
    cache.reset()
    cache.take_counts()
    assert pinned_bytes() == 0
    test_values_come_back(cache)


def fail(code):
    def failing(*args):
        raise OSError(code, os.strerror(code))

    return failing


def test_a_full_drive_is_told_and_forgotten(cache, monkeypatch):
    held = values()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", fail(errno.ENOSPC))
        with pytest.raises(StoreSpaceError, match="a file of activations"):
            left(cache, held, ["c", "b"])  # the other has no room before
    cache.reset()
    cache.take_counts()
    test_values_come_back(cache)


def test_others_come_back_if_one_cannot_be_read(cache, monkeypatch):
    held, expected = values(), values()
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail(errno.EIO))
        left(cache, held, ["c", "a", "b"])  # this waits until the first is written
        cache.bring("c")
        with pytest.raises(StoreIOError, match="a file of activations"):
            cache.take("c")
        cache.release("c")
        cache.bring("a")
        np.testing.assert_array_equal(cache.take("a"), expected["a"])
    cache.reset()
    cache.take_counts()
    test_values_come_back(cache)


def test_threads_end(cache):
    before = set(threading.enumerate())
    cache.leave("a", values()["a"])
    own = set(threading.enumerate()) - before
    assert {thread.name for thread in own} == {"jaxinf-activations"}
    cache.close()
    assert not any(thread.is_alive() for thread in own)
