"""The binding has the names and the pitfalls of AMD's pyxrt."""

import numpy as np
import pytest
from xrt_card import fetch, finish, float_bits

F32 = np.float32


@pytest.fixture
def pyxrt():
    import pyxrt  # pyright: ignore[reportMissingImports]

    return pyxrt


@pytest.fixture
def call(open_card):
    """Calls `scale` on a 1 with the arguments given for factor and offset."""
    card = open_card()
    kernel = card.kernel("scale")
    source, target = card.put(np.ones(16, F32)), card.put(np.full(16, -1, F32))

    def call(factor, offset):
        finish(kernel(source, target, 16, factor, offset))
        return fetch(target)[0]

    return call


def test_a_call_drops_floats(call):
    assert call(2.5, 1) == 1  # a factor of zero
    assert call(float_bits(2.5), 1) == 3.5


def test_a_call_truncates_numpy_floats(call):
    smallest = np.int32(1).view(F32)  # what the int 1 is, as a factor
    assert call(F32(1.75), 0) == smallest


def test_a_call_drops_ints_beyond_31_bits(call):
    assert call(float_bits(1), 1 << 31) == 1
    assert call(float_bits(1), -(1 << 31)) == F32(1 - 2**31)


@pytest.mark.parametrize("value", [1.0, 1 << 31, 1 << 40, "1", None])
def test_set_arg_refuses_what_is_no_c_int(open_card, pyxrt, value):
    run = pyxrt.run(open_card().kernel("scale"))
    with pytest.raises(TypeError, match="incompatible function arguments"):
        run.set_arg(2, value)


def test_sync_needs_size_and_offset(open_card, pyxrt):
    buffer = open_card().buffer(4096)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        buffer.sync(pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE)


def test_what_a_device_tells(open_card, pyxrt):
    device = open_card().device
    name = device.get_info(pyxrt.xrt_info_device.name)
    assert name == "xilinx_u2_gen3x4_xdma_gc_base_2"
    assert device.get_info(pyxrt.xrt_info_device.nodma) == "0"
    assert pyxrt.enumerate_devices() == 0  # the emulation lists none


def test_unknown_names(open_card, pyxrt, tmp_path):
    card = open_card()
    with pytest.raises(RuntimeError, match="No such kernel 'nowhere'"):
        card.kernel("nowhere")
    with pytest.raises(RuntimeError, match=r"nothing\.xclbin"):
        card.device.load_xclbin(str(tmp_path / "nothing.xclbin"))
