"""Every operation in NumPy against the JAX primitive of its name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jaxinf.compat import ELEMENTWISE
from jaxinf.kernels import evaluate
from jaxinf.kernels.operations import OPERATIONS
from jaxinf.program import trace_update

EXACT = {
    "abs": lax.abs,
    "add": lambda x: lax.add(x, x + 1),
    "and": lambda x: (x > 0) & (x < 1),
    "ceil": lax.ceil,
    "clamp": lambda x: lax.clamp(-0.5, x, jnp.float32(0.5)),
    "convert_element_type": lambda x: (x * 1e10).astype(jnp.int32),
    "div": lambda x: lax.div(x, x + 2),
    "eq": lambda x: x == jnp.round(x),
    "floor": lax.floor,
    "ge": lambda x: x >= 1,
    "gt": lambda x: x > 1,
    "is_finite": lambda x: lax.is_finite(x / 0),
    "le": lambda x: x <= 1,
    "lt": lambda x: x < 1,
    "max": lambda x: lax.max(x, -x),
    "min": lambda x: lax.min(x, -x),
    "mul": lambda x: lax.mul(x, x + 1),
    "ne": lambda x: x != jnp.round(x),
    "neg": lax.neg,
    "nextafter": lambda x: lax.nextafter(jnp.abs(x) + 1, 0 * x),
    "not": lambda x: ~(x > 0),
    "or": lambda x: (x > 1) | (x < 0),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 7),
    "rem": lambda x: lax.rem(10 * x, x + 5),
    "round": lambda x: lax.round(8 * x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "select_n": lambda x: jnp.where(x > 0, x, 2 * x),
    "sign": lax.sign,
    "sqrt": lambda x: lax.sqrt(jnp.abs(x)),
    "square": lax.square,
    "sub": lambda x: lax.sub(x, x * 2),
    "xor": lambda x: (x > 1) ^ (x < 2),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
}
ROUNDED = {
    "cbrt": lax.cbrt,
    "cos": lax.cos,
    "exp": lax.exp,
    "exp2": lax.exp2,
    "expm1": lax.expm1,
    "integer_pow": lambda x: lax.integer_pow(x, -5),
    "log": lambda x: lax.log(jnp.abs(x)),
    "log1p": lambda x: lax.log1p(jnp.abs(x)),
    "logistic": lax.logistic,
    "pow": lambda x: jnp.abs(x) ** 0.7,
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x)),
    "sin": lax.sin,
    "tanh": lax.tanh,
}
MORE = {
    "round": lambda x: lax.round(8 * x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "select_n": lambda x: lax.select_n(jnp.abs(x / 3).astype(jnp.int32), x, -x, x + 9),
    "div": lambda x: lax.div(
        (x * 99).astype(jnp.int32), jnp.full_like(x, 7, jnp.int32)
    ),
    "abs": lambda x: jax.nn.relu(x) + lax.optimization_barrier(x),
    "add": lambda x: lax.add(x.astype(jnp.bfloat16), jnp.bfloat16(0.3)),
    "mul": lambda x: lax.mul(x.astype(jnp.float16), jnp.float16(0.3)),
}
VALUES = np.concatenate(
    [
        np.random.default_rng(0).standard_normal(4000, np.float32) * 1.5,
        np.float32([0.0, -0.0, 0.5, -0.5, 1.5, 2.5, 1, -1, 1e-3, 8, -8]),
    ]
)


def compute(function):
    """Computes `function` as a kernel's update, and jitted operation by operation."""

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda g: function(g).astype(jnp.float32), updates), state

    tx = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    kernel = trace_update(tx, jnp.zeros(VALUES.shape)).leaves[0].kernel
    out = np.empty_like(VALUES)
    params = np.zeros_like(VALUES)
    evaluate(
        kernel, gradient=VALUES, params=params, slots=[], scalars=[], arrays=[], out=out
    )
    expected = np.asarray(jax.jit(update)(VALUES, optax.EmptyState())[0])
    return kernel, out, expected


@pytest.mark.parametrize("name", EXACT)
def test_exact_operations(name):
    kernel, found, expected = compute(EXACT[name])
    assert any(equation.op == name for equation in kernel.equations)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ROUNDED)
def test_transcendental_operations(name):
    """XLA and NumPy have their own approximations, to some units in the last place."""
    kernel, found, expected = compute(ROUNDED[name])
    assert any(equation.op == name for equation in kernel.equations)
    np.testing.assert_allclose(found, expected, 2e-6, 1e-6)


@pytest.mark.parametrize("name", MORE)
def test_other_forms(name):
    """Compares without jit: XLA omits a rounding to 16 bits that is widened again."""
    _, found, _ = compute(MORE[name])
    expected = MORE[name](jnp.asarray(VALUES)).astype(jnp.float32)
    np.testing.assert_array_equal(found, expected)


def test_every_operation_is_tested():
    assert {*EXACT, *ROUNDED} == ELEMENTWISE
    assert {*OPERATIONS, "reduce_precision"} == ELEMENTWISE


def test_erf_is_an_array_where_nothing_stored_goes_in():
    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda g: 2 * lax.erf(g), updates), state

    tx = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    kernel = trace_update(tx, jnp.zeros(5)).leaves[0].kernel
    assert kernel.num_arrays == 1
    assert not kernel.reads_gradient
