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
from jaxinf.streaming.move.mover import Mover, drive_threads
from jaxinf.streaming.move.scratch import PART_BYTES, Place, Scratch
from jaxinf.streaming.move.tensors import Evicted
from jaxinf.streaming.plan.offload import NUM_COPIES
from jaxinf.transfer.pages import page_ceil

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


@pytest.fixture(params=["link", "no link"])
def has_link(request):
    """Whether the device has memory of its own, or that of the host."""
    return request.param == "link"


class ValueMover:
    """Moves values of the test, those with a place to drives."""

    def __init__(self, mover, scratch, places):
        self._mover, self._scratch, self._places = mover, scratch, places
        self._has_link = len(places) < len(SIZES)

    def __getattr__(self, name):
        return getattr(self._mover, name)

    def evict(self, key, value):
        place = self._places.get(key, Place(()))
        room = NUM_COPIES * place.num_bytes if self._has_link else 0
        self._mover.evict(
            Evicted(
                key, value=value, way_bytes=room, scratch=self._scratch, place=place
            )
        )

    def reset(self):
        self._mover.reset(ON_DRIVE if self._has_link else ())


@pytest.fixture
def mover(tmp_path, has_link, request):
    if has_link:
        request.getfixturevalue("late")
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    scratch = Scratch(folders)
    keys = ON_DRIVE if has_link else SIZES
    places = {key: scratch.allocate(SIZES[key]) for key in keys}
    scratch.reserve()
    own = Mover(
        drive_threads(2),
        has_link=has_link,
        read_bytes=LARGEST if has_link else sum(map(page_ceil, SIZES.values())),
        way_bytes=NUM_COPIES * LARGEST if has_link else 0,
    )
    found = ValueMover(own, scratch, places)
    found.reset()
    yield found
    found.close()
    scratch.close()


with_link = pytest.mark.parametrize("has_link", [True])


def evicted(mover, held, keys):
    """Lets values leave; nothing here holds them on the device."""
    mover.read_ahead(LARGEST)
    for key in keys:
        mover.evict(key, held[key])
    dropped = []
    for key in keys:
        mover.wait_evicted(key)
        dropped.append(weakref.ref(held.pop(key)))
    assert not any(one() for one in dropped)


def assert_back(mover, key, expected):
    """A value comes back with its bits, and its place on the device."""
    mover.prefetch(key)
    found = mover.get(key)
    assert found.sharding == expected[key].sharding
    np.testing.assert_array_equal(found, expected[key])
    mover.release(key)


def test_values_come_back(mover, has_link):
    for _ in range(2):
        expected, held = values(), values()
        evicted(mover, held, list(SIZES))
        for key in ("d", "c", "b", "a"):
            assert_back(mover, key, expected)
        counts = mover.take_counts()
        on_drive = sum(SIZES[key] for key in (ON_DRIVE if has_link else SIZES))
        on_way = sum(SIZES.values()) if has_link else 0
        assert counts.num_out_bytes == counts.num_back_bytes == on_way
        assert counts.num_written_bytes == on_drive
        assert (counts.num_read_bytes == on_drive) == (not counts.num_forwarded)
        assert has_link or not counts.num_forwarded
        mover.reset()


@pytest.mark.parametrize("has_link", [False])
def test_a_slow_drive_is_waited_for_both_ways(mover, monkeypatch):
    def slow(real):
        return lambda *given: (time.sleep(0.05), real(*given))[1]

    for name in ("write", "read"):
        monkeypatch.setattr(Scratch, name, slow(getattr(Scratch, name)))
    expected, held = values(), values()
    evicted(mover, held, list(SIZES))
    assert mover.take_counts().num_written_bytes == sum(SIZES.values())
    for key in SIZES:
        assert_back(mover, key, expected)
    assert mover.take_counts().num_read_bytes == sum(SIZES.values())


@with_link
def test_what_stays_on_the_host_is_not_written(mover, monkeypatch, pinned_bytes):
    monkeypatch.setattr(os, "pwritev", lambda *args: pytest.fail("written"))
    held, expected = values(), values()
    evicted(mover, held, ["a", "d"])
    assert pinned_bytes() == SIZES["a"] + SIZES["d"]
    for key in ("d", "a"):
        assert_back(mover, key, expected)
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


