"""Many transfers in one native call have the effect of one after another."""

import os

import numpy as np
import pytest

from jaxinf.csd import Extent, HostCsd, Transfer, host
from jaxinf.errors import StoreIOError
from jaxinf.native import libraries, toolchain
from jaxinf.native import transfers as native
from jaxinf.transfer import (
    BufferPool,
    ByteCounts,
    ByteMeters,
    read_into,
    supports_direct,
    write_from,
)

PAGE = 4096
LENGTHS = [1, 100, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 5 * PAGE + 17]


@pytest.fixture
def meters():
    return ByteMeters()


@pytest.fixture
def csd(meters):
    pool = BufferPool(1 << 20)
    yield HostCsd(pool, meters)
    pool.close()


def memory(transfer):
    return transfer.buffer.memory.array


def part_of(transfer):
    """Where the buffer has a transfer's bytes."""
    first = transfer.extent.buffer_offset_bytes
    return slice(first, first + transfer.extent.num_bytes)


def native_or_skip():
    """Fails without a native call, unless there can be none here."""
    if not toolchain.levels() or toolchain.find_compiler() is None:
        pytest.skip("no C++ compiler, or another processor than x86-64")
    assert native.function() is not None


@pytest.fixture(params=["native", "python"])
def way(request, monkeypatch):
    if request.param == "native":
        native_or_skip()
    else:
        monkeypatch.setattr(native, "function", lambda: None)
    return request.param


def pages(num_bytes):
    return -(-num_bytes // PAGE) * PAGE


def transfers_of(directory, buffer, lengths=LENGTHS, file_offset=PAGE):
    """Moves parts of a file for each length, which follow each other in the buffer."""
    result, first = [], 0
    for number, length in enumerate(lengths):
        extent = Extent(np.dtype(np.uint8), length, file_offset, first)
        result.append(Transfer(buffer, extent, directory / f"file {number} ä"))
        first += pages(length)
    return result


def fill(buffer, seed=0):
    noise = np.random.default_rng(seed).integers(1, 256, buffer.num_bytes)
    buffer.memory.array[:] = noise.astype(np.uint8)


@pytest.mark.parametrize("room", ["whole pages", "exact", "longer"])
def test_moves_what_direct_io_moves(tmp_path, csd, meters, way, room):
    buffer, other = csd.acquire(128 * 1024), csd.acquire(128 * 1024)
    transfers = transfers_of(tmp_path, buffer)
    for _, extent, file, _ in transfers:
        length = PAGE + extent.num_bytes
        length = {"exact": length, "longer": length + 2 * PAGE}.get(room, pages(length))
        file.write_bytes(b"\xff" * length)
    fill(buffer)
    wanted = buffer.memory.array.copy()
    csd.write(transfers)
    for one in transfers:
        found, num_bytes = one.file.read_bytes(), one.extent.num_bytes
        assert found[PAGE:].startswith(wanted[part_of(one)].tobytes())
        assert found[:PAGE] == b"\xff" * PAGE
        padding = found[PAGE + num_bytes : PAGE + pages(num_bytes)]
        assert padding == b"\0" * len(padding)
    fill(other, seed=1)
    csd.read([one._replace(buffer=other) for one in transfers])
    for one in transfers:
        part = part_of(one)
        np.testing.assert_array_equal(other.memory.array[part], wanted[part])
    # As one after another.
    single = ByteMeters()
    for action in (write_from, read_into):
        for one in transfers:
            first, length = part_of(one).start, one.extent.num_bytes
            array = memory(one)[first : first + pages(length)]
            action(one.file, array, PAGE, length, meters=single)
    assert meters.snapshot() == single.snapshot() != ByteCounts()


def test_what_is_unusual_among_many(tmp_path, csd, meters, way):
    """Moves more than fit at once; a failing one does not affect the others."""
    lengths = [1 + (97 * number) % (2 * PAGE) for number in range(120)]
    buffer = csd.acquire(1 << 20)
    fill(buffer)
    wanted = buffer.memory.array.copy()
    transfers = transfers_of(tmp_path, buffer, lengths, file_offset=0)
    for one in transfers:
        one.file.write_bytes(b"\xff" * pages(one.extent.num_bytes))
    csd.write(transfers)
    assert meters.snapshot().drive_write_bytes == sum(map(pages, lengths))
    short, missing = transfers[70], transfers[110]
    os.truncate(short.file, short.extent.num_bytes - 1)
    buffer.memory.array[:] = 0
    with pytest.raises(StoreIOError, match=f"{short.file.name}: truncated"):
        csd.read(transfers)
    os.truncate(short.file, short.extent.num_bytes)
    missing.file.unlink()
    with pytest.raises(StoreIOError, match=missing.file.name):
        csd.read(transfers)
    for one in transfers[:70] + transfers[71:110]:
        part = part_of(one)
        np.testing.assert_array_equal(memory(one)[part], wanted[part])


def test_one_call_for_all(tmp_path, csd, monkeypatch):
    native_or_skip()
    function, calls = native.function(), []

    def counted(*arguments):
        calls.append(arguments[0])
        return function(*arguments)

    monkeypatch.setattr(native, "function", lambda: counted)
    if not supports_direct(tmp_path):
        pytest.skip(f"{tmp_path}: no direct I/O there")

    def refuse(*arguments):
        raise AssertionError("one at a time")

    monkeypatch.setattr(host, "read_into", refuse)
    monkeypatch.setattr(host, "write_from", refuse)
    transfers = transfers_of(tmp_path, csd.acquire(128 * 1024))
    for one in transfers:
        one.file.write_bytes(b"\xff" * (PAGE + pages(one.extent.num_bytes)))
    csd.write(transfers)
    csd.read(transfers)
    assert calls == [len(LENGTHS)] * 2


@pytest.mark.parametrize("action", ["read", "write"])
def test_a_missing_file_is_named(tmp_path, csd, way, action):
    transfers = transfers_of(tmp_path, csd.acquire(128 * 1024))
    for one in transfers:
        one.file.write_bytes(b"\xff" * (PAGE + pages(one.extent.num_bytes)))
    transfers[3].file.unlink()
    with pytest.raises(StoreIOError, match=r"file 3 ä: .*restore it"):
        getattr(csd, action)(transfers)


def test_a_short_file_is_named(tmp_path, csd, way):
    transfers = transfers_of(tmp_path, csd.acquire(128 * 1024))
    for one in transfers:
        one.file.write_bytes(b"\xff" * (PAGE + one.extent.num_bytes))
    csd.read(transfers)
    os.truncate(transfers[4].file, 2 * PAGE)
    with pytest.raises(StoreIOError, match="file 4 ä: truncated"):
        csd.read(transfers)


def test_no_compiler_is_no_error(monkeypatch, caplog):
    monkeypatch.setattr(libraries, "load_prebuilt", lambda *_: None)
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)
    monkeypatch.setattr(toolchain, "levels", lambda: ("x86-64-v3",))
    with caplog.at_level("INFO", "jaxinf.native"):
        assert native.function.__wrapped__() is None
    assert "small leaves will be slower: expected a C++ compiler" in caplog.text
