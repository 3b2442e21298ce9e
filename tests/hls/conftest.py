"""One chunk through the host's kernel and through a card's, in memory with guards."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinf.kernels import compiled
from jaxinf.kernels.card import CardKernel, card_kernel
from jaxinf.kernels.estimates import rsqrt_estimates
from jaxinf.layout import CODE_BLOCK, CodedSlot
from jaxinf.transfer import crc32c

DTYPES = {
    "f32": np.dtype(np.float32),
    "bf16": jnp.bfloat16.dtype,
    "f16": np.dtype(np.float16),
}
OUT_DTYPES = {**DTYPES, "update": DTYPES["f32"], "params": DTYPES["f32"]}
CODECS = {"f32": "", "bf16": "bf16", "int8": "int8"}
GUARD = 0xA5


class Memory:
    """64-byte aligned, with garbage in the padding and a guard behind it."""

    def __init__(self, values: np.ndarray, num_bytes: int, *, garbage: int = 0xFF):
        raw = np.full(num_bytes + 128, GUARD, np.uint8)
        start = -raw.ctypes.data % 64
        self.guarded = raw[start:]
        self.padded = self.guarded[:num_bytes]
        self.values = self.padded[: values.nbytes].view(values.dtype)
        self.padded[...] = garbage
        self.values[...] = values

    @property
    def address(self) -> int:
        return self.guarded.ctypes.data

    def check(self, *, written: bool):
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
    """Draws many magnitudes, with zeros, denormals and -0."""
    values = rng.standard_normal(num) * np.exp(rng.uniform(-12, 3, num))
    special = rng.choice(np.float32([0, -0.0, 1e-40, -1e-38, 2e-38, 1e4, 1]), num)
    return np.where(rng.random(num) < 0.1, special, values).astype(np.float32)


def make_chunk(card: CardKernel, kernel, num: int, seed: int = 0, ratio=0.1) -> Chunk:
    rng = np.random.default_rng([num, seed])
    gradient = floats(rng, num).astype(DTYPES[card.gradient])
    indices = None
    if card.compressed:
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


def run_host(card: CardKernel, kernel, chunk: Chunk):
    """Returns new states, result, and whether the gradient was finite."""
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
    if card.out == "params":
        out = states["params"].copy()
    return states, out, finite


def run_card(card: CardKernel, function, chunk: Chunk, *, in_place=True, table=None):
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


def compare(card: CardKernel, kernel, function, chunk: Chunk, *, in_place=True):
    """Checks that card and host give the same bits and checksums."""
    expected, expected_out, finite = run_host(card, kernel, chunk)
    states, out, status = run_card(card, function, chunk, in_place=in_place)
    assert status.finite == finite
    assert status.indices_valid
    for name in card.extents:
        assert_same_bits(states[name], expected[name], f"{card.name}: {name}")
    assert_same_bits(out, expected_out, f"{card.name}: out")
    read = tuple(crc32c(chunk.states[name]) for name in card.extents)
    assert status.checksums_read == read
    assert status.checksums_written == tuple(crc32c(states[n]) for n in card.extents)


def variant(kernel, gradient="f32", out="update", state="f32", compressed=False):
    return card_kernel(kernel, DTYPES[gradient], out, CODECS[state], compressed)


@dataclass
class Tools:
    """The shared tools of this folder's tests."""

    compare = staticmethod(compare)
    floats = staticmethod(floats)
    make_chunk = staticmethod(make_chunk)
    run_card = staticmethod(run_card)
    run_host = staticmethod(run_host)
    same_bits = staticmethod(assert_same_bits)
    variant = staticmethod(variant)


@pytest.fixture(name="tools", scope="session")
def tools_fixture():
    return Tools