@with_link
def test_the_host_is_not_filled_while_a_drive_is_slow(mover, monkeypatch, pinned_bytes):
    held, expected = values(), values()
    mover.read_ahead(LARGEST)
    with Gate(monkeypatch, "pwritev") as gate:
        mover.evict("c", held["c"])
        mover.evict("b", held["b"])
        assert gate.reached.wait(60)
        mover.wait_evicted("c")  # the host has it
        assert pinned_bytes() == SIZES["c"]
        assert mover.take_counts().num_out_bytes == SIZES["c"]  # no room for the other
    mover.wait_evicted("b")
    for key in ON_DRIVE:
        assert_back(mover, key, expected)


@with_link
def test_a_value_that_is_still_on_the_host_comes_back_from_there(
    mover, monkeypatch, pinned_bytes
):
    monkeypatch.setattr(os, "preadv", lambda *args: pytest.fail("read"))
    held, expected = values(), values()
    with Gate(monkeypatch, "pwritev"):
        evicted(mover, held, ["c"])
        mover.prefetch("c")
        np.testing.assert_array_equal(mover.get("c"), expected["c"])
        assert pinned_bytes() == SIZES["c"]  # the drive still reads it
    mover.release("c")
    assert pinned_bytes() == 0
    evicted(mover, held, ["b"])  # it has the room of the other when that is written
    assert mover.take_counts().num_forwarded == 1


@pytest.mark.parametrize("has_link", [False])
def test_a_value_that_is_still_written_comes_back_itself(mover, monkeypatch):
    value = values()["c"]
    with Gate(monkeypatch, "pwritev"):
        mover.evict("c", value)
        mover.prefetch("c")
        assert mover.get("c") is value
    mover.release("c")
    assert mover.take_counts().num_forwarded == 1


@with_link
def test_values_are_read_ahead_as_far_as_there_is_room(mover, monkeypatch):
    held, expected = values(), values()
    reads = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: reads.append(args) or real(*args))
    evicted(mover, held, list(ON_DRIVE))
    written, on_drive = 0, sum(SIZES[key] for key in ON_DRIVE)
    while (written := written + mover.take_counts().num_written_bytes) < on_drive:
        time.sleep(1e-3)
    time.sleep(0.05)
    assert len(reads) <= 2  # c has two parts; b is not read ahead
    assert_back(mover, "c", expected)
    assert_back(mover, "b", expected)
    assert len(reads) == 3


def test_reset_drops_everything(mover, has_link, pinned_bytes):
    mover.read_ahead(LARGEST)
    for key, value in values().items():
        mover.evict(key, value)
    mover.reset()
    mover.take_counts()
    assert pinned_bytes() == 0
    test_values_come_back(mover, has_link)


def fail(code):
    def failing(*args):
        raise OSError(code, os.strerror(code))

    return failing


def test_a_full_drive_is_told_and_forgotten(mover, has_link, monkeypatch):
    held = values()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", fail(errno.ENOSPC))
        with pytest.raises(StoreSpaceError, match="a file of activations"):
            evicted(mover, held, ["c", "b"])  # the other has no room before
    mover.reset()
    mover.take_counts()
    test_values_come_back(mover, has_link)


def test_others_come_back_if_one_cannot_be_read(mover, has_link, monkeypatch):
    held, expected = values(), values()
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail(errno.EIO))
        evicted(mover, held, ["c", "a", "b"])  # this waits until the first is written
        mover.prefetch("c")
        with pytest.raises(StoreIOError, match="a file of activations"):
            mover.get("c")
        mover.release("c")
    assert_back(mover, "a", expected)
    mover.reset()
    mover.take_counts()
    test_values_come_back(mover, has_link)


def test_threads_end(mover):
    before = set(threading.enumerate())
    mover.evict("a", values()["a"])
    own = set(threading.enumerate()) - before
    assert {thread.name for thread in own} == {"jaxinf-activations"}
    mover.close()
    assert not any(thread.is_alive() for thread in own)
