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
from jaxinf.csd.cards.xrt import NoCardMemory, XrtCard
from jaxinf.errors import CsdError
from jaxinf.kernels import named_card_kernel
from jaxinf.transfer import BufferPool, ByteMeters

NAME, OTHER = "jaxinf_sgd_f32_update_f32", "jaxinf_adam_f32_update_f32"
SIZE, STATUS = 1024, 4096
CARD = named_card_kernel(NAME)
WORDS = CARD.scalar_values(
    num_elements=SIZE, rounding_key=0, rounding_first=0, scalars=[]
)


class Rig:
    """A kernel (params -= 0.1 gradient) with its buffers, by pyxrt's names."""

    def __init__(self):
        self.xrt = EmulatedXrt(has_contexts=False)
        self.device = self.xrt.device(0)
        uuid = self.device.load_xclbin(self.xrt.xclbin(ANY_KERNEL))
        self.kernel = self.xrt.kernel(self.device, uuid, NAME)
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

    def sync(self, bo, way):
        ways = self.xrt.xclBOSyncDirection
        bo.sync(getattr(ways, f"XCL_BO_SYNC_BO_{way}_DEVICE"), bo.size(), 0)

    def start(self):
        bos = [self.gradient, self.params, self.params, self.out, self.status]
        run = self.xrt.run(self.kernel)
        for number, value in enumerate([*bos, *WORDS]):
            run.set_arg(number, value)
        run.start()
        while int(run.state()) in (1, 3):
            time.sleep(0.001)
        return int(run.state())


def test_what_is_not_synced_is_stale():
    rig = Rig()
    rig.start()  # the gradient has not been sent: the card's memory holds zeros
    np.testing.assert_array_equal(rig.view(rig.params), 1)
    np.testing.assert_array_equal(rig.view(rig.out, np.uint8), 0xA5)
    rig.sync(rig.out, "FROM")
    np.testing.assert_array_equal(rig.view(rig.out), 0)


def test_an_argument_is_a_buffer_or_an_integer():
    rig = Rig()
    for value in (1.0, 1 << 31, -(1 << 31) - 1, None, True):
        with pytest.raises(TypeError):
            rig.xrt.run(rig.kernel).set_arg(5, value)


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


def test_a_drive_sends_a_card_whole_pages():
    with BufferPool(1 << 20).acquire(8192) as buffer:
        array = buffer.array
        with with_card(array, 4096):
            pass
        for part, offset in ((array[64:], 0), (array[:5000], 0), (array, 512)):
            refused = pytest.raises(OSError, match="no whole pages")
            with refused, with_card(part, offset):
                pass


# --- the adapter over it -----------------------------------------------------------


@pytest.mark.parametrize("has_contexts", [False, True])
def test_the_adapter_knows_every_release(has_contexts, tmp_path):
    xclbin = tmp_path / "kernels.xclbin"
    xclbin.write_text(f"{NAME}\n{OTHER}\n")
    card = XrtCard(EmulatedXrt(has_contexts=has_contexts), 0, xclbin)
    assert card.kernel_names == (NAME, OTHER)
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
    np.testing.assert_allclose(params.array.view(np.float32), 0.8, rtol=1e-6)


@pytest.fixture
def card():
    return XrtCard(EmulatedXrt(), 0, Path(ANY_KERNEL))


def test_a_view_keeps_its_buffer(card):
    view = card.allocate(4 << 30, 0, p2p=True).array[:4096]
    gc.collect()
    with pytest.raises(NoCardMemory):
        card.allocate(4096, 0)
    view[:] = 1
    del view
    gc.collect()
    assert card.allocate(4096, 0).array.size == 4096


OLDER = SimpleNamespace(device=EmulatedXrt().device)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda card, path: XrtCard(EmulatedXrt(), 0, path).kernel("jaxinf_lion"),
            rf"has no kernel jaxinf_lion, only {NAME}.* make -C hls hw KERNELS=",
        ),
        (
            lambda card, path: XrtCard(OLDER, 0, path),
            r"expected XRT 2021\.2 .* a newer release",
        ),
        (
            lambda card, path: XrtCard(EmulatedXrt(), "0000:01:00.1", path),
            r"card 0000:01:00\.1: cannot be opened",
        ),
        (
            lambda card, path: XrtCard(EmulatedXrt(), 0, path.with_name("none")),
            r"refuses .*none: .*was built for the card's",
        ),
        (
            lambda card, path: card.allocate(5 << 30, 0),
            "lower memory_bytes, or end who else",
        ),
        (
            lambda card, path: card.allocate(5 << 30, 0, p2p=True),
            "xbutil configure --device 0 --p2p enable",
        ),
        (
            lambda card, path: card.kernel(NAME).run([], WORDS, 60),
            f"kernel {NAME} ended as error",  # no pointers: on a card, a bus error
        ),
        (
            lambda card, path: card.kernel(NAME).run([], [0.5], 60),
            r"did not start: .*incompatible",
        ),
    ],
)
def test_what_a_card_refuses_is_named(card, tmp_path, call, message):
    xclbin = tmp_path / "kernels.xclbin"
    xclbin.write_text(NAME)
    with pytest.raises(CsdError, match=message):
        call(card, xclbin)


def test_a_kernel_that_never_ends(card):
    gate = threading.Event()
    blocked = card._device.unit.submit(gate.wait)
    with pytest.raises(CsdError, match=r"has not ended after 0 s; reset the card"):
        card.kernel(NAME).run([], WORDS, 0.01)
    gate.set()
    blocked.result()


# --- a fleet -----------------------------------------------------------------------


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
        buffer.release()
    assert [csd.memory.used_bytes for csd in csds] == [0, 0]
