"""Card kernels, compiled for this machine: the host's bits, whatever the variant."""

import ctypes
import itertools

import pytest

from jaxinf.kernels import toolchain
from jaxinf.kernels.card_library import card_library
from jaxinf.kernels.standard import standard_kernels

KERNELS = standard_kernels()
FAMILIES = ("adam", "adamw", "sgd_momentum", "lion")
SIZES = (1, 15, 16, 17, 33, 255, 256, 257, 1023, 4097, 10007)

pytestmark = pytest.mark.skipif(
    toolchain.find_compiler() is None or not toolchain.levels(),
    reason="no C++ compiler for this processor",
)


def functions(cards):
    library = ctypes.CDLL(str(card_library(*cards)))
    for card in cards:
        function = getattr(library, card.name)
        pointers, scalars = len(card.pointers), len(card.scalars)
        function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int32] * scalars
        function.restype = None
        yield card, function


@pytest.mark.parametrize("num", SIZES)
@pytest.mark.parametrize("state", ["f32", "int8"])
def test_a_kernel_gives_the_hosts_bits(tools, state, num):
    kernel = KERNELS["adamw"]
    cards = [
        tools.variant(kernel, "bf16", "bf16", "f32"),
        tools.variant(kernel, "f32", "update", "int8", compressed=True),
    ]
    for card, function in functions(cards):
        if card.state == state:
            tools.compare(card, kernel, function, tools.make_chunk(card, kernel, num))


@pytest.mark.hls
@pytest.mark.parametrize("family", FAMILIES)
def test_every_variant_gives_the_hosts_bits(tools, family):
    kernel = KERNELS[family]
    kinds = itertools.product(
        ("f32", "bf16", "f16"), ("update", "params", "bf16", "f16"),
        ("f32", "bf16", "int8"), (False, True),
    )  # fmt: skip
    cards = [tools.variant(kernel, *kind) for kind in kinds]
    for card, function in functions(cards):
        for num in SIZES:
            chunk = tools.make_chunk(card, kernel, num)
            tools.compare(card, kernel, function, chunk)
