"""A drive and a card's memory: tried at open, strict after it; the host reads files."""

import errno
import fcntl

import numpy as np
import pytest
from csd_contract import Chunk, open_fleet

import jaxinf.transfer.direct as direct
from jaxinf.csd import Transfer, parse_csd
from jaxinf.csd.cards import peer, smartssd, standin
from jaxinf.csd.cards.peer import p2p_transfer
from jaxinf.errors import CsdError, StoreIOError
from jaxinf.transfer import BufferPool, read_into, supports_direct, write_from

EMULATED = parse_csd("emulated")


@pytest.fixture
def drive(tmp_path):
    if not supports_direct(tmp_path):
        pytest.skip("no direct I/O here")
    return tmp_path


@pytest.fixture(params=[errno.EINVAL, errno.EOPNOTSUPP])
def refusing(request, monkeypatch):
    """Makes a drive refuse direct transfers; records the ways that were taken."""
    taken = []

    def refuse(call):
        def instead(fd, views, offset):
            if fcntl.fcntl(fd, fcntl.F_GETFL) & direct.os.O_DIRECT:
                taken.append("direct")
                raise OSError(request.param, "refused")
            taken.append("buffered")
            return call(fd, views, offset)

        return instead

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(direct.os, name, refuse(getattr(direct.os, name)))
    return taken


# --- between drive and card --------------------------------------------------------


def test_what_a_drive_refuses_is_not_buffered(drive, refusing):
    (drive / "file").write_bytes(bytes(8192))
    with BufferPool(1 << 20).acquire(8192) as buffer:
        for move in (read_into, write_from):
            with (
                pytest.raises(StoreIOError, match="cannot reach the card's memory"),
                p2p_transfer(buffer.array, 0),
            ):
                move(drive / "file", buffer.array, 0, 8192, buffered=False)
    assert set(refusing) == {"direct"}


def test_a_page_is_tried_at_open(drive, refusing, monkeypatch):
    monkeypatch.setattr(smartssd, "supports_direct", lambda root: True)
    with pytest.raises(CsdError, match=r"CSD root .*card 0: .*P2P must be on"):
        open_fleet("emulated", [drive])
    assert not list(drive.iterdir())


def test_other_bytes_are_noticed_at_open(drive, monkeypatch):
    """Reads all ones, as from a switch that answers for the card."""

    def ones(path, array, *place, **options):
        read_into(path, array, *place, **options)
        array[:] = 0xFF

    monkeypatch.setattr(peer, "read_into", ones)
    with pytest.raises(CsdError, match=r"expected a page to pass .*found other bytes"):
        open_fleet("emulated", [drive])
    assert not list(drive.iterdir())


def test_a_file_system_without_direct_io(drive, monkeypatch):
    fleet = open_fleet("emulated", [drive])
    monkeypatch.setattr(smartssd, "supports_direct", lambda root: False)
    fleet.probe([drive], must_be_direct=False)
    with pytest.raises(CsdError, match="expected a file system with direct I/O"):
        fleet.probe([drive], must_be_direct=True)


# --- reads of the host -------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    made = []

    def make(*arguments, **options):
        root = tmp_path / f"{len(made)}"
        made.append(Chunk(EMULATED, root, *arguments, **options).initialise())
        made[-1].write()
        return made[-1]

    yield make
    for chunk in made:
        chunk.close()


def read_for_host(chunk):
    chunk.buffer.state.array[:] = 0xEE  # which no kernel has seen
    for extent, file in zip(chunk.extents, chunk.files, strict=True):
        chunk.csd.read([Transfer(chunk.buffer, extent, file, for_host=True)])
    assert (chunk.buffer.state.array == 0xEE).all()


@pytest.mark.parametrize("num_elements", [1, 5000])
def test_the_host_reads_the_file_and_not_the_card(written, num_elements):
    chunk = written(num_elements=num_elements)
    wanted = chunk.states()
    read_for_host(chunk)
    for extent, state in zip(chunk.extents, wanted, strict=True):
        view = chunk.csd.view(chunk.buffer, extent)
        np.testing.assert_array_equal(view, state)
        assert not np.shares_memory(view, chunk.buffer.state.array)
        assert chunk.csd.checksum(chunk.buffer, extent) is None
    chunk.read()  # for a kernel: the card has it again
    np.testing.assert_array_equal(chunk.states()[0], wanted[0])


def test_a_kernel_takes_what_was_read_for_the_host(written):
    """State was prefetched for a step that changes nothing, and another step came."""
    results = []
    for read in (Chunk.read, read_for_host):
        chunk = written()
        read(chunk)
        outcome, out = chunk.update()
        assert len(outcome.read_checksums) == len(chunk.extents)
        results.append([out, *chunk.states()])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_the_host_puts_is_written(written):
    chunk = written(num_elements=1500)
    read_for_host(chunk)
    extent, file = chunk.extents[0], chunk.files[0]
    values = np.arange(1500, dtype=np.float32)
    chunk.csd.put(chunk.buffer, extent, values)
    assert chunk.csd.checksum(chunk.buffer, extent) is not None
    np.testing.assert_array_equal(chunk.csd.view(chunk.buffer, extent), values)
    chunk.csd.write([Transfer(chunk.buffer, extent, file)])
    np.testing.assert_array_equal(np.fromfile(file, np.float32)[:1500], values)


def test_a_card_that_gives_no_more(tmp_path, monkeypatch):
    """Less than its 4 GiB are free, because other programs use the card."""
    monkeypatch.setattr(standin, "DEVICE_BYTES", 3 << 16)
    chunk = Chunk(EMULATED, tmp_path, num_elements=3000)
    held = [chunk.csd.acquire(chunk.num_bytes) for _ in range(4)]
    assert held[0] is not None
    assert held[-1] is None
    number = sum(buffer is not None for buffer in held)
    for buffer in filter(None, held):
        buffer.release()
    again = [chunk.csd.acquire(chunk.num_bytes) for _ in range(number + 1)]
    assert [buffer is None for buffer in again] == [False] * number + [True]
    for buffer in filter(None, again):
        buffer.release()
    chunk.close()
