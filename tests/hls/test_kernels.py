"""Card kernels, compiled for this machine: the host's bits in every variant."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from covering import covering
from families import family

from jaxinf.kernels.card_library import card_function, card_library
from jaxinf.kernels.estimates import rsqrt_estimates
from jaxinf.kernels.standard import standard_kernels
from jaxinf.native import toolchain

KERNELS = standard_kernels()
SIZES = (1, 15, 16, 17, 33, 255, 256, 257, 1023, 4097, 10007)
GRADIENTS, RESULTS = ("f32", "bf16", "f16"), ("update", "params", "bf16", "f16")
STATES = ("f32", "bf16", "int8")
# Few of the 288 variants, in which any three properties of a variant meet.
AXES = (("adagrad", "adamw", "sgd_momentum", "lion"), GRADIENTS, RESULTS, STATES)
VARIANTS = covering(3, *AXES, (False, True))
OTHER_BODIES = sorted(KERNELS.keys() - {"set_to_zero", *AXES[0]})

pytestmark = pytest.mark.skipif(
    toolchain.find_compiler() is None or not toolchain.levels(),
    reason="no C++ compiler for this processor",
)


def functions(*cards):
    """Returns the kernels of one library."""
    library = ctypes.CDLL(str(card_library(*cards)))
    for card in cards:
        function = getattr(library, card.name)
        pointers, scalars = len(card.pointers), len(card.scalars)
        function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int32] * scalars
        yield card, function


@pytest.fixture(name="dense", scope="module")
def dense_fixture(tools):
    card = tools.variant(KERNELS["adamw"], "bf16", "bf16", "f32")
    return card, KERNELS["adamw"], card_function(card)


@pytest.fixture(name="compressed", scope="module")
def compressed_fixture(tools):
    card = tools.variant(KERNELS["adamw"], "f32", "update", "int8", compressed=True)
    return card, KERNELS["adamw"], card_function(card)


# ---- the host's bits


@pytest.mark.parametrize("num", family([*SIZES, (1 << 20) + 1], short=SIZES))
def test_sizes(tools, dense, compressed, num):
    for parts in (dense, compressed):
        tools.compare(*parts, tools.make_chunk(*parts[:2], num))


@pytest.mark.parametrize("ratio", [0.0, 0.001, 0.3, 1.0])
def test_ratios_of_compression(tools, compressed, ratio):
    card, kernel, _ = compressed
    for num in (1, 16, 257, 5000):
        chunk = tools.make_chunk(card, kernel, num, ratio=ratio)
        tools.compare(*compressed, chunk)


def test_states_may_be_read_and_written_elsewhere(tools, dense, compressed):
    for parts in (dense, compressed):
        chunk = tools.make_chunk(*parts[:2], 5000)
        tools.compare(*parts, chunk, in_place=False)


def test_threads_do_not_meet(tools, dense, compressed):
    def run(seed):
        for parts in (dense, compressed):
            tools.compare(*parts, tools.make_chunk(*parts[:2], 100_000, seed))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(8)))


@pytest.mark.hls
@pytest.mark.parametrize("body", AXES[0])
@pytest.mark.parametrize("out", RESULTS)
def test_variants(tools, body, out):
    kernel = KERNELS[body]
    chosen = [row for row in VARIANTS if (row[0], row[2]) == (body, out)]
    cards = [tools.variant(kernel, g, out, s, c) for _, g, _, s, c in chosen]
    for card, function in functions(*cards):
        for num in SIZES:
            chunk = tools.make_chunk(card, kernel, num)
            tools.compare(card, kernel, function, chunk)


@pytest.mark.hls
@pytest.mark.parametrize("body", OTHER_BODIES)
def test_other_bodies(tools, body):
    kernel = KERNELS[body]
    cards = [tools.variant(kernel), tools.variant(kernel, "f16", "f16", "bf16", True)]
    for card, function in functions(*cards):
        for num in SIZES:
            chunk = tools.make_chunk(card, kernel, num)
            tools.compare(card, kernel, function, chunk)


# ---- 1 / sqrt(x): from the host's table of estimates


@pytest.mark.parametrize("num", SIZES)
def test_adagrad(tools, num):
    kernel = KERNELS["adagrad"]
    card = tools.variant(kernel)
    chunk = tools.make_chunk(card, kernel, num)
    tools.compare(card, kernel, card_function(card), chunk)


@pytest.mark.parametrize("body", ["adagrad", "rmsprop"])
def test_roots_of_special_values(tools, body):
    """Without a gradient, the root's argument is the slot itself."""
    kernel = KERNELS[body]
    card = tools.variant(kernel)
    words = [
        sign | magnitude
        for magnitude in (
            0, 1, 0x7FFFFF, 0x800000, 0x3F7FFFFF, 0x3F800000, 0x40000000, 0x407FFFFF,
            0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00005, 0x7FFFFFFF,
        )
        for sign in (0, 1 << 31)
    ]  # fmt: skip
    chunk = tools.make_chunk(card, kernel, len(words))
    (slot,) = card.slots
    chunk.states[slot] = np.array(words, np.uint32).view(np.float32)
    for gradient in (0, 1):
        chunk.gradient = np.full(len(words), gradient, np.float32)
        tools.compare(card, kernel, card_function(card), chunk)


def test_without_estimates_there_are_two_roundings(tools):
    """On processors other than x86-64, the host's bits are NumPy's."""
    kernel = KERNELS["adagrad"]
    card = tools.variant(kernel)
    chunk = tools.make_chunk(card, kernel, 5000)
    table = np.zeros_like(rsqrt_estimates())
    states, out, _ = tools.run_card(card, card_function(card), chunk, table=table)
    threshold, eps, otherwise, rate = np.array(card.constants, np.uint32).view("f4")
    sums = states["sum_of_squares"]
    root = np.where(sums > threshold, 1 / np.sqrt(sums + eps), otherwise)
    expected = flushed(flushed(root * flushed(chunk.gradient)) * rate)
    tools.same_bits(out, expected)


def flushed(values):
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), values), values)


# ---- a kernel's report


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 17, 4999])
def test_a_gradient_that_is_not_finite(tools, dense, compressed, bad, place):
    for card, kernel, function in (dense, compressed):
        chunk = tools.make_chunk(card, kernel, 5000, ratio=1.0)
        chunk.gradient[place] = bad
        _, _, status = tools.run_card(card, function, chunk)
        assert not status.finite
        assert not tools.run_host(card, kernel, chunk)[2]


@pytest.mark.parametrize(
    "indices", [[3, 2, 4999], [20, 3, 40], [3, 5000, 6000], [-1, 3], [0, 1 << 30]]
)
def test_positions_that_are_not_valid(tools, compressed, indices):
    card, kernel, function = compressed
    chunk = tools.make_chunk(card, kernel, 5000)
    chunk.indices = np.array(indices, np.int32)
    chunk.gradient = np.ones(len(indices), np.float32)
    _, _, status = tools.run_card(card, function, chunk)
    assert status.finite
    assert not status.indices_valid


def test_a_missing_compiler_is_named(tools, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(toolchain.CompilerError, match=r"a C\+\+ compiler .* CXX"):
        card_library(tools.variant(KERNELS["lion"]))
