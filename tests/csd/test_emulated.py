"""The stand-in for pyxrt has its restrictions, and the code around it obeys them."""

import gc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from csd_contract import open_fleet

from jaxinf.csd.cards.memory import card_buffer_bytes
from jaxinf.csd.cards.peer import p2p_transfer
from jaxinf.csd.cards.standin import ANY_KERNEL, EmulatedXrt
from jaxinf.csd.cards.xrt import NoCardMemory, XrtCard
from jaxinf.errors import CsdError
from jaxinf.kernels import named_card_kernel
from jaxinf.transfer import BufferPool

NAME = "jaxinf_sgd_f32_update_f32"
SIZE, STATUS = 1024, 4096
CARD = named_card_kernel(NAME)
WORDS = CARD.scalar_values(
    num_elements=SIZE, rounding_key=0, rounding_first=0, scalars=[]
)


@pytest.fixture
def card():
    return XrtCard(EmulatedXrt(), 0, Path(ANY_KERNEL))


def run_sgd(card, gradient_value=2.0, *, sends=True):
    """Runs params -= 0.1 gradient on ones; returns params and result."""
    gradient, out, status = (card.allocate(n) for n in (4 * SIZE, 4 * SIZE, STATUS))
    params = card.allocate(4 * SIZE, p2p=True)
    params.array.view(np.float32)[:] = 1
    gradient.array.view(np.float32)[:] = gradient_value
    if sends:
        gradient.to_card(4 * SIZE)
    part = card.part(params, 0, 4096)
    pointers = [gradient.bo, part, part, out.bo, status.bo]
    card.run(NAME, pointers, WORDS, timeout_s=60)
    assert (out.array == 0xA5).all()  # not synced yet
    out.from_card(4 * SIZE)
    return params.array.view(np.float32).copy(), out.array.view(np.float32).copy()


def test_what_is_not_synced_is_stale(card):
    params, out = run_sgd(card, sends=False)  # the card's memory holds zeros
    np.testing.assert_array_equal(params, 1)
    np.testing.assert_array_equal(out, 0)


def test_a_drive_sends_a_card_whole_pages():
    with BufferPool(1 << 20).acquire(8192) as buffer:
        array = buffer.array
        with p2p_transfer(array, 4096):
            pass
        for part, offset in ((array[64:], 0), (array[:5000], 0), (array, 512)):
            refused = pytest.raises(OSError, match="no whole pages")
            with refused, p2p_transfer(part, offset):
                pass


# --- the adapter over it -----------------------------------------------------------


def test_a_view_keeps_its_buffer(card):
    view = card.allocate(4 << 30, p2p=True).array[:4096]
    gc.collect()
    with pytest.raises(NoCardMemory):
        card.allocate(4096)
    view[:] = 1
    del view
    gc.collect()
    assert card.allocate(4096).array.size == 4096


OLDER = SimpleNamespace(device=EmulatedXrt().device)


def opened(device, path, runtime=None):
    return XrtCard(runtime or EmulatedXrt(), device, path)


REFUSALS = {
    rf"has no kernel jaxinf_lion, only {NAME}.* make -C hls hw KERNELS=": (
        lambda card, path: opened(0, path).kernel("jaxinf_lion")
    ),
    r"expected XRT 2021\.2 .* a newer release": (
        lambda card, path: opened(0, path, OLDER)
    ),
    r"card 0000:01:00\.1: cannot be opened": (
        lambda card, path: opened("0000:01:00.1", path)
    ),
    r"refuses .*none: .*was built for the card's": (
        lambda card, path: opened(0, path.with_name("none"))
    ),
    "lower memory_bytes, or end who else": lambda card, _: card.allocate(5 << 30),
    "xbutil configure --device 0 --p2p enable": (
        lambda card, _: card.allocate(5 << 30, p2p=True)
    ),
    # No pointers: on a card, a bus error.
    f"kernel {NAME} ended as error": lambda card, _: card.run(
        NAME, [], WORDS, timeout_s=60
    ),
    r"did not start: .*incompatible": lambda card, _: card.run(
        NAME, [], [0.5], timeout_s=60
    ),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_a_card_refuses_is_named(card, tmp_path, message):
    xclbin = tmp_path / "kernels.xclbin"
    xclbin.write_text(NAME)
    with pytest.raises(CsdError, match=message):
        REFUSALS[message](card, xclbin)


# --- a fleet -----------------------------------------------------------------------


def test_subgroups_longer_than_the_cards_memory(tmp_path):
    fleet = open_fleet("emulated", [tmp_path], 1 << 20)
    num_elements = 300 << 20
    assert card_buffer_bytes(12 * num_elements, num_elements) > 4 << 30
    with pytest.raises(CsdError, match="a subgroup of 314,572,800 elements needs"):
        fleet.check_buffer(12 * num_elements, num_elements)
    fleet.check_buffer(12 << 20, 1 << 20)


def test_cards_have_memory_of_their_own(tmp_path):
    """Each card has as many buffers as the budget allows, with gradients, results."""
    roots = [tmp_path / "one", tmp_path / "two"]
    for root in roots:
        root.mkdir()
    each = card_buffer_bytes(1 << 19, 1 << 15)
    assert each == (1 << 19) + 12 * (1 << 15) + 4096  # state, three arrays, the status
    fleet = open_fleet("emulated", roots, 3 * each - 1)
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
