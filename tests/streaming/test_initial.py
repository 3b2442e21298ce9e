"""The first params: the bits of jitted init, in memory of a given size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinf.errors import BudgetError
from jaxinf.streaming.program.initial import trace_params

pytestmark = pytest.mark.optimized


def init(key):
    normal, uniform, clipped = jax.random.split(key, 3)
    return {
        "normal": 0.02 * jax.random.normal(normal, (501, 64)),
        "ones": jnp.ones(64),
        "truncated": jax.random.truncated_normal(clipped, -2, 2, (64, 501)) / 8,
        "uniform": jax.random.uniform(uniform, (501, 64), minval=-0.1, maxval=0.1),
    }


def test_a_function_that_it_calls_may_close_over_arrays():
    weights = np.arange(7, dtype=np.float32)
    scaled = jax.jit(lambda key: {"w": jax.random.normal(key, (7,)) * weights})
    key = jax.random.key(1)
    maker = trace_params(lambda key: scaled(key), key)
    np.testing.assert_array_equal(made(maker, 1 << 20)[0], scaled(key)["w"])


def made(maker, memory_bytes):
    return [*maker.compile(memory_bytes)]


@pytest.mark.long
def test_leaves_have_the_bits_of_jitted_init():
    key = jax.random.key(1)
    expected = jax.jit(init)(key)
    leaves = made(trace_params(init, key), 1 << 30)
    for found, wanted in zip(leaves, jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_leaf_has_room_and_leaves_some_to_the_buffers():
    """A draw takes memory beside its result; a constant leaves a quarter."""
    key, num_bytes = jax.random.key(1), 501 * 64 * 4
    with pytest.raises(BudgetError, match=r"leaf w takes \d+ bytes to make") as refused:
        trace_params(lambda key: {"w": jax.random.normal(key, (501, 64))}, key).compile(
            1
        )
    assert refused.value.missing_bytes > 3 * num_bytes
    ones = trace_params(lambda: {"w": jnp.ones((501, 64))})
    least = num_bytes + num_bytes // 3
    assert made(ones, least)[0].all()
    with pytest.raises(BudgetError, match=f"leaf w takes {least} bytes to make"):
        ones.compile(least - 1)
