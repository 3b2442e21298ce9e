"""Compiled kernels: origin, arguments, first state, work beside the update, cache."""

import os
import shutil
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxinf.errors import UnsupportedTransformError
from jaxinf.kernels import Checksums, compiled, initialise
from jaxinf.kernels.calls import stored_arrays
from jaxinf.kernels.compiled import compile_kernel, standard_kernels
from jaxinf.kernels.emitter import emit
from jaxinf.native import toolchain
from jaxinf.program import trace_init, trace_update

pytestmark = pytest.mark.optimized

BFLOAT16, FLOAT16 = jnp.bfloat16.dtype, np.dtype(np.float16)
COMPILER = toolchain.find_compiler()
COMPILERS = os.environ.get("JAXINF_TEST_COMPILERS", "").split()
LEVELS = toolchain.levels()


def kernel_of(tx, num_leaves=1):
    return trace_update(tx, [jnp.zeros(8)] * num_leaves).leaves[0].kernel


def chunk(kernel, num, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    arrays = [np.abs(rng.standard_normal(num, np.float32)) for _ in kernel.slots]
    return {
        "gradient": rng.standard_normal(num, np.float32).astype(dtype),
        "params": rng.standard_normal(num, np.float32),
        "slots": [a.astype(d) for a, d in zip(arrays, kernel.slot_dtypes, strict=True)],
        "scalars": [np.array(0.1).astype(d)[()] for d in kernel.scalar_dtypes],
        "out": np.full(num, 7, dtype),
    }


def outputs(arguments):
    return [arguments["params"], arguments["out"], *arguments["slots"]]


def assert_same_bits(found, expected):
    for left, right in zip(found, expected, strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left.view(np.uint8), right.view(np.uint8))


# ---- kernels in the package


def test_generated_sources_are_up_to_date():
    remedy = "run `python scripts/generate_kernels.py` and commit what it writes"
    kernels = standard_kernels().items()
    expected = {name: emit(kernel).text for name, kernel in kernels}
    found = {path.stem: path.read_text() for path in toolchain.GENERATED.glob("*.cpp")}
    assert found.keys() == expected.keys(), remedy
    for name, text in expected.items():
        same = toolchain.content_hash(found[name]) == toolchain.content_hash(text)
        assert same, f"{name}.cpp: {remedy}"


@pytest.mark.parametrize("num_leaves", [1, 3])
def test_the_package_brings_the_common_optimizers(num_leaves, monkeypatch):
    """If not: the sources have changed since the installation: install jaxinf again."""
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)
    for tx in (
        optax.adam(3e-4, b1=0.8, b2=0.95, eps=1e-6),
        optax.adam(optax.cosine_decay_schedule(0.1, 9), mu_dtype=jnp.bfloat16),
        optax.adamw(1.0, eps_root=1e-9, weight_decay=0.0, nesterov=True),
        optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-5, mask=None)),
        optax.sgd(0.3),
        optax.sgd(1.0),
        optax.sgd(0.3, momentum=0.5),
        optax.sgd(0.3, momentum=0.5, nesterov=True, accumulator_dtype=jnp.bfloat16),
        optax.adagrad(0.1),
        optax.lion(3e-4, b2=0.98, mu_dtype=jnp.bfloat16),
        optax.rmsprop(0.1),
        optax.rmsprop(0.1, centered=True, eps=1e-3),
        optax.rmsprop(0.1, momentum=0.3),
    ):
        kernel = kernel_of(tx, num_leaves)
        for level in LEVELS:
            compile_kernel(kernel, level=level)


# ---- arguments and results


@pytest.mark.parametrize("num", [0, 1, 7, 8, 9, 16, 17, 511, 512, 513, 1025, 9999])
def test_cut_anywhere_the_bits_are_the_same(num):
    kernel = kernel_of(optax.adamw(1e-2))
    run, whole, parts = compiled(kernel).run, chunk(kernel, 9999), chunk(kernel, 9999)
    assert run(**whole)
    for part in (slice(0, num), slice(num, None)):
        run(**{
            name: [a[part] for a in value] if name == "slots"
            else value if name == "scalars" else value[part]
            for name, value in parts.items()
        })  # fmt: skip
    assert_same_bits(outputs(parts), outputs(whole))


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_16_bit_gradients_and_outputs(dtype):
    kernel = kernel_of(optax.adamw(1e-2))
    narrow, wide = chunk(kernel, 4099, dtype=dtype), chunk(kernel, 4099)
    wide["gradient"] = narrow["gradient"].astype(np.float32)
    narrow["gradient"].flags.writeable = False
    assert compiled(kernel).run(**narrow)
    assert compiled(kernel).run(**wide)
    assert_same_bits([narrow["params"]], [wide["params"]])
    assert_same_bits(narrow["slots"], wide["slots"])
    assert_same_bits([narrow["out"]], [wide["params"].astype(dtype)])


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_rounding_to_16_bits_is_to_nearest_even(dtype):
    """Tests every 16-bit number, the midpoints between them, and neighbours of both."""
    kernel = kernel_of(optax.set_to_zero())
    with np.errstate(over="ignore", invalid="ignore"):
        exact = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
        words = exact.view(np.uint32)[:, None]
        half = 0x8000 if dtype == BFLOAT16 else 0x1000
        around = np.uint32([0, 1, half - 1, half, half + 1])
        params = (words + around).reshape(-1).view(np.float32)
        params = params[~np.isnan(params)]
        expected = params.astype(dtype)
    arguments = chunk(kernel, params.size, dtype=dtype) | {"params": params.copy()}
    compiled(kernel).run(**arguments)
    assert_same_bits([arguments["out"]], [expected])


