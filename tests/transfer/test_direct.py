import ctypes
import errno
import logging
import mmap
import os

import numpy as np
import pytest
from inject import at_call, at_each_call, raising

from jaxinf.errors import StoreIOError, StoreSpaceError
from jaxinf.transfer import (
    ByteMeters,
    allocate_file,
    direct,
    read_into,
    supports_direct,
    write_from,
)

PAGE = 4096
LENGTHS = [0, 1, 4095, 4096, 4097, 3 * 4096, 70_001]


def new(path, num_bytes, fill=0):
    path.write_bytes(bytes([fill]) * num_bytes)
    return path


def cached_pages(path):
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    view = np.frombuffer(memory, np.uint8)
    pages = (ctypes.c_ubyte * (-(-len(view) // PAGE)))()
    ctypes.CDLL(None).mincore(
        ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view)), pages
    )
    return sum(page & 1 for page in pages)


@pytest.fixture
def no_warning_yet(monkeypatch):
    monkeypatch.setattr(direct, "_warned", set())


@pytest.mark.parametrize(
    ("num_bytes", "offset"),
    [*zip(LENGTHS, [0, 4096, 0, 0, 20480, 4096, 0], strict=True)],
)
def test_round_trip(any_dir, aligned, num_bytes, offset):
    """In whole pages."""
    path, meters = new(any_dir / "f", 32 * PAGE, fill=7), ByteMeters()
    buffer = aligned(num_bytes + -num_bytes % PAGE)
    data = buffer[:num_bytes].copy()
    write_from(path, buffer, offset, num_bytes, meters=meters)
    found = path.read_bytes()
    end = offset + num_bytes
    rounded = end + -num_bytes % PAGE
    assert len(found) == 32 * PAGE
    assert found[:offset] == b"\7" * offset
    assert found[offset:end] == data.tobytes()
    assert set(found[end:rounded]) <= {0}
    assert set(found[rounded:]) == {7}
    back = aligned(buffer.size, seed=1)
    read_into(path, back, offset, num_bytes, meters=meters)
    np.testing.assert_array_equal(back[:num_bytes], data)
    counts = meters.snapshot()
    assert counts.drive_write_bytes == counts.drive_read_bytes == rounded - offset


@pytest.mark.parametrize("num_bytes", [1, 4, 4095, 4097, 70_001])
def test_a_file_that_ends_within_a_page_keeps_its_length(any_dir, aligned, num_bytes):
    path, meters = new(any_dir / "f", num_bytes), ByteMeters()
    buffer = aligned(20 * PAGE)
    data = buffer[:num_bytes].copy()
    write_from(path, buffer, 0, num_bytes, meters=meters)
    assert path.read_bytes() == data.tobytes()
    back = aligned(20 * PAGE, seed=1)
    read_into(path, back, 0, num_bytes, meters=meters)
    np.testing.assert_array_equal(back[:num_bytes], data)
    counts = meters.snapshot()
    assert counts.drive_write_bytes == counts.drive_read_bytes == num_bytes


def test_an_odd_end_is_durable_at_once(any_dir, aligned, monkeypatch):
    flushed = []
    monkeypatch.setattr(
        os, "fdatasync", lambda fd: flushed.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    write_from(new(any_dir / "f", 2 * PAGE), aligned(2 * PAGE), 0, PAGE + 1)
    assert flushed == []
    path = new(any_dir / "g", PAGE + 1)
    write_from(path, aligned(2 * PAGE), 0, PAGE + 1)
    assert flushed == [str(path)]


@pytest.mark.parametrize("missing", [0, 3])
def test_direct_io_leaves_nothing_in_the_page_cache(tmp_path, aligned, missing):
    """But for the end of a file that ends within a page, as a shard's may."""
    if not supports_direct(tmp_path):
        pytest.skip("no direct I/O on the file system of the temporary directory")
    path, data = tmp_path / "f", aligned(64 * PAGE)
    length = 64 * PAGE - missing
    allocate_file(path, length, length)
    write_from(path, data, 0, 64 * PAGE - 3)
    assert cached_pages(path) == bool(missing)
    read_into(path, data, 0, length)
    assert cached_pages(path) <= bool(missing)
    if missing:  # a card's memory
        with pytest.raises(StoreIOError, match=r"EINVAL\)"):
            write_from(path, data, 0, length, buffered=False)


# --- refused --------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 8193), (8192, 1), (16384, 4096)])
def test_truncated_file(any_dir, aligned, offset, num_bytes):
    path, meters = new(any_dir / "f", 8192), ByteMeters()
    message = f"truncated: expected {offset + num_bytes} bytes, found 8192; restore"
    with pytest.raises(StoreIOError, match=message):
        read_into(path, aligned(20480), offset, num_bytes, meters=meters)
    assert meters.snapshot().drive_read_bytes == 0


@pytest.mark.parametrize("call", [read_into, write_from])
@pytest.mark.parametrize(
    ("name", "message"),
    [("absent", r"absent: .* at byte 4096 .*ENOENT.*;"), ("", "EISDIR")],
)
def test_what_is_no_file(tmp_path, aligned, caplog, call, name, message):
    with pytest.raises(StoreIOError, match=message):
        call(tmp_path / name, aligned(4096), 4096, 4096)
    assert not caplog.records


def test_missing_root():
    with pytest.raises(StoreIOError, match=r"probe of direct I/O failed.*ENOENT"):
        supports_direct("/nonexistent/root")


# --- file systems and drives that do less --------------------------------------------


def test_refusing_file_system_falls_back_with_one_warning(
    tmp_path, aligned, no_warning_yet, caplog, monkeypatch
):
    """All its files refuse O_DIRECT, as on an older tmpfs."""

    def refuse(path, flags, *_, **__):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))

    at_each_call(monkeypatch, os, "open", refuse)
    path = new(tmp_path / "f", 4 * PAGE, fill=7)
    data, back = aligned(3 * PAGE), aligned(3 * PAGE, seed=1)
    for _ in range(2):
        write_from(path, data, 0, 3 * PAGE - 5)
        read_into(path, back, 0, 3 * PAGE - 5)
    np.testing.assert_array_equal(back[: 3 * PAGE - 5], data[: 3 * PAGE - 5])
    assert not supports_direct(tmp_path)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("jaxinf.transfer", logging.WARNING)
    assert record.getMessage().startswith(f"{tmp_path}: direct I/O is refused (Inval")


