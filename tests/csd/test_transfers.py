"""Many transfers in one native call have the effect of one after another."""

import os

import numpy as np
import pytest

from jaxinf.csd.transfers import Piece, Transfers
from jaxinf.errors import StoreIOError
from jaxinf.io import BufferPool, ByteCounts, ByteMeters, DirectIO
from jaxinf.native import libraries, toolchain
from jaxinf.native import transfers as native

PAGE = 4096
LENGTHS = [1, 100, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 5 * PAGE + 17]


@pytest.fixture
def pool():
    pool = BufferPool(1 << 20)
    yield pool
    assert pool.used_bytes == 0


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


def pieces_of(directory, buffer, lengths=LENGTHS, file_offset=PAGE):
    """Makes a file for each length; the pieces follow each other in the buffer."""
    result, first = [], 0
    for number, length in enumerate(lengths):
        file = directory / f"file {number} ä"
        result.append(Piece(file, buffer, first, file_offset, length))
        first += pages(length)
    return result


def fill(buffer, seed=0):
    noise = np.random.default_rng(seed).integers(1, 256, buffer.num_bytes)
    buffer.array[:] = noise.astype(np.uint8)


@pytest.mark.parametrize("room", ["whole pages", "exact", "longer"])
def test_moves_what_direct_io_moves(tmp_path, pool, way, room):
    meters = ByteMeters()
    moved = Transfers(tmp_path, meters)
    with pool.acquire(128 * 1024) as buffer, pool.acquire(128 * 1024) as other:
        pieces = pieces_of(tmp_path, buffer)
        for piece in pieces:
            length = PAGE + piece.num_bytes
            length = {"exact": length, "longer": length + 2 * PAGE}.get(
                room, pages(length)
            )
            piece.file.write_bytes(b"\xff" * length)
        fill(buffer)
        wanted = buffer.array.copy()
        moved.write(pieces)
        for piece in pieces:
            found = piece.file.read_bytes()
            first = piece.buffer_offset_bytes
            data = wanted[first : first + piece.num_bytes].tobytes()
            assert found[PAGE:].startswith(data)
            assert found[:PAGE] == b"\xff" * PAGE
            padding = found[PAGE + piece.num_bytes : PAGE + pages(piece.num_bytes)]
            assert padding == b"\0" * len(padding)
        fill(other, seed=1)
        again = [piece._replace(buffer=other) for piece in pieces]
        moved.read(again)
        for piece in again:
            first = piece.buffer_offset_bytes
            part = slice(first, first + piece.num_bytes)
            np.testing.assert_array_equal(other.array[part], wanted[part])
    # As one after another.
    single = ByteMeters()
    with pool.acquire(128 * 1024) as buffer:
        io = DirectIO(tmp_path, single)
        for action in (io.write, io.read):
            for file, _, first, offset, length in pieces:
                array = buffer.array[first : first + pages(length)]
                action(file, array, offset, length)
    assert meters.snapshot() == single.snapshot() != ByteCounts()


def test_what_is_unusual_among_many(tmp_path, pool, way):
    """Moves more pieces than fit at once; a failing one does not affect the others."""
    lengths = [1 + (97 * number) % (2 * PAGE) for number in range(120)]
    with pool.acquire(1 << 20) as buffer:
        fill(buffer)
        wanted = buffer.array.copy()
        pieces = pieces_of(tmp_path, buffer, lengths, file_offset=0)
        for piece in pieces:
            piece.file.write_bytes(b"\xff" * pages(piece.num_bytes))
        meters = ByteMeters()
        moved = Transfers(tmp_path, meters)
        moved.write(pieces)
        assert meters.snapshot().drive_write_bytes == sum(map(pages, lengths))
        short, missing = pieces[70], pieces[110]
        os.truncate(short.file, short.num_bytes - 1)
        buffer.array[:] = 0
        with pytest.raises(StoreIOError, match=f"{short.file.name}: truncated"):
            moved.read(pieces)
        os.truncate(short.file, short.num_bytes)
        missing.file.unlink()
        with pytest.raises(StoreIOError, match=missing.file.name):
            moved.read(pieces)
        for piece in pieces[:70] + pieces[71:110]:
            part = slice(first := piece.buffer_offset_bytes, first + piece.num_bytes)
            np.testing.assert_array_equal(buffer.array[part], wanted[part])


def test_one_call_for_all(tmp_path, pool, monkeypatch):
    native_or_skip()
    function, calls = native.function(), []

    def counted(*arguments):
        calls.append(arguments[0])
        return function(*arguments)

    monkeypatch.setattr(native, "function", lambda: counted)
    moved = Transfers(tmp_path, ByteMeters())
    if not moved.direct:
        pytest.skip(f"{tmp_path}: no direct I/O there")

    def refuse(*arguments):
        raise AssertionError("one at a time")

    monkeypatch.setattr(DirectIO, "read", refuse)
    monkeypatch.setattr(DirectIO, "write", refuse)
    with pool.acquire(128 * 1024) as buffer:
        pieces = pieces_of(tmp_path, buffer)
        for piece in pieces:
            piece.file.write_bytes(b"\xff" * (PAGE + pages(piece.num_bytes)))
        moved.write(pieces)
        moved.read(pieces)
    assert calls == [len(LENGTHS)] * 2


@pytest.mark.parametrize("action", ["read", "write"])
def test_a_missing_file_is_named(tmp_path, pool, way, action):
    moved = Transfers(tmp_path, ByteMeters())
    with pool.acquire(128 * 1024) as buffer:
        pieces = pieces_of(tmp_path, buffer)
        for piece in pieces:
            piece.file.write_bytes(b"\xff" * (PAGE + pages(piece.num_bytes)))
        pieces[3].file.unlink()
        with pytest.raises(StoreIOError, match=r"file 3 ä: .*restore it"):
            getattr(moved, action)(pieces)


def test_a_short_file_is_named(tmp_path, pool, way):
    moved = Transfers(tmp_path, ByteMeters())
    with pool.acquire(128 * 1024) as buffer:
        pieces = pieces_of(tmp_path, buffer)
        for piece in pieces:
            piece.file.write_bytes(b"\xff" * (PAGE + piece.num_bytes))
        moved.read(pieces)
        os.truncate(pieces[4].file, 2 * PAGE)
        with pytest.raises(StoreIOError, match="file 4 ä: truncated"):
            moved.read(pieces)


def test_no_compiler_is_no_error(monkeypatch, caplog):
    monkeypatch.setattr(libraries, "load_prebuilt", lambda *_: None)
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)
    monkeypatch.setattr(toolchain, "levels", lambda: ("x86-64-v3",))
    with caplog.at_level("INFO", "jaxinf.native"):
        assert native.function.__wrapped__() is None
    assert "small leaves will be slower: expected a C++ compiler" in caplog.text