def test_slots_that_trade_places():
    def update(updates, state, params=None):
        del params
        return state["a"], {"a": state["b"], "b": updates, "c": state["c"]}

    tx = optax.GradientTransformation(lambda p: dict.fromkeys("abc", p), update)
    kernel = kernel_of(tx)
    found, before = chunk(kernel, 1000), chunk(kernel, 1000)
    compiled(kernel).run(**found)
    slots, old = (
        dict(zip(kernel.slots, x["slots"], strict=True)) for x in (found, before)
    )
    pairs = [(found["out"], old["a"]), (slots["a"], old["b"]), (slots["c"], old["c"])]
    pairs += [(slots["b"], before["gradient"])]
    assert_same_bits(*zip(*pairs, strict=True))


def hard_numbers(rng, num):
    """Any bits; often sums that cancel, denormals, and the ends of the range."""
    words = rng.integers(0, 2**32, num, np.uint32)
    few = np.float32([0, -0.0, 1e-45, 1.1754942e-38, 1.1754944e-38, 1, -1, 3.4e38])
    picked = rng.choice(np.concatenate([few, -few, few * 0.5]), num)
    ordinary = rng.standard_normal(num).astype(np.float32)
    values = words.view(np.float32)
    values = np.where(np.isfinite(values), values, ordinary)
    return np.choose(rng.integers(0, 4, num), [values, picked, ordinary, ordinary])


def all_kernels():
    """The package's, and with other compilers some with further operations."""
    others = {
        "adabelief": optax.adabelief(1e-2),
        "amsgrad": optax.amsgrad(1e-2),
        "clip": optax.chain(optax.clip(0.5), optax.adam(1e-2, mu_dtype=BFLOAT16)),
        "rprop": optax.rprop(1e-2),
        "yogi": optax.yogi(1e-2),
    }
    own = {name: kernel_of(tx) for name, tx in others.items() if COMPILERS}
    return {**standard_kernels(), **own}


@pytest.mark.skipif(
    len(LEVELS) < 2 and not COMPILERS, reason="this machine has one level"
)
@pytest.mark.parametrize("name", all_kernels())
def test_levels_give_the_same_bits(name):
    """Of the package's kernels, or by each compiler in JAXINF_TEST_COMPILERS."""
    kernel, paths = all_kernels()[name], [shutil.which(one) for one in COMPILERS]
    assert None not in paths, f"not all of {COMPILERS} are there"
    for dtype in (np.float32, BFLOAT16, FLOAT16):
        results = []
        for level, path in product(LEVELS, paths or [None]):
            arguments, rng = chunk(kernel, 4001), np.random.default_rng(3)
            with np.errstate(over="ignore"):
                arguments["gradient"] = hard_numbers(rng, 4001).astype(dtype)
            arguments["out"] = np.zeros(4001, dtype)
            for array in (arguments["params"], *arguments["slots"]):
                array[:2000] = hard_numbers(rng, 2000).astype(array.dtype)
            compile_kernel(kernel, level=level, compiler=path).run(**arguments)
            results.append(outputs(arguments))
        for other in results[1:]:
            assert_same_bits_or_nan(results[0], other)


def assert_same_bits_or_nan(found, expected):
    """A NaN's sign and payload are not promised."""
    for left, right in zip(found, expected, strict=True):
        words = [x.view(f"u{x.itemsize}") for x in (left, right)]
        nan = [np.isnan(x.astype(np.float32)) for x in (left, right)]
        np.testing.assert_array_equal(*nan)
        np.testing.assert_array_equal(*(w[~n] for w, n in zip(words, nan, strict=True)))


# ---- denormals, the first state, params of the caller


def test_denormals_are_flushed():
    """`test_bits.py` has them in every kernel; and flushing ends with the call."""
    shrink = trace_update(optax.scale(0.5), jnp.zeros(8)).leaves[0].kernel
    tiny, out = np.float32(1e-40), np.zeros(5, np.float32)
    gradient = np.array([1.5e-38, -1.5e-38, 4e-38, 0, np.nan], np.float32)
    params = np.array([0, tiny, -4e-38, tiny, 1], np.float32)
    compiled(shrink).run(gradient=gradient, params=params, out=out)
    np.testing.assert_array_equal(out, np.float32([0, 0, 2e-38, 0, np.nan]))
    np.testing.assert_array_equal(params, np.float32([0, 0, -2e-38, 0, np.nan]))
    assert np.float32(1e-30) * np.float32(1e-10) > 0


