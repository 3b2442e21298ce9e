"""Every compiler gives the same bits, at every level; ``make test-compilers`` runs it.

That installs the compilers and names them in JAXINF_TEST_COMPILERS; one that is missing
all the same fails. (The default run compares levels, with the package's kernels.)
"""

import os
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxinf.kernels.compiled import compile_kernel, standard_kernels
from jaxinf.native import toolchain
from jaxinf.program import trace_update

COMPILERS = os.environ.get("JAXINF_TEST_COMPILERS", "").split()
LEVELS = toolchain.levels()
NUM = 10007

pytestmark = pytest.mark.skipif(
    not COMPILERS, reason="JAXINF_TEST_COMPILERS is not set; use make test-compilers"
)


def kernels():
    """Returns the package's kernels, and some with further operations."""
    others = {
        "adabelief": optax.adabelief(1e-2),
        "amsgrad": optax.amsgrad(1e-2),
        "clip": optax.chain(optax.clip(0.5), optax.adam(1e-2, mu_dtype=jnp.bfloat16)),
        "rprop": optax.rprop(1e-2),
        "yogi": optax.yogi(1e-2),
    }
    traced = {
        name: trace_update(tx, jnp.zeros(8)).leaves[0].kernel
        for name, tx in others.items()
    }
    chosen = "adagrad adamw_clipped adamw_one_leaf lion rmsprop_momentum sgd_nesterov"
    return {name: standard_kernels()[name] for name in chosen.split()} | traced


def numbers(rng, scale=1.0):
    values = rng.standard_normal(NUM) * np.exp(rng.uniform(-12, 3, NUM)) * scale
    special = rng.choice(np.float32([0, -0.0, 1e-40, -1e-38, 2e-38, 1e15]), NUM)
    return np.where(rng.random(NUM) < 0.2, special, values).astype(np.float32)


def run(kernel, compiler, level):
    found = compile_kernel(kernel, level=level, compiler=compiler)
    rng = np.random.default_rng(2)
    gradient, params, out = (numbers(rng) for _ in range(3))
    slots = [np.abs(numbers(rng)).astype(dtype) for dtype in kernel.slot_dtypes]
    scalars = [np.array(0.1).astype(dtype)[()] for dtype in kernel.scalar_dtypes]
    results = []
    for dtype in (np.float32, jnp.bfloat16.dtype, np.float16):
        with np.errstate(over="ignore"):
            narrow = gradient.astype(dtype)
            out = out.astype(dtype)
        finite = found.run(
            gradient=narrow, params=params, slots=slots, out=out,
            scalars=scalars
        )  # fmt: skip
        results += [np.array([finite]), params.copy(), out.copy()]
        results += [slot.copy() for slot in slots]
    return [result.view(np.uint8) for result in results]


@pytest.mark.parametrize("name", kernels())
def test_compilers_and_levels_give_the_same_bits(name):
    kernel, expected = kernels()[name], None
    for compiler in COMPILERS:
        path = shutil.which(compiler)
        assert path, f"{compiler} is required by JAXINF_TEST_COMPILERS, and not found"
        for level in LEVELS:
            found = run(kernel, path, level)
            expected = expected or found
            for left, right in zip(found, expected, strict=True):
                np.testing.assert_array_equal(left, right, f"{compiler} {level}")
