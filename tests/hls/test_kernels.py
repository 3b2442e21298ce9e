"""Card kernels, compiled for this machine: the host's bits in every variant."""

import ctypes
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
from families import covering, family

from jaxinf.kernels import compiled, rsqrt_estimates
from jaxinf.kernels.card_kernels import card_kernel
from jaxinf.kernels.card_library import card_function, card_library
from jaxinf.kernels.compiled import standard_kernels
from jaxinf.layout import CODE_BLOCK, CodedSlot
from jaxinf.transfer import crc32c

KERNELS = standard_kernels()
SIZES = (1, 15, 16, 17, 33, 255, 256, 257, 1023, 4097, 10007)
GRADIENTS, RESULTS = ("f32", "bf16", "f16"), ("update", "bf16", "f16")
STATES = ("f32", "bf16", "int8")
# Few of the 216 variants, in which any three properties of a variant meet.
AXES = (("adagrad", "adamw", "sgd_momentum", "lion"), GRADIENTS, RESULTS, STATES)
VARIANTS = covering(3, *AXES, (False, True))
OTHER_BODIES = sorted(KERNELS.keys() - {"set_to_zero", *AXES[0]})

DTYPES = {
    "f32": np.dtype(np.float32),
    "bf16": jnp.bfloat16.dtype,
    "f16": np.dtype(np.float16),
}
OUT_DTYPES = {**DTYPES, "update": DTYPES["f32"]}
CODECS = {"f32": "", "bf16": "bf16", "int8": "int8"}
GUARD = 0xA5


class Memory:
    """64-byte aligned, with garbage in the padding and a guard behind it."""

    def __init__(self, values, num_bytes, *, garbage=0xFF):
        raw = np.full(num_bytes + 128, GUARD, np.uint8)
        start = -raw.ctypes.data % 64
        self.guarded = raw[start:]
        self.padded = self.guarded[:num_bytes]
        self.values = self.padded[: values.nbytes].view(values.dtype)
        self.padded[...] = garbage
        self.values[...] = values

    @property
    def address(self):
        return self.guarded.ctypes.data

    def check(self, *, written):
        assert (self.guarded[self.padded.size :] == GUARD).all(), "beyond the memory"
        if written:
            assert not self.padded[self.values.nbytes :].any(), "padding is not zero"


@dataclass
class Chunk:
    """A subgroup's inputs in the host's form; `states` are in their stored form."""

    gradient: np.ndarray
    indices: np.ndarray | None
    states: dict[str, np.ndarray]
    scalars: list
    key: int = 0x9ABCDEF0
    first: int = 0xFFFFFF00

    @property
    def num(self):
        return self.states["params"].size


def floats(rng, num):
    values = rng.standard_normal(num) * np.exp(rng.uniform(-12, 3, num))
    special = rng.choice(np.float32([0, -0.0, 1e-40, -1e-38, 2e-38, 1e4, 1]), num)
    return np.where(rng.random(num) < 0.1, special, values).astype(np.float32)


