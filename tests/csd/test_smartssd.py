"""Cards that are found, checked and refused, with a handmade sysfs and a stand-in."""

import os
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import optax
import pytest
from csd_contract import open_fleet

import jaxinf.csd.cards.library as library
import jaxinf.csd.cards.smartssd as smartssd
import jaxinf.csd.cards.xrt as xrt
from jaxinf.csd import GradientForm, KernelNeed, parse_csd
from jaxinf.csd.cards.standin import EmulatedXrt
from jaxinf.csd.cards.sysfs import find_card, list_cards
from jaxinf.errors import CsdError, UnsupportedTransformError
from jaxinf.program import trace_update

ROOT_PORT, UP = "0000:3a:00.0", "0000:3b:00.0"


class Sysfs:
    def __init__(self, path):
        self.path = path
        (path / "bus/pci/drivers/xocl").mkdir(parents=True)
        (path / "dev/block").mkdir(parents=True)

    def device(self, *addresses):
        folder = self.path.joinpath("devices/pci0000:3a", *addresses)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def card(self, *addresses):
        folder = self.device(*addresses)
        (self.path / "bus/pci/drivers/xocl" / addresses[-1]).symlink_to(folder)

    def drive(self, *addresses, partition=False):
        folder = self.device(*addresses) / "nvme/nvme0/nvme0n1"
        if partition:
            folder = folder / "nvme0n1p1"
            folder.mkdir(parents=True)
            (folder / "partition").write_text("1")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def volume(self):
        volume = self.path / "devices/virtual/block/md0"
        volume.mkdir(parents=True)
        return volume

    def mount(self, root, device):
        number = os.stat(root).st_dev
        link = self.path / f"dev/block/{os.major(number)}:{os.minor(number)}"
        link.unlink(missing_ok=True)
        link.symlink_to(device)


@pytest.fixture
def sysfs(tmp_path):
    return Sysfs(tmp_path / "sys")


def switch(number):
    up = f"0000:{number:02x}:00.0"
    drive = (
        ROOT_PORT,
        UP,
        up,
        f"0000:{number + 1:02x}:00.0",
        f"0000:{number:02x}:0a.0",
    )
    card = (ROOT_PORT, UP, up, f"0000:{number + 1:02x}:01.0", f"0000:{number:02x}:0b.1")
    return drive, card


def address_of(root, sysfs):
    return find_card(root, list_cards(sysfs.path), sysfs.path)


def test_the_card_beside_a_drive(sysfs, tmp_path):
    for number in (0x40, 0x50, 0x60):
        drive, card = switch(number)
        device = sysfs.drive(*drive, partition=number == 0x50)
        sysfs.card(*card)
        if number == 0x50:
            sysfs.mount(tmp_path, device)
    cards = list_cards(sysfs.path)
    assert [*cards] == [f"0000:{n}:0b.1" for n in (40, 50, 60)]
    assert find_card(tmp_path, cards, sysfs.path) == "0000:50:0b.1"


def test_a_namespace_with_multipath(sysfs, tmp_path):
    drive, card = switch(0x40)
    device = sysfs.drive(*drive)
    sysfs.card(*card)
    subsystem = sysfs.path / "devices/virtual/nvme-subsystem/nvme-subsys0"
    (subsystem / "nvme0n1").mkdir(parents=True)
    (subsystem / "nvme0").symlink_to(device.parent)
    sysfs.mount(tmp_path, subsystem / "nvme0n1")
    assert address_of(tmp_path, sysfs) == "0000:40:0b.1"


def test_roots_that_have_no_card(sysfs, tmp_path):
    (_, card), (two, _) = switch(0x40), switch(0x50)
    sysfs.card(*card)
    with pytest.raises(CsdError, match=r"on no block device \(tmpfs, network"):
        address_of(tmp_path, sysfs)
    sysfs.mount(tmp_path, sysfs.drive(*two))
    message = rf"a card beside its drive.*{two[-1]}.*of this machine: 0000:40:0b\.1"
    with pytest.raises(CsdError, match=message):
        address_of(tmp_path, sysfs)
    sysfs.mount(tmp_path, sysfs.volume())
    with pytest.raises(CsdError, match=r"on one NVMe drive, found it on no PCIe drive"):
        address_of(tmp_path, sysfs)


# --- opening -----------------------------------------------------------------------

KERNELS = "jaxinf_sgd_f32_update_f32\njaxinf_sgd_bf16_bf16_f32\n"


@pytest.fixture
def runtime(monkeypatch, tmp_path):
    for user in (xrt, smartssd):
        monkeypatch.setattr(user, "load_runtime", EmulatedXrt)
    monkeypatch.setattr(xrt, "_OPEN", {})
    xclbin = tmp_path / "kernels.xclbin"
    xclbin.write_text(KERNELS)
    monkeypatch.setenv("JAXINF_XCLBIN", str(xclbin))
    return xclbin


