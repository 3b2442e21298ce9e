"""State in fewer bits: the codes' precision, and the same bits from C++ and NumPy."""

import ml_dtypes
import numpy as np
import optax
import pytest

from jaxinf.kernels.compiled import compile_kernel
from jaxinf.layout import CODE_BLOCK, CodedSlot
from jaxinf.layout.codecs import encode_bf16
from jaxinf.native.toolchain import levels
from jaxinf.program import trace_update

pytestmark = pytest.mark.optimized

SIZES = [1, 255, 256, 257, 511, 512, 513, 4096, 100_003]
TRACE = trace_update(optax.trace(decay=1.0), np.zeros(8, np.float32)).leaves[0].kernel


KINDS = {
    "normal": lambda rng, x: x,
    "squares": lambda rng, x: x**2 * np.float32(1e-8),
    "wide": lambda rng, x: x * np.float32(10) ** rng.integers(-12, 12, x.size),
    "zeros": lambda rng, x: 0 * x,
    "mostly zeros": lambda rng, x: np.where(rng.random(x.size) < 0.99, 0, x),
    "tiny": lambda rng, x: x * np.float32(2e-38),
    "huge": lambda rng, x: np.clip(x, -1, 1) * np.float32(8e37),
    "powers": lambda rng, x: 10.0 ** -rng.integers(0, 9, x.size),
}


def samples(kind, size):
    rng = np.random.default_rng(size)
    normal = rng.standard_normal(size).astype(np.float32)
    return KINDS[kind](rng, normal).astype(np.float32)


def flushed(values):
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0), values)


def int8_slot(size, key=9, first=512):
    blocks = -(-size // CODE_BLOCK)
    codes, scales = np.zeros(size, np.uint8), np.zeros(blocks, np.float32)
    return CodedSlot(codes, scales, key, first)


def bf16_slot(size, key=0, first=0):
    return CodedSlot(np.zeros(size, ml_dtypes.bfloat16), None, key, first)


def store(level, values, slot):
    out, params = np.zeros_like(values), np.zeros_like(values)
    run = compile_kernel(TRACE, level=level).run
    finite = run(gradient=values, params=params, slots=[slot], out=out)
    assert finite
    return slot


def load(level, slot):
    zeros = np.zeros(slot.codes.size, np.float32)
    out = np.zeros_like(zeros)
    run = compile_kernel(TRACE, level=level).run
    run(gradient=zeros, params=zeros.copy(), slots=[slot], out=out)
    return out


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_int8_has_the_same_bits_in_machine_code(level, kind, size):
    values = flushed(samples(kind, size))
    slot, wanted = int8_slot(size), int8_slot(size)
    store(level, values, slot)
    wanted.encode(values)
    np.testing.assert_array_equal(slot.codes, wanted.codes)
    np.testing.assert_array_equal(
        slot.scales.view(np.uint32), wanted.scales.view(np.uint32)
    )
    decoded = wanted.decode()
    np.testing.assert_array_equal(load(level, slot), decoded)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "key", "first"),
    [
        (100_003, 7, 0),
        (1000, 2**31 + 5, 2**32 - 256),
        (513, 2**31, 2**32 - 9),
        (513, 7, 2**32 + 9),
    ],
)
def test_bf16_has_the_same_bits_in_machine_code(level, kind, size, key, first):
    values = flushed(samples(kind, size))
    slot, wanted = bf16_slot(size, key, first), bf16_slot(size, key, first)
    store(level, values, slot)
    wanted.encode(values)
    np.testing.assert_array_equal(
        slot.codes.view(np.uint16), wanted.codes.view(np.uint16)
    )


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("scale", [0.0, 1.0, -1.0, 3e-7, -7e29, 2.0**-126])
def test_every_int8_code_has_the_same_bits_in_machine_code(level, scale):
    slot = CodedSlot(np.arange(256, dtype=np.uint8), np.float32([scale]))
    expected = slot.decode()
    np.testing.assert_array_equal(load(level, slot), expected)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("make", [int8_slot, bf16_slot])
def test_codes_are_not_finite_where_the_number_is_not(level, make):
    values = samples("normal", 1000)
    quiet, loud, negative = np.array([0x7FC00000, 0x7F800001, 0xFF800007], np.uint32)
    words = values.view(np.uint32)
    words[[3, 300, 301, 999]] = quiet, loud, negative, quiet
    values[[4, 302, 998]] = np.inf, -np.inf, np.inf
    slot, wanted = make(1000), make(1000)
    run = compile_kernel(TRACE, level=level).run
    out, params = np.zeros_like(values), np.zeros_like(values)
    assert not run(gradient=values, params=params, slots=[slot], out=out)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        wanted.encode(values)
    assert slot.codes.tobytes() == wanted.codes.tobytes()
    if wanted.scales is not None:
        np.testing.assert_array_equal(slot.scales, wanted.scales)


@pytest.mark.parametrize("kind", KINDS)
def test_int8_precision(kind):
    """The error is below a step of the value's decade; in the last, below the value."""
    values = flushed(samples(kind, 100_003)).astype(np.float64)
    slot = int8_slot(values.size)
    slot.encode(values.astype(np.float32))
    scales = np.repeat(slot.scales.astype(np.float64), CODE_BLOCK)[: values.size]
    top = np.where(scales < 0, 64, 128)
    num_decades = np.where(scales < 0, 7, 8)
    largest = np.maximum(np.abs(scales), 1e-300)
    share = np.maximum(np.abs(values) / largest, 1e-30)
    decade = np.clip(np.floor(-np.log10(share) + 1e-6), 0, num_decades - 1)
    step = 0.9 * largest * 10.0**-decade / (top / 2**decade)
    step = np.where(decade == num_decades - 1, largest * 10.0**-decade, step)
    error = np.abs(slot.decode() - values)
    assert (error <= step * 1.001 + 1e-37).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
def test_what_is_not_finite_does_not_pass_for_a_number(bad):
    values = np.ones(600, np.float32)
    values[300] = bad
    slot = int8_slot(600)
    slot.encode(values)
    decoded = slot.decode()
    assert np.isnan(decoded[256:512]).all()
    np.testing.assert_array_equal(decoded[:256], 1)
    np.testing.assert_array_equal(decoded[512:], 1)
    if not abs(bad) < np.inf:
        rounded = encode_bf16(values, 1, 0).astype(np.float32)
        np.testing.assert_array_equal(rounded[300], bad)


@pytest.mark.parametrize("value", [0.9, 0.5, 0.123, 0.0345, 2e-4, 7e-6, -0.5, -3e-3])
def test_int8_rounds_without_bias(value):
    """Otherwise a slow average (a decay of 0.999) would never leave its code."""
    num_blocks = 2000
    values = np.full((num_blocks, CODE_BLOCK), np.float32(value))
    values[:, 0] = 1
    slot = int8_slot(values.size)
    slot.encode(values.reshape(-1))
    decoded = slot.decode().reshape(num_blocks, CODE_BLOCK)[:, 1:]
    assert len(np.unique(decoded)) <= 2
    assert abs(decoded.mean() / value - 1) < 2e-3
