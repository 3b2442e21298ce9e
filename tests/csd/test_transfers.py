"""Many transfers in one native call have the effect of one after another."""

import os

import numpy as np
import pytest

from jaxinf.csd import Extent, HostCsd, Transfer
from jaxinf.errors import StoreIOError
from jaxinf.native import libraries, toolchain
from jaxinf.native import transfers as native
from jaxinf.transfer import BufferPool, ByteCounts, ByteMeters, read_into, write_from

PAGE = 4096
LENGTHS = [1, 100, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 5 * PAGE + 17]


def pages(num_bytes):
    return -(-num_bytes // PAGE) * PAGE


def memory(transfer):
    first = transfer.extent.buffer_offset_bytes
    return transfer.buffer.memory.array[first : first + transfer.extent.num_bytes]


@pytest.fixture
def meters():
    return ByteMeters()


@pytest.fixture
def csd(meters):
    pool = BufferPool(1 << 20)
    yield HostCsd(pool, meters)
    pool.close()


@pytest.fixture(params=["native", "python"])
def way(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(native, "load", lambda: None)
    else:
        assert native.load() is not None


def transfers_of(directory, csd, lengths=LENGTHS, file_offset=PAGE, length_of=None):
    """Transfers of a part of a file for each length, in a buffer of noise.

    The files are there, as long as `length_of` says, or of whole pages.
    """
    result, first = [], 0
    buffer = csd.acquire(sum(map(pages, lengths)))
    noise = np.random.default_rng(0).integers(1, 256, buffer.memory.num_bytes)
    buffer.memory.array[:] = noise.astype(np.uint8)
    for number, length in enumerate(lengths):
        extent = Extent(np.dtype(np.uint8), length, file_offset, first)
        file = directory / f"file {number} ä"
        end = file_offset + length
        file.write_bytes(b"\xff" * (length_of or pages)(end))
        result.append(Transfer(buffer, extent, file))
        first += pages(length)
    return result


@pytest.mark.parametrize(
    "length_of",
    [pages, lambda n: n, lambda n: n + 2 * PAGE],
    ids=["whole pages", "exact", "longer"],
)
def test_moves_what_direct_io_moves(tmp_path, csd, meters, way, length_of):
    transfers = transfers_of(tmp_path, csd, length_of=length_of)
    wanted = [memory(one).copy() for one in transfers]
    csd.write(transfers)
    for one, own in zip(transfers, wanted, strict=True):
        found, num_bytes = one.file.read_bytes(), one.extent.num_bytes
        assert found[:PAGE] == b"\xff" * PAGE
        assert found[PAGE : PAGE + num_bytes] == own.tobytes()
        assert not any(found[PAGE + num_bytes : PAGE + pages(num_bytes)])
    transfers[0].buffer.memory.array[:] = 0
    csd.read(transfers)
    for one, own in zip(transfers, wanted, strict=True):
        np.testing.assert_array_equal(memory(one), own)
    # As one after another.
    single = ByteMeters()
    for action in (write_from, read_into):
        for one in transfers:
            first, length = one.extent.buffer_offset_bytes, one.extent.num_bytes
            array = one.buffer.memory.array[first : first + pages(length)]
            action(one.file, array, PAGE, length, meters=single)
    assert meters.snapshot() == single.snapshot() != ByteCounts()


def test_what_is_unusual_among_many(tmp_path, csd, meters, way):
    """Moves more than fit at once; a failing one does not affect the others."""
    lengths = [1 + (97 * number) % (2 * PAGE) for number in range(120)]
    transfers = transfers_of(tmp_path, csd, lengths, file_offset=0)
    wanted = [memory(one).copy() for one in transfers]
    csd.write(transfers)
    assert meters.snapshot().drive_write_bytes == sum(map(pages, lengths))
    short, missing = transfers[70], transfers[110]
    os.truncate(short.file, short.extent.num_bytes - 1)
    short.buffer.memory.array[:] = 0
    with pytest.raises(StoreIOError, match=f"{short.file.name}: truncated"):
        csd.read(transfers)
    os.truncate(short.file, short.extent.num_bytes)
    missing.file.unlink()
    for call in (csd.read, csd.write):
        with pytest.raises(StoreIOError, match=rf"{missing.file.name}: .*restore it"):
            call(transfers)
    for number in {*range(110)} - {70}:
        np.testing.assert_array_equal(memory(transfers[number]), wanted[number])


def test_no_compiler_is_no_error(monkeypatch, caplog):
    monkeypatch.setattr(libraries, "open_prebuilt", lambda *_: None)
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)
    monkeypatch.setattr(toolchain, "levels", lambda: ("x86-64-v3",))
    with caplog.at_level("INFO", "jaxinf.native"):
        assert native.load.__wrapped__() is None
    assert "small leaves will be slower: expected a C++ compiler" in caplog.text
