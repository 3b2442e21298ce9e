"""The stand-in for pyxrt has its restrictions, and the code around it obeys them."""

import gc
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxinf.csd.cards.memory import set_bytes
from jaxinf.csd.cards.peer import with_card
from jaxinf.csd.cards.smartssd import open_emulated
from jaxinf.csd.cards.standin import ANY_KERNEL, EmulatedXrt
from jaxinf.csd.cards.xrt import XrtCard
from jaxinf.errors import CsdError
from jaxinf.kernels import named_card_kernel
from jaxinf.transfer import BufferPool, ByteMeters

NAME = "jaxinf_sgd_f32_update_f32"
SIZE = 1024
CARD = named_card_kernel(NAME)
WORDS = CARD.scalar_values(
    num_elements=SIZE, rounding_key=0, rounding_first=0, scalars=[]
)
STATUS = 4096
BOTH = pytest.mark.parametrize("has_contexts", [False, True])


class Rig:
    """A kernel (params -= 0.1 gradient) with its buffers, by pyxrt's names."""

    def __init__(self, has_contexts=False):
        self.xrt = EmulatedXrt(has_contexts=has_contexts)
        self.device = self.xrt.device(0)
        xclbin = self.xrt.xclbin(ANY_KERNEL)
        if has_contexts:
            uuid = self.device.register_xclbin(xclbin)
            self.owner = [self.xrt.hw_context(self.device, uuid)]
        else:
            self.owner = [self.device, self.device.load_xclbin(xclbin)]
        self.kernel = self.xrt.kernel(*self.owner, NAME)
        self.gradient, self.out = self.bo(4 * SIZE), self.bo(4 * SIZE)
        self.params = self.bo(4 * SIZE, p2p=True)
        self.status = self.bo(STATUS)
        self.view(self.params)[:] = 1
        self.view(self.gradient)[:] = 2

    def bo(self, num_bytes, p2p=False):
        flags = self.xrt.bo.flags
        kind = flags.p2p if p2p else flags.normal
        return self.xrt.bo(self.device, num_bytes, kind, 0)

    def view(self, bo, dtype=np.float32):
        return np.frombuffer(bo.map(), dtype)

    def sync(self, bo, to_card):
        way = self.xrt.xclBOSyncDirection
        way = (
            way.XCL_BO_SYNC_BO_TO_DEVICE if to_card else way.XCL_BO_SYNC_BO_FROM_DEVICE
        )
        bo.sync(way, bo.size(), 0)

    def start(self, words=WORDS):
        bos = [self.gradient, self.params, self.params, self.out, self.status]
        run = self.kernel(*bos, *words)
        while int(run.state()) in (1, 3):
            time.sleep(0.001)
        return int(run.state())


def test_what_is_not_synced_is_stale():
    rig = Rig()
    rig.start()  # the gradient has not been sent: the card's memory holds zeros
    np.testing.assert_array_equal(rig.view(rig.params), 1)
    np.testing.assert_array_equal(rig.view(rig.out, np.uint8), 0xA5)
    rig.sync(rig.out, to_card=False)
    np.testing.assert_array_equal(rig.view(rig.out), 0)


def test_a_call_drops_what_is_neither_buffer_nor_integer():
    rig = Rig()
    rig.sync(rig.gradient, to_card=True)
    words = [*WORDS[:-1], -0.1]  # the rate, as a float
    assert len(CARD.constants) == 1
    assert rig.start(words) == 4
    np.testing.assert_array_equal(rig.view(rig.params), 1)


def test_a_card_has_4_gib():
    rig = Rig()
    held = [rig.bo(1 << 30, p2p=True) for _ in range(3)]
    with pytest.raises(MemoryError):
        rig.bo(1 << 30)
    del held[0]
    gc.collect()
    assert rig.bo(1 << 30, p2p=True).size() == 1 << 30
    with pytest.raises(RuntimeError):
        rig.xrt.bo(rig.params, 4 * SIZE, 64)
    with pytest.raises(RuntimeError, match="no memory bank 3"):
        rig.xrt.bo(rig.device, 4096, rig.xrt.bo.flags.normal, 3)


def test_a_mapping_dies_with_its_buffer():
    rig = Rig()
    view = rig.view(rig.params)
    part = rig.xrt.bo(rig.params, 4096, 0)
    del rig.params
    gc.collect()
    np.testing.assert_array_equal(view, 1)  # its part holds the memory
    del part
    gc.collect()
    np.testing.assert_array_equal(view.view(np.uint8), 0xA5)


# --- releases ----------------------------------------------------------------------


def test_a_release_that_is_too_old_is_named():
    older = SimpleNamespace(device=EmulatedXrt().device)
    with pytest.raises(CsdError, match=r"expected XRT 2021\.2 .* a newer release"):
        XrtCard(older, 0, Path(ANY_KERNEL))


def test_a_drive_sends_a_card_whole_pages():
    with BufferPool(1 << 20).acquire(8192) as buffer:
        with with_card(buffer.array, 4096):
            pass
        for array, offset in [
            (buffer.array[64:], 0),
            (buffer.array[:5000], 0),
            (buffer.array, 512),
        ]:
            with (
                pytest.raises(OSError, match="no whole pages"),
                with_card(array, offset),
            ):
                pass


