"""The master as a bfloat16 and a 16-bit remainder: every bit comes back."""

import ctypes

import ml_dtypes
import numpy as np
import optax
import pytest

from jaxinf.kernels.compiled import compile_kernel
from jaxinf.layout import CodedSlot
from jaxinf.layout.codecs import decode_split, encode_split
from jaxinf.native import toolchain
from jaxinf.native.toolchain import levels
from jaxinf.program import trace_update

pytestmark = pytest.mark.optimized

BF16 = np.dtype(ml_dtypes.bfloat16)
LOWS = np.arange(1 << 16, dtype=np.uint32)
# Zeros, denormals, the smallest and largest normals, neighbours of a carry, infinities,
# quiet and signalling NaNs, and a selection of others; both signs.
HIGHS = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3FFF, 0x7F7F, 0x7F80]
HIGHS += [0x7F81, 0x7FBF, 0x7FC0, 0x7FFF, *range(0x0100, 0x7F00, 0x0B13)]
HIGHS += [high | 0x8000 for high in HIGHS]

HARNESS = """
#include "codecs.hpp"
extern "C" __attribute__((visibility("default"))) void jaxinf_entry(
    const std::uint32_t* bits, std::uint16_t* rounded, std::uint16_t* remainders,
    std::uint32_t* decoded, long num) {
  jaxinf::encode_split(bits, num, rounded, remainders);
  jaxinf::decode_split(rounded, remainders, num, decoded);
}
"""


@pytest.fixture(scope="module")
def in_machine_code(tmp_path_factory):
    place = tmp_path_factory.mktemp("codec")
    (place / "codec.cpp").write_text(HARNESS)
    compiler, library = toolchain.find_compiler(), place / "codec.so"
    level = levels()[-1]
    toolchain.compile_source(
        place / "codec.cpp", library, compiler=compiler, level=level
    )
    function = ctypes.CDLL(str(library)).jaxinf_entry
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long]

    def run(bits):
        arrays = np.zeros(bits.size, BF16), np.zeros(bits.size, np.int16), bits.copy()
        places = [array.ctypes.data for array in (bits, *arrays)]
        function(*places, bits.size)
        return arrays

    return run


@pytest.mark.parametrize("high", HIGHS)
def test_every_low_half_comes_back(high, in_machine_code):
    """Rounded to the nearest, ties away from zero."""
    bits = np.uint32(high << 16) | LOWS
    rounded, remainders = np.zeros(bits.size, BF16), np.zeros(bits.size, np.int16)
    encode_split(bits.view(np.float32), rounded, remainders)
    decoded = decode_split(rounded, remainders).view(np.uint32)
    compiled = in_machine_code(bits)
    for mine, theirs in zip((rounded, remainders, decoded), compiled, strict=True):
        assert mine.tobytes() == theirs.tobytes()
    is_nan = np.isnan(bits.view(np.float32))
    np.testing.assert_array_equal(decoded[~is_nan], bits[~is_nan])
    np.testing.assert_array_equal(
        decoded[is_nan], bits[is_nan] & 0xFFFF0000 | 0x00400000
    )
    assert np.isnan(rounded[is_nan].astype(np.float32)).all()
    assert not remainders[is_nan].any()
    assert not np.isnan(rounded[~is_nan].astype(np.float32)).any()
    if high & 0x7FFF < 0x7F7F:
        below = (bits & 0xFFFF0000).view(np.float32).astype(np.float64)
        is_up = np.abs(rounded.astype(np.float64)) > np.abs(below)
        np.testing.assert_array_equal(is_up, LOWS >= 0x8000)


def coded(values, remainders=True):
    rest = np.zeros(values.size, np.int16) if remainders else None
    slot = CodedSlot(np.zeros(values.size, BF16), rest, 5)
    slot.encode(values)
    return slot


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("size", [1, 7, 511, 512, 513, 100_003])
@pytest.mark.parametrize("out_dtype", [BF16, np.float32])
def test_a_kernel_updates_split_params_as_plain_ones(level, size, out_dtype):
    template = np.zeros(8, np.float32)
    kernel = trace_update(optax.adamw(0.1), template).leaves[0].kernel
    run = compile_kernel(kernel, level=level).run
    rng = np.random.default_rng(size)
    params, gradient = (rng.standard_normal(size).astype(np.float32) for _ in "ab")
    state = [np.zeros(size, np.float32) for _ in range(2)]
    split = coded(params)
    others = [s.copy() for s in state]
    scalars = [np.array(0.3).astype(d)[()] for d in kernel.scalar_dtypes]
    for _ in range(3):
        u, out = np.zeros(size, np.float32), np.zeros(size, out_dtype)
        shared = {"gradient": gradient, "scalars": scalars}
        assert run(params=params, slots=state, out=u, **shared)
        assert run(params=split, slots=others, out=out, **shared)
        np.testing.assert_array_equal(split.decode(), params)
        np.testing.assert_array_equal(others, state)
        wanted = u if out_dtype == np.float32 else split.codes
        np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("level", levels())
def test_params_without_a_remainder_are_rounded_stochastically(level):
    """The same codes as from NumPy, and their mean is the exact value."""
    size = 100_003
    kernel = trace_update(optax.sgd(1.0), np.zeros(8, np.float32)).leaves[0].kernel
    run = compile_kernel(kernel, level=level).run
    params, wanted = (coded(np.ones(size, np.float32), False) for _ in "ab")
    gradient = np.full(size, -0.3 / 128, np.float32)
    out = np.zeros(size, BF16)
    assert run(gradient=gradient, params=params, out=out)
    np.testing.assert_array_equal(out, params.codes)
    wanted.encode(1 - gradient)
    np.testing.assert_array_equal(out, wanted.codes)
    share = (out.astype(np.float32) > 1).mean()
    assert set(out.astype(np.float32)) == {1.0, np.float32(1 + 1 / 128)}
    assert abs(share - 0.3) < 0.01
