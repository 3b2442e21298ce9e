"""Files without names: bits, stripes, room, and what is left behind."""

import errno
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from jaxinf.errors import StoreIOError, StoreSpaceError
from jaxinf.streaming.move.scratch import (
    PART_BYTES,
    Scratch,
    place_bytes,
    raw_bytes,
)
from jaxinf.transfer import ByteMeters
from jaxinf.transfer.pages import page_ceil
from jaxinf.transfer.pool import aligned

SIZES = [0, 1, 1023, 4095, 4096, 4097, PART_BYTES - 1, 2 * PART_BYTES + 5]


def test_memory_for_a_long_value_begins_on_a_huge_page():
    for num_bytes, boundary in ((0, 4096), (5000, 4096), (8 << 20, 2 << 20)):
        memory = aligned(num_bytes)
        assert memory.ctypes.data % boundary == 0
        assert len(memory) == max(page_ceil(num_bytes), 4096)
        assert not memory.any()


def moved(scratch, place, value):
    """Writes and reads a value."""
    out = aligned(place_bytes(place))
    for part in place:
        scratch.write(part, raw_bytes(value))
    for part in place:
        scratch.read(part, out)
    return out[: value.nbytes]


@pytest.mark.parametrize("num_drives", [1, 3])
def test_values_come_back(tmp_path, num_drives):
    folders = [tmp_path / str(i) for i in range(num_drives)]
    for folder in folders:
        folder.mkdir()
    meters = ByteMeters()
    scratch = Scratch(folders, meters)
    rng = np.random.default_rng(0)
    values = [rng.integers(0, 256, size).astype(np.uint8) for size in SIZES]
    places = scratch.allocate(value.nbytes for value in values)
    for value, place in zip(values, places, strict=True):
        np.testing.assert_array_equal(moved(scratch, place, value), value)
    counts = meters.snapshot()
    assert counts.drive_write_bytes == sum(page_ceil(size) for size in SIZES)
    assert counts.drive_read_bytes == counts.drive_write_bytes
    assert {part.drive for place in places for part in place} == set(range(num_drives))
    assert not any(list(folder.iterdir()) for folder in folders)
    scratch.close()
    scratch.close()


def test_places_do_not_overlap(tmp_path):
    scratch = Scratch([tmp_path, tmp_path])
    ends = [0, 0]
    for parts in scratch.allocate(SIZES):
        for part in parts:
            assert part.offset_bytes == ends[part.drive]
            ends[part.drive] += page_ceil(part.stop - part.start)
    scratch.close()


def test_without_files_that_have_no_name(tmp_path, monkeypatch):
    real_open = os.open

    def refuse(path, flags, *args, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real_open(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    scratch = Scratch([tmp_path])
    (place,) = scratch.allocate([5000])
    value = np.arange(5000, dtype=np.uint8)
    np.testing.assert_array_equal(moved(scratch, place, value), value)
    assert not list(tmp_path.iterdir())
    scratch.close()


def test_a_missing_folder_is_named(tmp_path):
    scratch = Scratch([tmp_path / "none"])
    with pytest.raises(StoreIOError, match=r"none \(a file of activations\): making"):
        scratch.allocate([1])


def test_a_full_drive_is_named(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    num_open = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(StoreSpaceError, match="reserving room failed"):
            Scratch([tmp_path]).allocate([1])
    assert len(os.listdir("/proc/self/fd")) == num_open
    scratch = Scratch([tmp_path])
    (place,) = scratch.allocate([1])
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", full)
        with pytest.raises(StoreSpaceError, match=r"activations\): write at byte 0"):
            moved(scratch, place, np.zeros(1, np.uint8))
    moved(scratch, place, np.zeros(1, np.uint8))
    scratch.close()


KILLED = Path(__file__).parents[2] / "programs" / "killed_scratch.py"


@pytest.mark.long
def test_a_killed_process_leaves_nothing(tmp_path, run_python):
    done = run_python(KILLED, str(tmp_path), check=False)
    assert done.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_two_runs_share_a_folder(tmp_path):
    one, other = Scratch([tmp_path]), Scratch([tmp_path])
    values = [np.full(9000, number, np.uint8) for number in (1, 2)]
    places = []
    for scratch, value in zip((one, other), values, strict=True):
        places += scratch.allocate([value.nbytes])
        np.testing.assert_array_equal(moved(scratch, places[-1], value), value)
    one.close()
    out = aligned(place_bytes(places[1]))
    other.read(places[1][0], out)
    np.testing.assert_array_equal(out[:9000], values[1])
    other.close()
