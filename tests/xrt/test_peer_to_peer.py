"""A drive reads into and writes from a card's buffers, with direct I/O."""

import mmap
import os

import numpy as np
import pytest
from xrt_card import finish, float_bits, start, view

from jaxinf.transfer import supports_direct

F32 = np.float32
MEBI = 1 << 20
PAGE = mmap.PAGESIZE


@pytest.fixture
def drive(tmp_path):
    if not supports_direct(tmp_path):
        pytest.fail(
            f"{tmp_path}: no O_DIRECT there; set TMPDIR to a directory of a drive"
        )
    return tmp_path


def transfer(function, file, buffer, offset_bytes=0, flags=os.O_RDONLY):
    """One call of preadv or pwritev, straight to the buffer's mapping."""
    descriptor = os.open(file, flags | os.O_DIRECT, 0o600)
    try:
        assert function(descriptor, [buffer.map()], offset_bytes) == buffer.size()
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("num_bytes", [PAGE, MEBI, 64 * MEBI])
def test_drive_to_card_to_drive(open_card, drive, num_bytes):
    card, (source, target) = open_card(), (drive / "source", drive / "target")
    values = np.random.default_rng(0).normal(size=num_bytes // 4).astype(F32)
    source.write_bytes(values.tobytes())
    inputs, outputs = (card.buffer(num_bytes, "p2p") for _ in range(2))
    transfer(os.preadv, source, inputs)
    # No sync: the drive wrote to the card's own memory.
    kernel = card.kernel("scale")
    finish(start(kernel, inputs, outputs, len(values), float_bits(0.5), 1))
    transfer(os.pwritev, target, outputs, flags=os.O_RDWR | os.O_CREAT)
    wanted = F32(0.5) * values + F32(1)
    np.testing.assert_array_equal(np.fromfile(target, F32), wanted)


def test_parts_of_a_buffer(open_card, drive):
    import pyxrt  # pyright: ignore[reportMissingImports]

    file = drive / "file"
    values = np.arange(4 * PAGE // 4, dtype=F32)
    file.write_bytes(values.tobytes())
    whole = open_card().buffer(4 * PAGE, "p2p")
    for page in range(4):  # the file's pages in reverse
        part = pyxrt.bo(whole, PAGE, (3 - page) * PAGE)
        transfer(os.preadv, file, part, page * PAGE)
    reversed_pages = values.reshape(4, -1)[::-1].reshape(-1)
    np.testing.assert_array_equal(view(whole), reversed_pages)
    part = pyxrt.bo(whole, PAGE, 3 * PAGE)
    transfer(os.pwritev, file, part, PAGE, os.O_RDWR)
    values[PAGE // 4 : PAGE // 2] = values[: PAGE // 4]
    np.testing.assert_array_equal(np.fromfile(file, F32), values)


def test_unaligned_addresses_are_refused(open_card, drive):
    import pyxrt  # pyright: ignore[reportMissingImports]

    file = drive / "file"
    file.write_bytes(bytes(2 * PAGE))
    whole = open_card().buffer(2 * PAGE, "p2p")
    with pytest.raises(OSError, match="Invalid argument"):
        transfer(os.preadv, file, pyxrt.bo(whole, PAGE, 64))


def test_transfers_while_a_kernel_runs(open_card, drive):
    card, file = open_card(), drive / "file"
    file.write_bytes(np.full(PAGE // 4, 7, np.int32).tobytes())
    counter, kernel = card.buffer(PAGE, "p2p"), card.kernel("meet")
    run = start(kernel, counter, 7)
    assert run.state().value != 4
    transfer(os.preadv, file, counter)  # the kernel waits for this
    finish(run)
