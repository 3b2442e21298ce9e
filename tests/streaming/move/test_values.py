"""Values that leave and come back, call by call: bits, order, room, failures."""

import errno
import os
import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinf.errors import StoreIOError, StoreSpaceError
from jaxinf.streaming.move.scratch import PART_BYTES, Scratch
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.plan.calls import Eviction, Life, Slot, Tiers
from jaxinf.streaming.plan.leaving import NUM_COPIES
from jaxinf.transfer.pages import page_ceil

SIZES = (4, 70_000, PART_BYTES + 4, 4096)
SLOTS = [Slot(number) for number in range(len(SIZES))]
ON_DRIVE = (SLOTS[2], SLOTS[1])  # in the order of their next use
LARGEST = page_ceil(max(SIZES))
MADE, GONE, BACK, NEEDED = 0, 2, 4, 6
TIERS = Tiers(ON_DRIVE, 1 << 30, NUM_COPIES * LARGEST, [LARGEST] * 10)


def made():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.integers(0, 1 << 30, n // 4, np.int32)) for n in SIZES]


@pytest.fixture(params=[None, TIERS], ids=["no link", "link"])
def tiers(request):
    return request.param


with_link = pytest.mark.parametrize("tiers", [TIERS], ids=["link"])


@pytest.fixture
def values(tmp_path, tiers):
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    away = {slot: Eviction(MADE, GONE, BACK, NEEDED) for slot in SLOTS}
    lives = {
        slot: Life(MADE, [NEEDED], num_bytes, None)
        for slot, num_bytes in zip(SLOTS, SIZES, strict=True)
    }
    plan = SimpleNamespace(evictions=away, lives=lives, calls=[None] * (NEEDED + 1))
    own = Values(plan, Scratch(folders), tiers)
    yield own
    own.close()


def leave(values):
    """Lets all values leave; nothing holds them on the device afterwards."""
    values.before(MADE)
    outputs = made()
    values.put(SLOTS, outputs)
    values.after(MADE, ())
    references = [weakref.ref(output) for output in outputs]
    del outputs
    values.before(GONE)
    assert not any(one() for one in references)


def assert_back(values, slots=SLOTS):
    values.before(BACK)
    for slot in slots:
        np.testing.assert_array_equal(values[slot], made()[slot.number])
    values.done(NEEDED)


def test_values_come_back(values, tiers):
    for _ in range(2):
        leave(values)
        assert_back(values)
        counts = values.counts()
        on_drive = [SIZES[slot.number] for slot in (ON_DRIVE if tiers else SLOTS)]
        assert counts.num_written_bytes == sum(on_drive)
        assert (counts.num_read_bytes == sum(on_drive)) == (not counts.num_forwarded)
        assert counts.num_out_bytes == (sum(SIZES) if tiers else 0)
        values.reset()


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
def test_a_value_that_is_still_written_is_forwarded(tmp_path, tiers, monkeypatch):
    away = {SLOTS[2]: Eviction(MADE, GONE, BACK, NEEDED)}
    lives = {SLOTS[2]: Life(MADE, [NEEDED], SIZES[2], None)}
    plan = SimpleNamespace(evictions=away, lives=lives, calls=[None] * (NEEDED + 1))
    values = Values(plan, Scratch([tmp_path]), replace(tiers, on_drive=ON_DRIVE[:1]))
    real, reads = os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda *args: reads.append(args) or real(*args))
    with Gate(monkeypatch, "pwritev") as gate:
        values.put(SLOTS[2:3], made()[2:3])
        values.after(MADE, ())
        values.before(GONE)
        values.before(BACK)
        assert gate.reached.wait(60)
        np.testing.assert_array_equal(values[SLOTS[2]], made()[2])
    values.done(NEEDED)  # waits for the drive
    counts = values.counts()
    assert (counts.num_forwarded, len(reads)) == (1, 0)
    assert counts.num_written_bytes == SIZES[2]
    values.close()


@with_link
def test_the_host_is_not_filled_while_a_drive_is_slow(values, monkeypatch):
    with Gate(monkeypatch, "pwritev") as gate:
        values.put(SLOTS, made())
        values.after(MADE, ())
        assert gate.reached.wait(60)
        time.sleep(0.2)
        out_bytes = values.counts().num_out_bytes
        assert out_bytes == SIZES[0] + SIZES[1]  # the host has no room for the third
    values.before(GONE)
    assert_back(values)


def failing(code):
    def fail(*args):
        raise OSError(code, os.strerror(code))

    return fail


def test_reset_drops_everything_after_a_full_drive(values, tiers, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", failing(errno.ENOSPC))
        with pytest.raises(StoreSpaceError, match="a file of activations"):
            leave(values)
    values.reset()
    assert all(x.sharding.memory_kind != "pinned_host" for x in jax.live_arrays())
    values.counts()
    test_values_come_back(values, tiers)


@pytest.mark.parametrize("tiers", [None], ids=["no link"])
def test_a_value_that_cannot_be_read_ends_the_step(values, tiers, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", failing(errno.EIO))
        leave(values)
        with pytest.raises(StoreIOError, match="a file of activations"):
            assert_back(values)
    values.reset()
    values.counts()
    test_values_come_back(values, tiers)
