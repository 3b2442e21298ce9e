"""The first params: the bits of jitted init, in memory of a given size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinf.errors import StreamError
from jaxinf.streaming.program.initial import trace_params
from jaxinf.streaming.program.threefry import can_fuse, fused_bits


@pytest.mark.parametrize("shape", [(), (1,), (5, 7), (2, 3, 4), (1025,)])
def test_fused_bits_are_those_of_jax(shape):
    key = jax.random.fold_in(jax.random.key(3), 7)
    assert can_fuse(jax.typeof(key), 32, shape)
    expected = jax.random.bits(key, shape)
    np.testing.assert_array_equal(
        jax.jit(fused_bits, static_argnums=1)(key, shape), expected
    )


def test_other_bits_are_not_fused(monkeypatch):
    assert not can_fuse(jax.typeof(jax.random.key(0, impl="rbg")), 32, (3,))
    key = jax.typeof(jax.random.key(0))
    assert not can_fuse(key, 16, (3,))
    assert not can_fuse(key, 32, (1 << 16, 1 << 16))
    with jax.threefry_partitionable(False):
        assert not can_fuse(key, 32, (3,))


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
    (found,) = trace_params(lambda key: scaled(key), key).compile(1 << 20)
    np.testing.assert_array_equal(found, scaled(key)["w"])


@pytest.mark.long
def test_leaves_need_no_memory_beside_themselves():
    """Drawn as JAX does, a leaf takes four times its own size."""
    key = jax.random.key(1)
    expected = jax.jit(init)(key)
    maker = trace_params(init, key)
    leaf_bytes = expected["normal"].nbytes
    for memory_bytes in (1 << 30, leaf_bytes + 4096):
        made = list(maker.compile(memory_bytes))
        for found, wanted in zip(made, jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(found, wanted)
    with pytest.raises(StreamError, match=r"leaf normal takes 12\d{4} bytes"):
        maker.compile(leaf_bytes - 1)
