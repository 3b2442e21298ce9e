"""A kernel's work beside the update equals that of separate passes."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from jaxinf.kernels import Passage, compiled
from jaxinf.kernels.calls import stored_arrays
from jaxinf.layout import CodedSlot
from jaxinf.program import trace_update
from jaxinf.transfer import crc32c

pytestmark = pytest.mark.optimized

SIZES = [0, 1, 3, 255, 257, 511, 512, 513, 5000, 65_537, (1 << 18) + 5]
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-2),
    "three slots": optax.rmsprop(0.1, centered=True, momentum=0.9),
    "frozen": optax.set_to_zero(),
}
CODECS = ["", "bf16", "int8"]


def kernel_of(name):
    params = [jnp.zeros(8), jnp.zeros(9)]
    return trace_update(OPTIMIZERS[name], params).leaves[0].kernel


def coded(values, codec):
    if codec == "":
        return values
    if codec == "bf16":
        return CodedSlot(values.astype(ml_dtypes.bfloat16), None, 3, 256)
    scales = np.zeros(-(-values.size // 256), np.float32)
    slot = CodedSlot(np.zeros(values.size, np.uint8), scales, 3, 256)
    slot.encode(values)
    return slot


def chunk(kernel, num, codec="", dtype=np.float32):
    rng = np.random.default_rng(num)
    values = [np.abs(rng.standard_normal(num, np.float32)) for _ in kernel.slots]
    return {
        "gradient": rng.standard_normal(num, np.float32).astype(dtype),
        "params": rng.standard_normal(num, np.float32),
        "slots": [coded(v, codec) for v in values],
        "scalars": [np.float32(0.1) for _ in kernel.scalar_dtypes],
        "out": np.full(num, 7, dtype),
    }


def stored(arguments):
    return stored_arrays(arguments["params"], arguments["slots"])


def sums(arguments):
    return tuple(crc32c(array) for array in stored(arguments))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_checksums_of_what_came_and_of_what_is_left(name, codec):
    kernel = kernel_of(name)
    run = compiled(kernel).run
    for num in SIZES:
        arguments = chunk(kernel, num, codec)
        every = [True] * len(stored(arguments))
        passage, before = Passage(reads=every, writes=every), sums(arguments)
        run(passage=passage, **arguments)
        assert passage.read == before
        assert passage.written == sums(arguments)


def test_only_the_checksums_that_are_wanted():
    kernel = kernel_of("adamw")
    run = compiled(kernel).run
    run(passage=(none := Passage()), **chunk(kernel, 700))
    assert not any(none.read + none.written)
    arguments = chunk(kernel, 700)
    before = sums(arguments)
    passage = Passage(reads=[False, True, False], writes=[True, False, True])
    run(passage=passage, **arguments)
    after = sums(arguments)
    assert passage.read == (0, before[1], 0)
    assert passage.written == (after[0], 0, after[2])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("num", "offset"),  # in elements, of the result's memory from a cache line
    [(1, 0), (513, 0), (5000, 0), ((1 << 18) + 5, 0), (1 << 18, 1), (1 << 18, 4)],
)
def test_given_params_stand_for_those_in_the_buffer(name, num, offset):
    kernel = kernel_of(name)
    run = compiled(kernel).run
    plain, given = chunk(kernel, num), chunk(kernel, num)
    run(passage=Passage(), **plain)
    # The caller's params are also where the new ones go.
    memory = np.zeros(num + 32, np.float32)
    first = -(memory.ctypes.data // 4) % 16 + offset
    device = memory[first : first + num]
    device[...] = given["params"]
    given["params"][...] = np.nan
    given["out"] = device
    run(passage=Passage(given=device, wants_params=True), **given)
    for left, right in zip(stored(given), stored(plain), strict=True):
        np.testing.assert_array_equal(left, right)
    np.testing.assert_array_equal(device, plain["params"])
    assert not memory[:first].any()
    assert not memory[first + num :].any()


def test_sixteen_bit_results_are_the_new_params_anyway():
    kernel = kernel_of("adamw")
    run = compiled(kernel).run
    left, right = (chunk(kernel, 900, dtype=ml_dtypes.bfloat16) for _ in range(2))
    run(passage=Passage(wants_params=True), **left)
    run(passage=Passage(), **right)
    np.testing.assert_array_equal(left["out"], right["out"])
    np.testing.assert_array_equal(
        left["out"], left["params"].astype(ml_dtypes.bfloat16)
    )
