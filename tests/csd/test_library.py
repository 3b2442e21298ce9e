"""XRT's C functions under pyxrt's names: handles, errors, and threads during a sync."""

import ctypes
import gc
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from swemu.table import Kernel, units
from swemu.xclbin import write_xclbin

from jaxinf.csd.cards.library import LIBRARY, load_runtime
from jaxinf.csd.cards.xrt import NoCardMemory, XrtCard
from jaxinf.errors import CsdError
from jaxinf.kernels.card_kernels import CardArgument
from jaxinf.native import toolchain

SOURCE = Path(__file__).parent / "stub_xrt.cpp"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("xrt")
    (prefix / "lib").mkdir()
    compiler = toolchain.find_compiler()
    output = prefix / "lib" / LIBRARY
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-pthread"]
    subprocess.run([str(compiler), *flags, SOURCE, "-o", output], check=True)
    return prefix


@pytest.fixture
def stub(prefix):
    return ctypes.CDLL(str(prefix / "lib" / LIBRARY))


@pytest.fixture
def xrt(prefix, stub, monkeypatch):
    monkeypatch.setenv("XILINX_XRT", str(prefix))
    return load_runtime()


def xclbin(path, *names):
    arguments = (CardArgument("data", "pointer", "uint8", count="elements"),)
    kernels = [Kernel(name, arguments) for name in names]
    path.write_bytes(write_xclbin(b"", units(kernels)))
    return path


@pytest.fixture
def card(xrt, tmp_path):
    return XrtCard(xrt, 0, xclbin(tmp_path / "k.xclbin", "add", "other"))


def test_every_handle_is_closed(xrt, stub, tmp_path):
    gc.collect()
    before = stub.stub_open_handles()
    card = XrtCard(xrt, 1, xclbin(tmp_path / "k.xclbin", "add"))
    buffer = card.allocate(4096)
    card.run("add", [card.part(buffer, 0, 64)], [1], timeout_s=60)
    assert stub.stub_open_handles() > before + 2
    del buffer, card
    gc.collect()
    assert stub.stub_open_handles() == before


def test_a_part_keeps_its_whole(card, stub):
    whole = card.allocate(8192)
    part = card.part(whole, 4096, 4096)
    before = stub.stub_open_handles()
    del whole
    gc.collect()
    assert stub.stub_open_handles() == before
    del part
    gc.collect()
    assert stub.stub_open_handles() == before - 2


def test_errors_have_the_systems_reason(card, xrt, tmp_path):
    with pytest.raises(CsdError, match=r"card 7: cannot be opened: .*No such device"):
        XrtCard(xrt, 7, tmp_path / "none")
    with pytest.raises(CsdError, match="card 0000:09"):
        XrtCard(xrt, "0000:09:00.1", tmp_path / "none")
    assert XrtCard(xrt, "0000:01:00.1", card.xclbin).kernel("add")
    with pytest.raises(CsdError, match=r"refuses .*Invalid argument"):
        XrtCard(xrt, 0, xclbin(tmp_path / "refused", "add"))
    for content in (b"", b"\x7fELF"):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(CsdError, match=r"refuses .*(empty|no kernels)"):
            XrtCard(xrt, 0, tmp_path / "other")
    with pytest.raises(CsdError, match="has no kernel other, only add, other"):
        card.kernel("other")
    with pytest.raises(NoCardMemory, match="Cannot allocate memory"):
        card.allocate(5 << 30)
    with pytest.raises(CsdError, match="did not start: xrtRunSetArg: Invalid"):
        card.run("add", [card.allocate(64).bo], [1, 2], timeout_s=60)
    for bad in (0.5, 1 << 31):
        with pytest.raises(CsdError, match="expected a buffer or 32 bits"):
            card.run("add", [], [bad], timeout_s=60)


def test_other_threads_run_during_a_sync(xrt, stub, tmp_path):
    """If the call held the GIL, as pyxrt's does, it would end with an error."""
    card = XrtCard(xrt, 0, xclbin(tmp_path / "k.xclbin", "add"))
    buffer = card.allocate(4096)
    stub.stub_wait_in_sync(20_000)
    with ThreadPoolExecutor(1) as other:
        done = other.submit(buffer.to_card, 4096)
        while not (done.done() or stub.stub_waiting()):
            pass
        stub.stub_release()  # this thread runs while the other is in the call
        done.result()
    stub.stub_wait_in_sync(0)
