"""Files without names: bits, stripes, room, and what is left behind."""

import errno
import os

import numpy as np
import pytest

from jaxinf.errors import StoreIOError, StoreSpaceError
from jaxinf.streaming.move.scratch import (
    PART_BYTES,
    Scratch,
    place_bytes,
)
from jaxinf.transfer import ByteMeters, page_ceil
from jaxinf.transfer.pool import aligned

SIZES = [0, 1, 1023, 4095, 4096, 4097, PART_BYTES - 1, 2 * PART_BYTES + 5]


def write(scratch, place, value):
    for part in place:
        scratch.write(part, value)


def read(scratch, place):
    out = aligned(place_bytes(place))
    for part in place:
        scratch.read(part, out)
    return out


@pytest.mark.parametrize("num_drives", [1, 3])
def test_values_come_back(tmp_path, num_drives):
    """All are written before one is read: places do not overlap, nor do runs' files."""
    folders = [tmp_path / str(i) for i in range(num_drives)]
    for folder in folders:
        folder.mkdir()
    meters = ByteMeters()
    scratch, beside = Scratch(folders, meters), Scratch(folders)
    rng = np.random.default_rng(0)
    values = [rng.integers(0, 256, size).astype(np.uint8) for size in SIZES]
    places = scratch.allocate(dict(enumerate(SIZES))).values()
    for value, place in zip(values, places, strict=True):
        write(scratch, place, value)
    other = beside.allocate({0: 9000})[0]
    write(beside, other, np.ones(9000, np.uint8))
    beside.close()
    for value, place in zip(values, places, strict=True):
        np.testing.assert_array_equal(read(scratch, place)[: value.nbytes], value)
    counts = meters.snapshot()
    assert counts.drive_write_bytes == sum(page_ceil(size) for size in SIZES)
    assert counts.drive_read_bytes == counts.drive_write_bytes
    assert {part.drive for place in places for part in place} == set(range(num_drives))
    assert not any(list(folder.iterdir()) for folder in folders)
    scratch.close()
    scratch.close()


def test_without_files_that_have_no_name(tmp_path, monkeypatch):
    real_open = os.open

    def refuse(path, flags, *args, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real_open(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    test_values_come_back(tmp_path, 1)


def test_what_cannot_be_written_is_named(tmp_path, monkeypatch):
    with pytest.raises(StoreIOError, match=r"none \(a file of activations\): making"):
        Scratch([tmp_path / "none"]).allocate({0: 1})

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    num_open = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(StoreSpaceError, match="reserving room failed"):
            Scratch([tmp_path]).allocate({0: 1})
    assert len(os.listdir("/proc/self/fd")) == num_open
    scratch = Scratch([tmp_path])
    place = scratch.allocate({0: 1})[0]
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", full)
        with pytest.raises(StoreSpaceError, match=r"activations\): write at byte 0"):
            write(scratch, place, np.zeros(1, np.uint8))
    write(scratch, place, np.zeros(1, np.uint8))
    scratch.close()