def test_requests_refused_after_a_good_open(
    tmp_path, aligned, monkeypatch, no_warning_yet, caplog
):
    path, array = new(tmp_path / "f", PAGE, fill=7), aligned(PAGE)
    refuse = raising(OSError(errno.EINVAL, os.strerror(errno.EINVAL)))
    at_call(os, "preadv", 1, refuse, patch=monkeypatch)
    read_into(path, array, 0, PAGE)
    assert set(array) == {7}
    assert len(caplog.records) == 1


def test_short_transfers_are_completed(tmp_path, aligned, monkeypatch):
    lengths = []

    def shortened(real):
        def call(fd, buffers, offset):
            lengths.append(len(buffers[0]))
            return real(fd, [buffers[0][:PAGE]], offset)

        return call

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, shortened(getattr(os, name)))
    path, data = new(tmp_path / "f", 3 * PAGE), aligned(3 * PAGE)
    write_from(path, data, 0, 3 * PAGE)
    back = aligned(3 * PAGE, seed=1)
    read_into(path, back, 0, 3 * PAGE)
    np.testing.assert_array_equal(back, data)
    assert lengths == [3 * PAGE, 2 * PAGE, PAGE] * 2


@pytest.mark.parametrize("code", [None, errno.ENOSPC, errno.EFBIG])
def test_a_write_that_stops_within_a_page(tmp_path, aligned, monkeypatch, code):
    """The rest is requested from that byte on, since a whole page would be accepted."""
    end, offsets, pwritev = 2 * PAGE + 100, [], os.pwritev

    def stopping(fd, buffers, offset):
        offsets.append(offset)
        if offset >= end and code is not None:
            raise OSError(code, os.strerror(code))
        return pwritev(fd, [buffers[0][: end - offset or None]], offset)

    monkeypatch.setattr(os, "pwritev", stopping)
    path, data = new(tmp_path / "f", 4 * PAGE), aligned(4 * PAGE)
    if code is None:
        write_from(path, data, 0, 4 * PAGE)
        assert path.read_bytes() == data.tobytes()
    else:
        with pytest.raises(StoreSpaceError, match=os.strerror(code)):
            write_from(path, data, 0, 4 * PAGE)
    assert offsets[-1] == end


def test_a_write_that_makes_no_progress_fails(tmp_path, aligned, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 0)
    meters = ByteMeters()
    for num_bytes in (PAGE, 5):
        path = new(tmp_path / "f", num_bytes)
        with pytest.raises(StoreIOError, match="at byte 0 failed: Input/output error"):
            write_from(path, aligned(PAGE), 0, num_bytes, meters=meters)
    assert meters.snapshot().drive_write_bytes == 0