# --- the adapter over it -----------------------------------------------------------


@BOTH
def test_the_adapter_knows_every_release(has_contexts, tmp_path):
    xclbin = tmp_path / "kernels.xclbin"
    xclbin.write_text(f"{NAME}\njaxinf_adam_f32_update_f32\n")
    card = XrtCard(EmulatedXrt(has_contexts=has_contexts), 0, xclbin)
    assert card.kernel_names == (NAME, "jaxinf_adam_f32_update_f32")
    kernel = card.kernel(NAME)
    assert card.kernel(NAME) is kernel
    assert kernel.bank(0) == 0
    gradient, out = card.allocate(4 * SIZE, 0), card.allocate(4 * SIZE, 0)
    params, status = card.allocate(4 * SIZE, 0, p2p=True), card.allocate(STATUS, 0)
    params.array.view(np.float32)[:] = 1
    gradient.array.view(np.float32)[:] = 2
    gradient.to_card(4 * SIZE)
    part = card.part(params, 0, 4096)
    kernel.run([gradient.bo, part, part, out.bo, status.bo], WORDS, 60)
    out.from_card(4 * SIZE)
    np.testing.assert_allclose(out.array.view(np.float32), -0.2, rtol=1e-6)


def test_a_missing_kernel_is_named_with_the_line_that_builds_it(tmp_path):
    xclbin = tmp_path / "kernels.xclbin"
    xclbin.write_text(NAME)
    card = XrtCard(EmulatedXrt(), 0, xclbin)
    with pytest.raises(
        CsdError, match=r"has no kernel jaxinf_lion_f32_update_f32"
    ) as e:
        card.kernel("jaxinf_lion_f32_update_f32")
    assert f"only {NAME}" in str(e.value)
    assert "make -C hls hw KERNELS=jaxinf_lion_f32_update_f32" in str(e.value)


def test_a_card_that_cannot_be_opened_or_loaded(tmp_path):
    with pytest.raises(CsdError, match=r"card 0000:01:00\.1: cannot be opened"):
        XrtCard(EmulatedXrt(), "0000:01:00.1", tmp_path / "none")
    with pytest.raises(CsdError, match=r"refuses .*none: .*was built for the card's"):
        XrtCard(EmulatedXrt(), 0, tmp_path / "none")


def test_memory_that_is_not_there():
    card = XrtCard(EmulatedXrt(), 0, Path(ANY_KERNEL))
    with pytest.raises(CsdError, match="lower memory_bytes, or end who else"):
        card.allocate(5 << 30, 0)
    with pytest.raises(CsdError, match="xbutil configure --device 0 --p2p enable"):
        card.allocate(5 << 30, 0, p2p=True)


def test_a_kernel_that_fails_or_never_ends():
    card = XrtCard(EmulatedXrt(), 0, Path(ANY_KERNEL))
    kernel = card.kernel(NAME)
    with pytest.raises(CsdError, match=f"kernel {NAME} ended as error"):
        kernel.run([], WORDS, 60)  # no pointers: on a card, a bus error
    with pytest.raises(CsdError, match=r"did not start: .*incompatible"):
        kernel.run([], [0.5], 60)
    gate = threading.Event()
    unit = card._device.unit
    blocked = unit.submit(gate.wait)
    with pytest.raises(CsdError, match=r"has not ended after 0 s; reset the card"):
        kernel.run([], WORDS, 0.01)
    gate.set()
    blocked.result()


# --- refusals of a fleet -----------------------------------------------------------


def test_subgroups_longer_than_the_cards_memory(tmp_path):
    fleet = open_emulated([tmp_path], 1 << 20, ByteMeters())
    num_elements = 300 << 20
    assert set_bytes(12 * num_elements, num_elements) > 4 << 30
    with pytest.raises(CsdError, match="a subgroup of 314,572,800 elements needs"):
        fleet.check_buffer(12 * num_elements, num_elements)
    fleet.check_buffer(12 << 20, 1 << 20)


def test_cards_have_memory_of_their_own(tmp_path):
    """Each card has as many buffers as the budget allows, with gradients, results."""
    roots = [tmp_path / "one", tmp_path / "two"]
    for root in roots:
        root.mkdir()
    each = set_bytes(1 << 19, 1 << 15)
    assert each == (1 << 19) + 12 * (1 << 15) + 4096  # state, three arrays, the status
    fleet = open_emulated(roots, 3 * each - 1, ByteMeters())
    csds = fleet.attach(roots, 1 << 19, 1 << 15)
    assert csds[0].memory is not csds[1].memory
    held = [csd.acquire(1 << 19) for csd in csds for _ in range(2)]
    assert all(held)
    assert [csd.acquire(4096) for csd in csds] == [None, None]
    assert [csd.memory.used_bytes for csd in csds] == [2 * each] * 2
    assert fleet.peak_bytes == 2 * each
    for buffer in held:
        assert buffer is not None
        buffer.release()
    assert [csd.memory.used_bytes for csd in csds] == [0, 0]