def test_initial_state_is_elementwise_in_the_params():
    def init(params):
        return {
            "half": jax.tree.map(lambda p: (0.5 * p).astype(jnp.bfloat16), params),
            "index": jax.tree.map(
                lambda p: jnp.arange(p.size, dtype=p.dtype).reshape(p.shape), params
            ),
            "count": jnp.int32(3),
            "key": jax.random.key(1),
        }

    tx = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
    params = {"w": jnp.ones((2, 3), jnp.bfloat16)}
    program = trace_init(tx, params)
    scalar_state, (inputs,) = jax.jit(program.prologue)(jax.tree.leaves(params))
    kernel = program.leaves[0].kernel
    half, index = np.empty(6, BFLOAT16), np.empty(6, np.float32)
    initialise(
        kernel,
        params=np.full(6, 3, np.float32), slots=[half, index],
        scalars=inputs.scalars, arrays=[np.ravel(a) for a in inputs.arrays],
    )  # fmt: skip

    assert (half == 1.5).all()
    np.testing.assert_array_equal(index, np.arange(6))
    assert any("params" in line for line in kernel.describe())
    assert [str(x.dtype) for x in scalar_state] == ["int32", "key<fry>"]
    assert program.layout.scalar_paths == ("['count']", "['key']")


def test_a_first_state_of_literals_and_params_needs_no_kernel(monkeypatch):
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)

    def init(params):
        return {"copy": params, "zero": jnp.zeros_like(params, jnp.bfloat16)}

    tx = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
    kernel = trace_init(tx, jnp.zeros(6)).leaves[0].kernel
    params = np.arange(6, dtype=np.float32)
    slots = copy, zero = [np.full(6, 7, dtype) for dtype in kernel.slot_dtypes]
    initialise(kernel, params=params, slots=slots)
    np.testing.assert_array_equal(copy, params)
    assert not zero.any()


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-2),
    "three slots": optax.rmsprop(0.1, centered=True, momentum=0.9),
    "frozen": optax.set_to_zero(),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("num", "offset"),  # in elements, of the result's memory from a cache line
    [(1, 0), (513, 0), (5000, 0), ((1 << 18) + 5, 0), (1 << 18, 1), (1 << 18, 4)],
)
def test_given_params_stand_for_those_in_the_buffer(name, num, offset):
    kernel = kernel_of(OPTIMIZERS[name], num_leaves=2)
    run = compiled(kernel).run
    plain, given = chunk(kernel, num), chunk(kernel, num)
    run(checksums=Checksums(), **plain)
    # The caller's params are also where the update goes.
    memory = np.zeros(num + 32, np.float32)
    first = -(memory.ctypes.data // 4) % 16 + offset
    device = memory[first : first + num]
    device[...] = given["params"]
    given["params"][...] = np.nan
    given["out"] = device
    run(caller_params=device, **given)
    assert_same_bits(
        *(stored_arrays([x["params"], *x["slots"]]) for x in (given, plain))
    )
    np.testing.assert_array_equal(device, plain["out"])
    assert not memory[:first].any()
    assert not memory[first + num :].any()


# ---- the cache


def test_a_kernel_is_compiled_once(tmp_path, monkeypatch):
    log, script = tmp_path / "runs", tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\necho run >> {log}\nexec {COMPILER} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("JAXINF_CACHE_DIR", str(tmp_path / "cache"))

    def make(factor):
        kernel = kernel_of(optax.chain(optax.clip(factor), optax.scale(-0.1)))
        return kernel, compile_kernel(kernel, level=LEVELS[0], compiler=str(script))

    for factor in (3.0, 3.0, 4.0):  # a literal is an argument
        kernel, found = make(factor)
        assert log.read_text().split() == ["run"]
    (library,) = (tmp_path / "cache" / "kernels").iterdir()
    assert library.suffix == ".so"
    arguments = chunk(kernel, 1000)
    found.run(**arguments)
    expected = np.float32(-0.1) * np.clip(arguments["gradient"], -4, 4)
    assert_same_bits([arguments["out"]], [expected])


def test_kernels_of_narrow_integers_are_refused():
    """Integers of 8 bits have no lanes."""

    def update(updates, state, params=None):
        del params
        return [u.astype(jnp.int8).astype(jnp.float32) for u in updates], state

    kernel = kernel_of(optax.GradientTransformation(lambda _: (), update))
    with pytest.raises(UnsupportedTransformError, match="found values of int8"):
        compiled(kernel)
