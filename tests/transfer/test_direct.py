import errno
import logging
import os
import resource

import numpy as np
import pytest

from jaxinf.errors import StoreIOError, StoreSpaceError
from jaxinf.transfer import (
    ByteMeters,
    allocate_file,
    direct,
    read_into,
    supports_direct,
    write_from,
)

_PAGE = 4096
_LENGTHS = [0, 1, 4095, 4096, 4097, 3 * 4096, 70_001]


def _new(path, num_bytes, fill=0):
    path.write_bytes(bytes([fill]) * num_bytes)
    return path


def _cached_pages(path):
    import ctypes
    import mmap

    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    view = np.frombuffer(memory, np.uint8)
    pages = (ctypes.c_ubyte * (-(-len(view) // _PAGE)))()
    ctypes.CDLL(None).mincore(
        ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view)), pages
    )
    return sum(page & 1 for page in pages)


@pytest.fixture
def no_warning_yet(monkeypatch):
    monkeypatch.setattr(direct, "_warned", set())


@pytest.fixture
def refusing_open(monkeypatch, no_warning_yet):
    """A kernel whose file systems all refuse O_DIRECT, as older tmpfs do."""
    real_open = os.open

    def fake_open(path, flags, mode=0o777, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return real_open(path, flags, mode, **kwargs)

    monkeypatch.setattr(os, "open", fake_open)


def test_an_odd_end_is_durable_at_once(any_dir, aligned, monkeypatch):
    path, flushed = _new(any_dir / "f", 2 * _PAGE), []
    monkeypatch.setattr(
        os, "fdatasync", lambda fd: flushed.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    write_from(path, aligned(_PAGE), 0, _PAGE)
    assert flushed == []
    write_from(path, aligned(_PAGE + 1), 0, _PAGE + 1)
    assert flushed == [str(path)]


@pytest.mark.parametrize("num_bytes", _LENGTHS)
@pytest.mark.parametrize("offset", [0, 4096, 5 * 4096])
def test_round_trip(any_dir, aligned, num_bytes, offset):
    path = _new(any_dir / "f", 32 * _PAGE, fill=7)
    data = aligned(num_bytes)
    write_from(path, data, offset, num_bytes)
    found = path.read_bytes()
    assert len(found) == 32 * _PAGE
    assert found[offset : offset + num_bytes] == data.tobytes()
    assert found[:offset] == b"\7" * offset
    # The array ends with the data: nothing is rounded up, the rest stays.
    assert set(found[offset + num_bytes :]) == {7}
    back = aligned(num_bytes, seed=1)
    read_into(path, back, offset, num_bytes)
    np.testing.assert_array_equal(back, data)


@pytest.mark.parametrize("num_bytes", _LENGTHS)
def test_rounding_up_to_pages(any_dir, aligned, num_bytes):
    path = _new(any_dir / "f", 32 * _PAGE, fill=7)
    meters = ByteMeters()
    buffer = aligned(20 * _PAGE)
    data = buffer[:num_bytes].copy()
    write_from(path, buffer, _PAGE, num_bytes, meters=meters)
    rounded = num_bytes + -num_bytes % _PAGE
    found = path.read_bytes()
    assert found[_PAGE : _PAGE + num_bytes] == data.tobytes()
    assert set(found[_PAGE + num_bytes : _PAGE + rounded]) <= {0}
    assert set(found[_PAGE + rounded :]) == {7}
    back = aligned(20 * _PAGE, seed=1)
    read_into(path, back, _PAGE, num_bytes, meters=meters)
    np.testing.assert_array_equal(back[:num_bytes], data)
    counts = meters.snapshot()
    assert counts.drive_write_bytes == counts.drive_read_bytes == rounded


@pytest.mark.parametrize("num_bytes", [1, 4, 4095, 4097, 70_001])
def test_a_file_that_ends_within_a_page_keeps_its_length(any_dir, aligned, num_bytes):
    path = _new(any_dir / "f", num_bytes)
    buffer = aligned(20 * _PAGE)
    data = buffer[:num_bytes].copy()
    meters = ByteMeters()
    write_from(path, buffer, 0, num_bytes, meters=meters)
    assert path.read_bytes() == data.tobytes()
    back = aligned(20 * _PAGE, seed=1)
    read_into(path, back, 0, num_bytes, meters=meters)
    np.testing.assert_array_equal(back[:num_bytes], data)
    counts = meters.snapshot()
    assert counts.drive_write_bytes == counts.drive_read_bytes == num_bytes


def test_a_read_only_source_is_not_padded(tmp_path, aligned):
    path = _new(tmp_path / "f", _PAGE, fill=7)
    buffer = aligned(_PAGE)
    buffer.flags.writeable = False
    write_from(path, buffer, 0, 5)
    assert path.read_bytes() == buffer[:5].tobytes() + b"\7" * (_PAGE - 5)


def test_direct_io_leaves_nothing_in_the_page_cache(tmp_path, aligned):
    if not supports_direct(tmp_path):
        pytest.skip("no direct I/O on the file system of the temporary directory")
    path, data = tmp_path / "f", aligned(64 * _PAGE)
    allocate_file(path, 64 * _PAGE, 64 * _PAGE)
    write_from(path, data, 0, 64 * _PAGE - 3)
    read_into(path, data, 0, 64 * _PAGE)
    assert _cached_pages(path) == 0


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 8193), (8192, 1), (16384, 4096)])
@pytest.mark.parametrize("room", [0, _PAGE])
def test_truncated_file(any_dir, aligned, offset, num_bytes, room):
    path = _new(any_dir / "f", 8192)
    array = aligned(num_bytes + room)
    message = f"truncated: expected {offset + num_bytes} bytes, found 8192; restore"
    meters = ByteMeters()
    with pytest.raises(StoreIOError, match=message):
        read_into(path, array, offset, num_bytes, meters=meters)
    assert meters.snapshot().drive_read_bytes == 0


