"""Values on their way out and back: bits, order, forwarding, failures."""

import errno
import os
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinf.errors import StoreIOError, StoreSpaceError
from jaxinf.io.pages import page_ceil
from jaxinf.streaming.move.cache import Cache
from jaxinf.streaming.move.scratch import Scratch
from jaxinf.streaming.plan.forms import PART_BYTES

SIZES = {"a": 5, "b": 70_000, "c": PART_BYTES + 3, "d": 4096}


@pytest.fixture
def cache(tmp_path):
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    scratch = Scratch(folders)
    places = {key: scratch.allocate(size) for key, size in SIZES.items()}
    scratch.reserve()
    found = Cache(scratch, places, sum(page_ceil(size) for size in SIZES.values()))
    yield found
    found.close()
    scratch.close()


def values():
    rng = np.random.default_rng(0)
    return {k: rng.integers(0, 256, n).astype(np.uint8) for k, n in SIZES.items()}


def test_values_come_back_in_reverse(cache):
    held = values()
    for _ in range(2):
        for key, value in held.items():
            cache.leave(key, jnp.asarray(value))
        for key in held:
            cache.gone(key)
        for key in reversed(held):
            cache.bring(key)
        for key in reversed(held):
            raw, other = cache.take(key)
            assert other is None
            np.testing.assert_array_equal(raw[: SIZES[key]], held[key])
            cache.release(key)
        counts = cache.take_counts()
        assert counts.num_written_bytes == counts.num_read_bytes == sum(SIZES.values())
        assert counts.write_s > 0
        assert counts.read_s > 0
        assert not counts.num_forwarded


def test_a_value_on_its_way_out_is_handed_back(cache):
    value = values()["b"]
    cache.leave("b", value)
    cache.bring("b")  # it never left
    raw, same = cache.take("b")
    assert raw is None
    assert same is value
    cache.release("b")
    assert cache.take_counts().num_forwarded == 1


def test_reset_drops_everything(cache):
    for key, value in values().items():
        cache.leave(key, value)
    cache.reset()
    cache.take_counts()
    test_values_come_back_in_reverse(cache)


@pytest.mark.parametrize(
    ("call", "code", "kind"),
    [("pwritev", errno.ENOSPC, StoreSpaceError), ("preadv", errno.EIO, StoreIOError)],
)
def test_a_failing_drive_is_told_and_forgotten(cache, monkeypatch, call, code, kind):
    def fail(*args):
        raise OSError(code, os.strerror(code))

    held = values()
    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        cache.leave("b", held["b"])
        if call == "preadv":
            cache.gone("b")
            cache.bring("b")
        with pytest.raises(kind, match="a file of activations"):
            cache.gone("b") if call == "pwritev" else cache.take("b")
    cache.reset()
    cache.take_counts()
    test_values_come_back_in_reverse(cache)


def test_threads_end(cache):
    before = set(threading.enumerate())
    cache.leave("a", values()["a"])
    own = set(threading.enumerate()) - before
    assert {thread.name for thread in own} == {"jaxinf-activations"}
    cache.close()
    assert not any(thread.is_alive() for thread in own)
