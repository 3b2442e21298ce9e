"""Every operation of a kernel against the JAX primitive of its name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jaxinf.compat import ELEMENTWISE
from jaxinf.kernels import compiled
from jaxinf.program import trace_update

pytestmark = pytest.mark.optimized

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
}
VALUES = np.concatenate(
    [
        np.random.default_rng(0).standard_normal(4000, np.float32) * 1.5,
        np.float32([0.0, -0.0, 0.5, -0.5, 1.5, 2.5, 1, -1, 1e-3, 8, -8]),
    ]
)

# Of these a conversion to bfloat16 rounds nothing: kernels omit all roundings to 16
# bits that are widened again, and XLA some.
NARROW = VALUES.astype(jnp.bfloat16).astype(np.float32)


def compute(functions, values=VALUES):
    """Computes each function's result as a slot of one kernel, which is compiled."""
    names = sorted(functions)

    def results(gradient):
        return [functions[name](gradient).astype(jnp.float32) for name in names]

    def update(updates, state, params=None):
        del state, params
        return updates, results(updates)

    def init(params):
        return [jnp.zeros_like(params)] * len(names)

    tx = optax.GradientTransformation(init, update)
    kernel = trace_update(tx, jnp.zeros(values.shape)).leaves[0].kernel
    slots = [np.zeros_like(values) for _ in names]
    params, out = np.zeros_like(values), np.zeros_like(values)
    compiled(kernel).run(gradient=values, params=params, slots=slots, out=out)
    assert {equation.op for equation in kernel.equations} >= {*functions} & ELEMENTWISE
    return dict(zip(names, slots, strict=True))


@pytest.fixture(scope="module")
def exact():
    return compute(EXACT)


@pytest.fixture(scope="module")
def approximate():
    return compute(ROUNDED)


@pytest.mark.parametrize("name", EXACT)
def test_exact_operations(name, exact):
    expected = jax.jit(EXACT[name])(VALUES).astype(jnp.float32)
    np.testing.assert_array_equal(exact[name], expected)


@pytest.mark.parametrize("name", ROUNDED)
def test_transcendental_operations(name, approximate):
    """XLA and C++ have their own approximations, to some units in the last place."""
    expected = jax.jit(ROUNDED[name])(VALUES)
    np.testing.assert_allclose(approximate[name], expected, 2e-6, 1e-6)


def test_other_forms():
    found = compute(MORE, NARROW)
    for name, function in MORE.items():
        expected = jax.jit(lambda x, f=function: f(x).astype(jnp.float32))(NARROW)
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


def test_every_operation_is_tested():
    assert {*EXACT, *ROUNDED} == ELEMENTWISE
