"""Kernels as JAX functions: the bits of the compiled kernels."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import family

from jaxinf.kernels import compiled
from jaxinf.kernels.compiled import standard_kernels
from jaxinf.layout.codecs import encode_split
from jaxinf.program import is_computable, join_params, kernel_function, split_params
from jaxinf.typing import BFLOAT16

pytestmark = pytest.mark.optimized

# A scalar that XLA is given ranks otherwise than one that it computes, so that with two
# products another one is fused.
OTHERWISE = {"rmsprop_momentum_schedule"}
KERNELS = {
    name: kernel
    for name, kernel in standard_kernels().items()
    if is_computable(kernel) and name not in OTHERWISE
}
QUICK = (
    *("adagrad_schedule", "adam_schedule", "adamw_clipped_schedule", "adamw_nesterov"),
    *("lion_schedule", "rmsprop_momentum", "rmsprop_schedule", "sgd_momentum_schedule"),
    *("sgd", "sgd_nesterov_schedule"),
)
SPECIAL = [0.0, -0.0, 1e-40, np.inf, -np.inf, np.nan, 1 + 2**-8, 1 + 3 * 2**-8, 3e38]


def arguments(kernel, num, seed):
    rng = np.random.default_rng(seed)
    normal = partial(rng.standard_normal, num, np.float32)
    return {
        "gradient": normal(),
        "params": normal(),
        "slots": [np.abs(normal()).astype(d) for d in kernel.slot_dtypes],
        "scalars": [np.array(0.05 + rng.random(), d) for d in kernel.scalar_dtypes],
    }


@pytest.mark.parametrize("name", family(KERNELS, short=QUICK))
def test_a_function_has_the_bits_of_the_compiled_kernel(name):
    kernel = KERNELS[name]
    compute, add = jax.jit(partial(kernel_function, kernel)), jax.jit(jnp.add)
    for num in (1023, 4099):
        given = arguments(kernel, num, seed=num)
        update, slots, _ = jax.block_until_ready(compute(**given))
        out = np.empty(num, np.float32)
        params = given["params"]
        if update is None:
            update = np.zeros(num, np.float32)
        else:
            params = add(params, update)
        given["params"] = given["params"].copy()
        given["slots"] = [slot.copy() for slot in given["slots"]]
        compiled(kernel).run(**given, out=out)
        found = [params, update, *slots]
        expected = [given["params"], out, *given["slots"]]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(
                np.asarray(one).view(np.uint8), other.view(np.uint8)
            )


def test_params_are_split_as_the_store_has_them():
    rng = np.random.default_rng(0)
    params = np.concatenate([
        np.array(SPECIAL, np.float32),
        rng.integers(0, 2**32, 5000, dtype=np.uint32).view(np.float32),
    ])  # fmt: skip
    codes, rest = np.empty(params.size, BFLOAT16), np.empty(params.size, np.int16)
    encode_split(params, codes, rest)
    found = [np.asarray(x) for x in jax.jit(split_params)(params)]
    np.testing.assert_array_equal(found[0].view(np.uint16), codes.view(np.uint16))
    np.testing.assert_array_equal(found[1], rest)
    back = np.asarray(jax.jit(join_params)(*found))
    number = ~np.isnan(params)
    bits = back.view(np.uint32)[number], params.view(np.uint32)[number]
    np.testing.assert_array_equal(*bits)
