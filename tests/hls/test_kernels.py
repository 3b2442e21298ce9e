"""Card kernels, compiled for this machine: the host's bits, whatever the variant."""

import ctypes
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxinf.kernels import toolchain
from jaxinf.kernels.card_library import card_function, card_library
from jaxinf.kernels.standard import standard_kernels

KERNELS = standard_kernels()
REFINED = [n for n in KERNELS if n.startswith(("adagrad", "rmsprop"))]  # 1/sqrt(x)
EXACT = sorted(KERNELS.keys() - {"set_to_zero"} - set(REFINED))
SIZES = (1, 15, 16, 17, 33, 255, 256, 257, 1023, 4097, 10007)
GRADIENTS, RESULTS = ("f32", "bf16", "f16"), ("update", "params", "bf16", "f16")
STATES = ("f32", "bf16", "int8")

pytestmark = pytest.mark.skipif(
    toolchain.find_compiler() is None or not toolchain.levels(),
    reason="no C++ compiler for this processor",
)


def functions(*cards):
    """The kernels of one library."""
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


@pytest.mark.parametrize("num", [*SIZES, (1 << 20) + 1])
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
@pytest.mark.parametrize(
    ("body", "out"), [*itertools.product(("adamw", "sgd_momentum", "lion"), RESULTS)]
)
def test_every_variant(tools, body, out):
    kernel = KERNELS[body]
    kinds = itertools.product(GRADIENTS, STATES, (False, True))
    cards = [tools.variant(kernel, g, out, s, c) for g, s, c in kinds]
    for card, function in functions(*cards):
        for num in SIZES:
            chunk = tools.make_chunk(card, kernel, num)
            tools.compare(card, kernel, function, chunk)


@pytest.mark.hls
@pytest.mark.parametrize("body", EXACT)
def test_every_body(tools, body):
    kernel = KERNELS[body]
    cards = [tools.variant(kernel), tools.variant(kernel, "f16", "f16", "bf16", True)]
    for card, function in functions(*cards):
        for num in SIZES:
            chunk = tools.make_chunk(card, kernel, num)
            tools.compare(card, kernel, function, chunk)


# ---- 1 / sqrt(x): two roundings on a card, a refined estimate on the host


@pytest.mark.parametrize("num", SIZES)
def test_adagrad(tools, num):
    """A card's own bits from NumPy, and the host's within a few units."""
    kernel = KERNELS["adagrad"]
    card = tools.variant(kernel)
    chunk = tools.make_chunk(card, kernel, num)
    host_states, host_out, _ = tools.run_host(card, kernel, chunk)
    states, out, _ = tools.run_card(card, card_function(card), chunk)
    name = "sum_of_squares"
    tools.same_bits(states[name], host_states[name])  # what comes before the root
    threshold, eps, otherwise, rate = np.array(card.constants, np.uint32).view("f4")
    root = np.sqrt(states[name] + eps)
    root = np.where(states[name] > threshold, np.float32(1) / root, otherwise)
    gradient = flushed(chunk.gradient)
    expected = flushed(flushed(root * gradient) * rate)
    tools.same_bits(out, expected)
    tools.same_bits(states["params"], flushed(flushed(chunk.states["params"]) + out))
    np.testing.assert_allclose(out, host_out, rtol=4e-7, atol=0)


@pytest.mark.hls
@pytest.mark.parametrize("body", REFINED)
def test_bodies_with_a_root_stay_near_the_hosts(tools, body):
    kernel = KERNELS[body]
    card = tools.variant(kernel, "bf16")
    for num in SIZES:
        chunk = tools.make_chunk(card, kernel, num)
        expected, expected_out, finite = tools.run_host(card, kernel, chunk)
        states, out, status = tools.run_card(card, card_function(card), chunk)
        assert status.finite == finite
        # A sum may cancel: by units of its largest term. Random moments may have no
        # root: then it is NaN on both.
        assert_near(out, expected_out)
        for name, values in expected.items():
            assert_near(states[name], values)


def assert_near(found, expected):
    limit = 1e-6 * np.abs(expected[np.isfinite(expected)]).max(initial=0)
    np.testing.assert_allclose(found, expected, 1e-6, limit)


def flushed(values):
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), values), values)


# ---- what a kernel reports


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
    with pytest.raises(toolchain.CompilerError, match=r"there is no compiler .* CXX"):
        card_library(tools.variant(KERNELS["lion"]))