def need(tx=None, codecs=("",), dtype=np.float32, *, sent=None):
    params = [np.zeros(8, np.float32), np.zeros(9, np.float32)]
    kernel = trace_update(tx or optax.sgd(0.1), params).leaves[0].kernel
    form = GradientForm(np.dtype(sent or dtype), is_sparse=sent is not None)
    return KernelNeed("layer/w", kernel, codecs, np.dtype(dtype), (form,))


def test_devices_by_number(runtime, tmp_path, monkeypatch):
    """Tests devices by number, as in XRT's emulation, which lists none."""
    fleet = open_fleet("smartssd:devices=2", [tmp_path, tmp_path])
    fleet.check([need(), need(dtype=ml_dtypes.bfloat16)])
    [one, two] = fleet.attach([tmp_path, tmp_path], 4096, 1024)
    assert one.memory is not two.memory
    fleet.close()
    monkeypatch.setenv("JAXINF_XRT_DEVICES", "1")
    with pytest.raises(CsdError, match="2 CSD roots, and 1 devices by the option"):
        open_fleet("smartssd", [tmp_path, tmp_path])
    assert open_fleet("smartssd", [tmp_path])


def test_a_card_is_opened_once_in_a_process(runtime, tmp_path):
    first = open_fleet("smartssd:devices=1", [tmp_path])
    first.close()
    open_fleet("smartssd:devices=1", [tmp_path]).close()
    assert len(xrt._OPEN) == 1
    other = tmp_path / "other.xclbin"
    other.write_text(KERNELS)
    with pytest.raises(CsdError, match="the xclbin that is open in this process"):
        open_fleet(f"smartssd:devices=1,xclbin={other}", [tmp_path])


def test_no_runtime(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyxrt", None)
    monkeypatch.setattr(library, "LIBRARY", "libxrt_that_is_not_there.so.2")
    monkeypatch.setenv("XILINX_XRT", str(tmp_path))
    with pytest.raises(CsdError, match=r"Xilinx's runtime \(XRT\).*setup\.sh"):
        open_fleet("smartssd:xclbin=x", [tmp_path])
    pyxrt = EmulatedXrt()
    monkeypatch.setitem(sys.modules, "pyxrt", pyxrt)
    assert library.load_runtime() is pyxrt  # where there is no such library
    monkeypatch.setattr(library, "LIBRARY", "libc.so.6")
    assert library.load_runtime() is pyxrt  # where it lacks a function
    monkeypatch.delenv("XILINX_XRT")
    with pytest.raises(CsdError, match="expected the variable XILINX_XRT"):
        open_fleet("smartssd:xclbin=x", [tmp_path])


CARDS = {"0000:40:0b.1": ()}


@pytest.mark.parametrize(
    ("cards", "roots", "message"),
    [
        ({}, "a", "found none that XRT's driver serves"),
        (CARDS, "ab", r"are on one drive \(card 0000:40:0b\.1\)"),
    ],
)
def test_no_card_and_two_roots_on_one(
    runtime, tmp_path, monkeypatch, cards, roots, message
):
    monkeypatch.setattr(smartssd, "list_cards", lambda: cards)
    monkeypatch.setattr(smartssd, "find_card", lambda root, cards: next(iter(cards)))
    with pytest.raises(CsdError, match=message):
        open_fleet("smartssd", [tmp_path / root for root in roots])


def test_no_xclbin(runtime, tmp_path, monkeypatch):
    runtime.unlink()
    with pytest.raises(CsdError, match=r"found no such file as .*; build one \(make"):
        open_fleet("smartssd:devices=1", [tmp_path])
    monkeypatch.delenv("JAXINF_XCLBIN")
    with pytest.raises(CsdError, match="found none named; build one"):
        open_fleet("smartssd:devices=1", [tmp_path])


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ([need(optax.lion(0.1), ("", ""))], "no kernel jaxinf_lion_f32_update_f32"),
        ([need(dtype=np.float16)], "has no kernel jaxinf_sgd_f16_f16_f32"),
        ([need(sent=ml_dtypes.bfloat16)], "no kernel jaxinf_sgd_bf16_update_f32_topk"),
        ([need(optax.adadelta(0.1), ("", "", ""))], r"layer/w: .*no kernel for"),
        (
            [need(optax.adam(0.1), ("", "bf16", "int8"))],
            r"w: .*as bf16, int8; use cs",
        ),
        ([need(codecs=("bf16",))], "found params as bf16"),
    ],
)
def test_what_the_cards_cannot_do_is_refused(runtime, tmp_path, needs, message):
    fleet = open_fleet("smartssd:devices=1", [tmp_path])
    with pytest.raises((CsdError, UnsupportedTransformError), match=message):
        fleet.check(needs)
    fleet.check([need(optax.set_to_zero())])  # needs none


def test_options_come_before_the_environment():
    environ = {"JAXINF_XCLBIN": "/of/environment", "JAXINF_XRT_DEVICES": "3"}
    spec = parse_csd("smartssd", environ)
    assert (spec.xclbin, spec.num_devices) == (Path("/of/environment"), 3)
    spec = parse_csd("smartssd:xclbin=/given", environ)
    assert (spec.xclbin, spec.num_devices) == (Path("/given"), 3)
    assert spec.has_cards
