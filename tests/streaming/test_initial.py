"""The first params: the bits of jitted init, in memory of a given size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinf.errors import StreamError
from jaxinf.streaming.program.initial import trace_params
from jaxinf.streaming.program.threefry import can_fuse, fused_bits

pytestmark = pytest.mark.optimized


@pytest.mark.parametrize("shape", [(), (1,), (5, 7), (2, 3, 4), (1025,)])
def test_fused_bits_are_those_of_jax(shape):
    key = jax.random.fold_in(jax.random.key(3), 7)
    for width, dtype in ((8, "uint8"), (16, "uint16"), (32, "uint32")):
        assert can_fuse(jax.typeof(key), width, shape)
        found = jax.jit(fused_bits, static_argnums=(1, 2))(key, shape, width)
        np.testing.assert_array_equal(found, jax.random.bits(key, shape, dtype))


def test_a_block_of_bits_has_those_of_the_whole():
    keys = jax.random.split(jax.random.key(3), 2)
    whole = jax.vmap(lambda key: jax.random.bits(key, (5, 7)))(keys)

    @jax.jit
    def block(keys, start):
        return fused_bits(keys, (5, 7), axis=1, start=start, length=3)

    np.testing.assert_array_equal(block(keys, np.int32(2)), whole[:, :, 2:5])


def test_other_bits_are_not_fused(monkeypatch):
    assert not can_fuse(jax.typeof(jax.random.key(0, impl="rbg")), 32, (3,))
    key = jax.typeof(jax.random.key(0))
    assert not can_fuse(key, 64, (3,))
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
    maker = trace_params(lambda key: scaled(key), key)
    np.testing.assert_array_equal(made(maker, 1 << 20)[0], scaled(key)["w"])


def made(maker, memory_bytes, length=1):
    """Leaves, each made in parts that are multiples of so many rows."""
    found = []
    lengths = [length for _ in maker.outputs]
    leaves = maker.compile(memory_bytes, lengths)
    for parts, value in zip(leaves, maker.outputs, strict=True):
        leaf = np.zeros(value.shape, value.dtype)
        for index, part in parts:
            assert part.nbytes <= memory_bytes
            assert not index or not (index[0].start or 0) % length
            leaf[index] = part
        found.append(leaf)
    return found


@pytest.mark.long
def test_leaves_need_no_memory_beside_themselves():
    """Drawn as JAX does, a leaf takes four times its own size."""
    key = jax.random.key(1)
    expected = jax.jit(init)(key)
    maker = trace_params(init, key)
    leaf_bytes = expected["normal"].nbytes
    for memory_bytes in (1 << 30, leaf_bytes + 4096):
        leaves = made(maker, memory_bytes)
        for found, wanted in zip(leaves, jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(found, wanted)
    with pytest.raises(StreamError, match=r"leaf normal takes 12\d{4} bytes"):
        maker.compile(leaf_bytes - 1, [501] * 4)


@pytest.mark.long
def test_a_leaf_that_does_not_fit_is_made_in_blocks_of_rows():
    """The bits are those of the whole, also of stacks and of 16 bits."""

    def init(key):
        stack, turned = jax.random.split(key)
        return {
            "stack": jax.vmap(
                lambda key: jax.random.normal(key, (16, 256), jnp.bfloat16) / 3
            )(jax.random.split(stack, 6)),
            "turned": jax.random.truncated_normal(turned, -2, 2, (48, 640)).T
            * jnp.linspace(0, 1, 48),
        }

    key = jax.random.key(1)
    maker, expected = trace_params(init, key), jax.jit(init)(key)
    leaves = made(maker, 40 << 10, 3)
    for found, wanted in zip(leaves, jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(found, wanted)
    with pytest.raises(StreamError, match="leaf stack takes"):
        maker.compile(1 << 10, [6, 640])