def make_chunk(card, kernel, num, seed=0, ratio=0.1):
    rng = np.random.default_rng([num, seed])
    gradient = floats(rng, num).astype(DTYPES[card.gradient])
    indices = None
    if card.is_sparse:
        count = int(np.ceil(num * ratio))
        indices = np.sort(rng.choice(num, count, replace=False)).astype(np.int32)
        gradient = gradient[:count].copy()
    states = {"params": floats(rng, num)}
    for number, slot in enumerate(card.slots):
        values = floats(rng, num)
        if slot != "mu" and slot != "trace":
            values = np.abs(values)
        if card.state == "f32":
            states[slot] = values
        elif card.state == "bf16":
            states[slot] = values.astype(DTYPES["bf16"])
        else:
            codes = np.zeros(num, np.uint8)
            scales = np.zeros(-(-num // CODE_BLOCK), np.float32)
            CodedSlot(codes, scales, number, 5).encode(values)
            states[slot], states[f"{slot}_scales"] = codes, scales
    scalars = [
        np.bool_(True) if dtype == np.bool_ else np.float32(0.3 + 0.1 * i)
        for i, dtype in enumerate(kernel.scalar_dtypes)
    ]
    return Chunk(gradient, indices, states, scalars)


def run_host(card, kernel, chunk):
    states = {name: values.copy() for name, values in chunk.states.items()}
    gradient = chunk.gradient
    if chunk.indices is not None:
        gradient = np.zeros(chunk.num, chunk.gradient.dtype)
        gradient[chunk.indices] = chunk.gradient
    slots = []
    for number, slot in enumerate(card.slots):
        key = chunk.key + 1 + number & 0xFFFFFFFF
        if card.state == "f32":
            slots.append(states[slot])
        else:
            scales = states.get(f"{slot}_scales")
            slots.append(CodedSlot(states[slot], scales, key, chunk.first))
    out = np.zeros(chunk.num, OUT_DTYPES[card.out])
    finite = compiled(kernel).run(
        gradient=gradient, params=states["params"], slots=slots,
        scalars=chunk.scalars, arrays=[], out=out,
    )  # fmt: skip
    return states, out, finite


def run_card(card, function, chunk, *, in_place=True, table=None):
    """Returns new states, result and status, after checks of the guards.

    `table`: of estimates, instead of this machine's.
    """
    num = chunk.num
    selected = 0 if chunk.indices is None else chunk.indices.size
    inputs = {"gradient": chunk.gradient, "indices": chunk.indices}
    inputs["rsqrt_estimates"] = rsqrt_estimates() if table is None else table
    inputs |= {f"{name}_in": values for name, values in chunk.states.items()}
    memory: dict[str, Memory] = {}
    for pointer in card.pointers:
        num_bytes = pointer.num_bytes(num, selected)
        if pointer.name in inputs:
            memory[pointer.name] = Memory(inputs[pointer.name], num_bytes)
        elif pointer.name == "status":
            memory["status"] = Memory(np.zeros(16, np.uint32), num_bytes)
        elif pointer.name == "out":
            memory["out"] = Memory(np.zeros(num, OUT_DTYPES[card.out]), num_bytes)
        else:
            source = memory[pointer.name.removesuffix("_out") + "_in"]
            fresh = Memory(np.zeros_like(source.values), num_bytes)
            memory[pointer.name] = source if in_place else fresh
    values = card.scalar_values(
        num_elements=num, num_selected=selected, rounding_key=chunk.key,
        rounding_first=chunk.first, scalars=chunk.scalars,
    )  # fmt: skip
    before = {name: m.guarded.copy() for name, m in memory.items()}
    function(*(memory[pointer.name].address for pointer in card.pointers), *values)
    for pointer in card.pointers:
        memory[pointer.name].check(written=pointer.is_output)
        if not pointer.is_output and not (in_place and pointer.name.endswith("_in")):
            assert (before[pointer.name] == memory[pointer.name].guarded).all()
    states = {name: memory[f"{name}_out"].values for name in chunk.states}
    return states, memory["out"].values, card.read_status(memory["status"].values)


def assert_same_bits(found, expected, what=""):
    assert found.dtype == expected.dtype
    bits = f"u{found.dtype.itemsize}"
    np.testing.assert_array_equal(found.view(bits), expected.view(bits), what)


def compare(card, kernel, function, chunk, *, in_place=True):
    expected, expected_out, finite = run_host(card, kernel, chunk)
    states, out, status = run_card(card, function, chunk, in_place=in_place)
    assert status.is_finite == finite
    assert status.has_valid_indices
    for name in card.extents:
        assert_same_bits(states[name], expected[name], f"{card.name}: {name}")
    assert_same_bits(out, expected_out, f"{card.name}: out")
    read = tuple(crc32c(chunk.states[name]) for name in card.extents)
    assert status.checksums_read == read
    assert status.checksums_written == tuple(crc32c(states[n]) for n in card.extents)


def variant(kernel, gradient="f32", out="update", state="f32", compressed=False):
    forms = {"out_dtype": OUT_DTYPES[out], "codec": CODECS[state]}
    return card_kernel(
        kernel, gradient_dtype=DTYPES[gradient], is_sparse=compressed, **forms
    )


def functions(*cards):
    library = ctypes.CDLL(str(card_library(*cards)))
    for card in cards:
        function = getattr(library, card.name)
        pointers, scalars = len(card.pointers), len(card.scalars)
        function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int32] * scalars
        yield card, function


@pytest.fixture(name="dense", scope="module")
def dense_fixture():
    card = variant(KERNELS["adamw"], "bf16", "bf16", "f32")
    return card, KERNELS["adamw"], card_function(card)


@pytest.fixture(name="compressed", scope="module")
def compressed_fixture():
    card = variant(KERNELS["adamw"], "f32", "update", "int8", compressed=True)
    return card, KERNELS["adamw"], card_function(card)


# ---- the host's bits


@pytest.mark.parametrize("num", family([*SIZES, (1 << 20) + 1], short=SIZES))
def test_sizes(dense, compressed, num):
    for card, kernel, function in (dense, compressed):
        compare(card, kernel, function, make_chunk(card, kernel, num))


@pytest.mark.parametrize("ratio", [0.0, 0.001, 0.3, 1.0])
def test_ratios_of_compression(compressed, ratio):
    card, kernel, function = compressed
    for num in (1, 16, 257, 5000):
        chunk = make_chunk(card, kernel, num, ratio=ratio)
        compare(card, kernel, function, chunk)


def test_states_may_be_read_and_written_elsewhere(dense, compressed):
    for card, kernel, function in (dense, compressed):
        chunk = make_chunk(card, kernel, 5000)
        compare(card, kernel, function, chunk, in_place=False)


@pytest.mark.hls
@pytest.mark.parametrize("body", AXES[0])
@pytest.mark.parametrize("out", RESULTS)
def test_variants(body, out):
    kernel = KERNELS[body]
    chosen = [row for row in VARIANTS if (row[0], row[2]) == (body, out)]
    cards = [variant(kernel, g, out, s, c) for _, g, _, s, c in chosen]
    for card, function in functions(*cards):
        for num in SIZES:
            chunk = make_chunk(card, kernel, num)
            compare(card, kernel, function, chunk)


@pytest.mark.hls
@pytest.mark.parametrize("body", OTHER_BODIES)
def test_other_bodies(body):
    kernel = KERNELS[body]
    cards = [variant(kernel), variant(kernel, "f16", "f16", "bf16", True)]
    for card, function in functions(*cards):
        for num in SIZES:
            chunk = make_chunk(card, kernel, num)
            compare(card, kernel, function, chunk)


# ---- 1 / sqrt(x): from the host's table of estimates


@pytest.mark.parametrize("body", ["adagrad", "rmsprop"])
def test_roots_of_special_values(body):
    """Without a gradient, the root's argument is the slot itself."""
    kernel = KERNELS[body]
    card = variant(kernel)
    words = [
        sign | magnitude
        for magnitude in (
            0, 1, 0x7FFFFF, 0x800000, 0x3F7FFFFF, 0x3F800000, 0x40000000, 0x407FFFFF,
            0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00005, 0x7FFFFFFF,
        )
        for sign in (0, 1 << 31)
    ]  # fmt: skip
    chunk = make_chunk(card, kernel, len(words))
    (slot,) = card.slots
    chunk.states[slot] = np.array(words, np.uint32).view(np.float32)
    for gradient in (0, 1):
        chunk.gradient = np.full(len(words), gradient, np.float32)
        compare(card, kernel, card_function(card), chunk)


def test_without_estimates_there_are_two_roundings():
    """On processors other than x86-64, the host's bits are NumPy's."""
    kernel = KERNELS["adagrad"]
    card = variant(kernel)
    chunk = make_chunk(card, kernel, 5000)
    table = np.zeros_like(rsqrt_estimates())
    states, out, _ = run_card(card, card_function(card), chunk, table=table)
    threshold, eps, otherwise, rate = np.array(card.constants, np.uint32).view("f4")
    sums = states["sum_of_squares"]
    root = np.where(sums > threshold, 1 / np.sqrt(sums + eps), otherwise)
    expected = flushed(flushed(root * flushed(chunk.gradient)) * rate)
    assert_same_bits(out, expected)


def flushed(values):
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), values), values)


@pytest.mark.parametrize(
    "indices", [[3, 2, 4999], [20, 3, 40], [3, 5000, 6000], [-1, 3], [0, 1 << 30]]
)
def test_positions_that_are_not_valid(compressed, indices):
    card, kernel, function = compressed
    chunk = make_chunk(card, kernel, 5000)
    chunk.indices = np.array(indices, np.int32)
    chunk.gradient = np.ones(len(indices), np.float32)
    _, _, status = run_card(card, function, chunk)
    assert status.is_finite
    assert not status.has_valid_indices