def test_missing_file(tmp_path, aligned):
    for call in (read_into, write_from):
        with pytest.raises(StoreIOError, match=r"absent: .* at byte 4096 .*ENOENT.*;"):
            call(tmp_path / "absent", aligned(4096), 4096, 4096)


def test_a_directory_is_no_file(tmp_path, aligned, caplog):
    for call in (read_into, write_from):
        with pytest.raises(StoreIOError, match="EISDIR"):
            call(tmp_path, aligned(4096), 0, 4096)
    assert not caplog.records


def test_file_size_limit_is_a_space_error(tmp_path, aligned):
    path = _new(tmp_path / "f", 10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_PAGE, limits[1]))
    try:
        with pytest.raises(StoreSpaceError, match=r"at byte 8192 .*ulimit -f"):
            write_from(path, aligned(_PAGE), 2 * _PAGE, _PAGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_device(aligned):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full to write to")
    with pytest.raises(StoreSpaceError, match=r"No space left.*; free space there"):
        write_from("/dev/full", aligned(_PAGE), 0, 5)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda a: (a.view(np.int8), 0, 1), "int8 of shape"),
        (lambda a: (a.reshape(2, -1), 0, 1), "uint8 of shape"),
        (lambda a: (a[::2], 0, 1), ".*strides"),
        (lambda a: (a[1:], 0, 1), "an array at address"),
        (lambda a: (a, 512, 1), "an offset of 512"),
        (lambda a: (a, -4096, 1), "an offset of -4096"),
        (lambda a: (a, 0, 8193), "8193 bytes of an array of 8192"),
        (lambda a: (a, 0, -1), "-1 bytes"),
    ],
)
def test_bad_arguments(tmp_path, aligned, change, found):
    path = _new(tmp_path / "f", 8192)
    for call in (read_into, write_from):
        with pytest.raises(ValueError, match=f"found {found}.*BufferPool"):
            call(path, *change(aligned(8192)))


def test_missing_root():
    with pytest.raises(StoreIOError, match=r"probe of direct I/O failed.*ENOENT"):
        supports_direct("/nonexistent/root")


