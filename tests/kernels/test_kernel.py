"""Kernels on chunks: flushed denormals, the first state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxinf.kernels import compiled, initialise
from jaxinf.native import toolchain
from jaxinf.program import trace_init, trace_update

pytestmark = [
    pytest.mark.skipif(
        not toolchain.levels(), reason="the processor is neither x86-64 nor aarch64"
    ),
    pytest.mark.optimized,
]
BFLOAT16 = jnp.bfloat16.dtype
SCALARS = [np.float32(0.1), np.float32(0.001)]  # of adam: 1 - b1 ** t, 1 - b2 ** t


def test_denormals_are_flushed():
    tiny = np.float32(1e-40)
    adamw = trace_update(optax.adamw(1e-2), jnp.zeros(8)).leaves[0].kernel
    gradient = np.full(5, 1e-39, np.float32)
    params, mu, nu, out = (np.full(5, tiny) for _ in range(4))
    assert compiled(adamw).run(
        gradient=gradient, params=params, slots=[mu, nu], scalars=SCALARS, out=out
    )
    assert not mu.any()
    assert not nu.any()

    shrink = trace_update(optax.scale(0.5), jnp.zeros(8)).leaves[0].kernel
    gradient = np.array([1.5e-38, -1.5e-38, 4e-38, 0, np.nan], np.float32)
    params = np.array([0, tiny, -4e-38, tiny, 1], np.float32)
    compiled(shrink).run(gradient=gradient, params=params, out=out)
    np.testing.assert_array_equal(out, np.float32([0, 0, 2e-38, 0, np.nan]))
    np.testing.assert_array_equal(params, np.float32([0, 0, -2e-38, 0, np.nan]))


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
