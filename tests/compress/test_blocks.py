"""A leaf chunk by chunk: sent and remaining elements, and the same in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinf.compress import compress_leaf, dense_leaf, sparsify, top_k
from jaxinf.layout import LeafGrid, choose_grid

pytestmark = pytest.mark.optimized("long")

SHAPES = [
    ((), 4096),
    ((0, 4), 4096),
    ((5,), 4096),
    ((100, 300), 4096),
    ((70_001,), 8_192),
    ((3, 90_000), 12_288),
]


def leaf_of(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) ** 3


def expected_dense(leaf, grid, compression):
    """Computes the result by a sort in NumPy, chunk by chunk."""
    dense = np.zeros_like(leaf)
    for chunk in grid.chunks():
        block = leaf[chunk.slices].reshape(-1)
        k = compression.num_kept(block.size, leaf.dtype)
        kept = np.argsort(-np.abs(block), kind="stable")[:k]
        out = np.zeros_like(block)
        out[kept] = block[kept]
        dense[chunk.slices] = out.reshape(chunk.extent)
    return dense


@pytest.mark.long
@pytest.mark.parametrize(("shape", "chunk_elements"), SHAPES)
def test_largest_of_each_chunk(shape, chunk_elements):
    leaf = leaf_of(shape)
    grid = choose_grid(shape, max_chunk_elements=chunk_elements)
    compression = top_k(0.1)
    sent, left = jax.jit(lambda g: compress_leaf(g, grid, compression))(leaf)
    assert left is None
    assert sent.indices.dtype == np.int32
    assert sent.indices.size == sum(sent.counts)
    dense = dense_leaf(sent, leaf, grid)
    np.testing.assert_array_equal(dense, expected_dense(leaf, grid, compression))


@pytest.mark.parametrize(
    "values",
    [
        "bfloat16",
        pytest.param("float16", marks=pytest.mark.long),
        pytest.param(None, marks=pytest.mark.long),
    ],
)
def test_what_is_sent_and_what_is_left_add_up(values):
    leaf, held = leaf_of((300, 200)), leaf_of((300, 200), 1)
    leaf[7, 7] = 1e6  # beyond float16
    grid = LeafGrid((300, 200), (128, 200))
    compression = top_k(0.05, values=values, error_feedback=True)
    sent, left = jax.jit(lambda g, e: compress_leaf(g, grid, compression, e))(
        leaf, held
    )
    assert left is not None
    dense = np.asarray(dense_leaf(sent, leaf, grid), np.float32)
    assert np.isfinite(dense).all()
    np.testing.assert_array_equal(dense + left, leaf + held)
    assert np.count_nonzero(dense) == sum(sent.counts)
    if values is None:
        assert not (dense * left).any()


def test_sparsify_sends_everything_in_the_end_with_error_feedback():
    tx = sparsify(top_k(0.1, error_feedback=True, warmup_steps=1))
    gradient = {"w": jnp.asarray(leaf_of((100, 50)))}
    state = tx.init(gradient)
    update = jax.jit(tx.update)
    first, state = update(gradient, state)
    np.testing.assert_array_equal(first["w"], gradient["w"])
    assert not np.any(state.error_feedback["w"])
    total = np.zeros((100, 50), np.float32)
    num_steps = 60
    for _ in range(num_steps):
        sent, state = update(gradient, state)
        assert np.count_nonzero(sent["w"]) == 250
        total += sent["w"]
    assert int(state.step) == num_steps + 1
    np.testing.assert_allclose(
        total + state.error_feedback["w"], num_steps * gradient["w"], rtol=1e-4
    )