def test_refusing_file_system_falls_back_with_one_warning(
    tmp_path, aligned, refusing_open, caplog
):
    path = _new(tmp_path / "f", 4 * _PAGE, fill=7)
    data, back = aligned(3 * _PAGE), aligned(3 * _PAGE, seed=1)
    for _ in range(2):
        write_from(path, data, 0, 3 * _PAGE - 5)
        read_into(path, back, 0, 3 * _PAGE - 5)
    np.testing.assert_array_equal(back[: 3 * _PAGE - 5], data[: 3 * _PAGE - 5])
    assert not supports_direct(tmp_path)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("jaxinf.transfer", logging.WARNING)
    assert record.getMessage().startswith(f"{tmp_path}: direct I/O is refused (Inval")


def test_a_file_on_a_refusing_file_system_is_read_buffered(
    aligned, no_warning_yet, caplog
):
    path = "/proc/version"  # procfs does refuse O_DIRECT
    if not os.path.exists(path):
        pytest.skip("no procfs")
    array = aligned(_PAGE)
    for _ in range(2):
        read_into(path, array, 0, 5)
    assert bytes(array[:5]) == b"Linux"
    (record,) = caplog.records
    assert record.getMessage().startswith("/proc: direct I/O is refused")


def test_requests_refused_after_a_good_open(tmp_path, aligned, monkeypatch, caplog):
    monkeypatch.setattr(direct, "_warned", set())
    path, refused = _new(tmp_path / "f", _PAGE, fill=7), []
    real_preadv = os.preadv

    def preadv(fd, buffers, offset):
        if not refused:
            refused.append(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    array = aligned(_PAGE)
    read_into(path, array, 0, _PAGE)
    assert set(array) == {7}
    assert len(caplog.records) == 1


def test_short_transfers_are_completed(tmp_path, aligned, monkeypatch):
    real_preadv, real_pwritev = os.preadv, os.pwritev
    lengths = []

    def shortened(real):
        def call(fd, buffers, offset):
            lengths.append(len(buffers[0]))
            return real(fd, [buffers[0][:_PAGE]], offset)

        return call

    monkeypatch.setattr(os, "preadv", shortened(real_preadv))
    monkeypatch.setattr(os, "pwritev", shortened(real_pwritev))
    path, data = _new(tmp_path / "f", 3 * _PAGE), aligned(3 * _PAGE)
    write_from(path, data, 0, 3 * _PAGE)
    back = aligned(3 * _PAGE, seed=1)
    read_into(path, back, 0, 3 * _PAGE)
    np.testing.assert_array_equal(back, data)
    assert lengths == [3 * _PAGE, 2 * _PAGE, _PAGE] * 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG])
def test_a_write_that_stops_within_a_page_says_why(
    tmp_path, aligned, monkeypatch, code
):
    """The rest is requested from that byte on, since a whole page would be accepted."""
    end, offsets = 2 * _PAGE + 100, []
    real_pwritev = os.pwritev

    def pwritev(fd, buffers, offset):
        offsets.append(offset)
        if offset >= end:
            raise OSError(code, os.strerror(code))
        return real_pwritev(fd, [buffers[0][: end - offset]], offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    path = _new(tmp_path / "f", 4 * _PAGE)
    with pytest.raises(StoreSpaceError, match=os.strerror(code)):
        write_from(path, aligned(4 * _PAGE), 0, 4 * _PAGE)
    assert offsets[-1] == end


def test_a_write_that_stops_within_a_page_goes_on_there(tmp_path, aligned, monkeypatch):
    real_pwritev = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda fd, data, at: real_pwritev(fd, [data[0][:5000]], at)
    )
    path, data = _new(tmp_path / "f", 4 * _PAGE), aligned(4 * _PAGE)
    write_from(path, data, 0, 4 * _PAGE)
    assert path.read_bytes() == data.tobytes()


def test_a_write_that_makes_no_progress_fails(tmp_path, aligned, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 0)
    meters = ByteMeters()
    for num_bytes in (_PAGE, 5):
        path = _new(tmp_path / "f", num_bytes)
        with pytest.raises(StoreIOError, match="at byte 0 failed: Input/output error"):
            write_from(path, aligned(_PAGE), 0, num_bytes, meters=meters)
    assert meters.snapshot().drive_write_bytes == 0
