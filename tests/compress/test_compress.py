"""Which elements are sent and which are left, a leaf chunk by chunk; valid options."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import family

import jaxinf
from jaxinf.compress import (
    compress_leaf,
    dense_leaf,
    parse_compression,
    sparsify,
    top_k,
)
from jaxinf.layout import LeafGrid, choose_grid

pytestmark = pytest.mark.optimized("long")


def leaf_of(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) ** 3


def sent_of(leaf, compression, grid=None, held=None):
    grid = grid or LeafGrid(leaf.shape, leaf.shape)
    given = (leaf,) if held is None else (leaf, held)
    return jax.jit(lambda g, *e: compress_leaf(g, grid, compression, *e))(*given)


# --- the selection: against a sort in NumPy ------------------------------------------


def largest(block, k):
    """Returns ascending indices of the k largest; of equal ones, the first."""
    return np.sort(np.argsort(-np.abs(block), kind="stable")[:k])


def selected(block, ratio):
    """Returns the indices that are sent of one chunk, and of a sort as many."""
    sent, _ = sent_of(block, top_k(ratio))
    found = np.asarray(sent.indices)
    assert found.dtype == np.int32
    assert found.size == top_k(ratio).num_kept(block.size, block.dtype)
    assert (np.diff(found) > 0).all()
    assert 0 <= found[0] <= found[-1] < block.size
    return found, largest(block, found.size)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "chunk_elements"),
    [
        ((), 4096),
        ((0, 4), 4096),
        ((5,), 4096),
        ((100, 300), 4096),
        ((70_001,), 8_192),
        ((3, 90_000), 12_288),
    ],
)
def test_largest_of_each_chunk(shape, chunk_elements):
    leaf, compression = leaf_of(shape), top_k(0.1)
    grid = choose_grid(shape, max_chunk_elements=chunk_elements)
    sent, _ = sent_of(leaf, compression, grid)
    assert sent.indices.size == sum(sent.counts)
    expected = np.zeros_like(leaf)
    for chunk in grid.chunks():
        block = leaf[chunk.slices].reshape(-1)
        kept = largest(block, compression.num_kept(block.size, leaf.dtype))
        out = np.zeros_like(block)
        out[kept] = block[kept]
        expected[chunk.slices] = out.reshape(chunk.extent)
    np.testing.assert_array_equal(dense_leaf(sent, leaf, grid), expected)


@pytest.mark.parametrize(
    ("n", "ratio"),
    [
        *((n, 0.02) for n in (1, 31, 32, 33, 16383)),
        *((16383, ratio) for ratio in (0.0002, 1.0)),
    ],
)
def test_short_blocks_are_exact(n, ratio):
    np.testing.assert_array_equal(*selected(leaf_of(n), ratio))


THRESHOLDS = [*product((16384, 16385, 300_001), (0.0002, 0.02, 1.0))]


@pytest.mark.parametrize(("n", "ratio"), family(THRESHOLDS, short=[(300_001, 0.0002)]))
def test_threshold_is_within_half_a_percent(n, ratio):
    block = leaf_of(n)
    found, exact = selected(block, ratio)
    smallest = np.abs(block[exact]).min()
    missed = np.abs(block[np.setdiff1d(exact, found)])
    extra = np.abs(block[np.setdiff1d(found, exact)])
    assert (missed <= smallest * 1.004).all()
    assert (extra >= smallest * 0.996).all()
    assert missed.size < 0.02 * found.size + 1


BLOCKS = {
    "all equal": np.ones(40_000),
    "all zero": np.zeros(40_000),
    "few not zero": np.where(np.arange(40_000) % 9000 == 8999, 1.0, 0.0),
    "denormal": np.full(40_000, 1e-40),
    # A sample of every fourth element says nothing about the rest.
    "large where not sampled": np.where(np.arange(40_000) % 4 == 1, 100.0, 1e-6),
    "rising": np.arange(40_000),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("ratio", family([5e-5, 2.5e-3, 1.0], short=[2.5e-3]))
def test_hard_blocks(name, ratio):
    block = BLOCKS[name].astype(np.float32)
    found, exact = (np.sort(np.abs(block[n])) for n in selected(block, ratio))
    np.testing.assert_allclose(found, exact, rtol=0.004)


@pytest.mark.parametrize(("size", "ratio"), [(20_000, 5e-4), (2_000, 5e-3)])
def test_nan_and_inf_come_first(size, ratio):
    block = leaf_of(size)
    block[[7, -1]] = np.nan
    block[100] = np.uint32(0x7FFFFFFF).view(np.float32)
    block[[3, 500]] = np.inf, -np.inf
    sent, _ = sent_of(block, top_k(ratio))
    np.testing.assert_array_equal(sent.indices, [3, 7, 100, 500, size - 1])


# --- what is left --------------------------------------------------------------------


@pytest.mark.parametrize(
    "values", family(["bfloat16", "float16", None], short=["bfloat16"])
)
def test_what_is_sent_and_what_is_left_add_up(values):
    leaf, held = leaf_of((300, 200)), leaf_of((300, 200), 1)
    leaf[7, 7] = 1e6  # beyond float16
    grid = LeafGrid((300, 200), (128, 200))
    compression = top_k(0.05, values=values, error_feedback=True)
    sent, left = sent_of(leaf, compression, grid, held)
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


# --- options -------------------------------------------------------------------------


def test_texts():
    for text, expected in {
        "top_k:0.01": jaxinf.top_k(0.01),
        "top_k:0.02,warmup_steps=100": jaxinf.top_k(0.02, warmup_steps=100),
        "top_k:0.02,error_feedback=true": jaxinf.top_k(0.02, error_feedback=True),
        "top_k:0.1,values=bfloat16": jaxinf.top_k(0.1, values="bfloat16"),
    }.items():
        assert parse_compression(text) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *[({"ratio": r}, "above 0 and at most 1") for r in (0, 1.0001, np.nan, True)],
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"values": "int8"}, "values='int8': expected one of 'float32', 'bfloat16'"),
        ("", "expected top_k:RATIO"),
        ("random_k:0.1", "top_k is the only compression"),
        ("top_k:half", r"Expected `float`.*\.ratio"),
        ("top_k:0", "ratio above 0"),
        ("top_k:0.1,0.2", "expected top_k:RATIO, then ,warmup_steps=N"),
        ("top_k:0.1,warmup_steps=few", r"Expected `int`.*\.warmup_steps"),
        ("top_k:0.1,values=int4", r"Invalid enum value 'int4'.*\.values"),
    ],
)
def test_bad_options_and_texts(given, message):
    is_text = isinstance(given, str)
    call = parse_compression if is_text else lambda o: top_k(**{"ratio": 0.1, **o})
    with pytest.raises(ValueError, match=message):
        call(given)


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.02, 0.07, 0.1, 0.29, 0.58, 1.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("values", [None, "float32", "bfloat16", "float16"])
def test_volume_is_the_ratio(ratio, dtype, values):
    compression = jaxinf.top_k(ratio, values=values)
    entry = 4 + jnp.dtype(values or dtype).itemsize
    dense = 1000 * entry * np.dtype(dtype).itemsize
    kept = compression.num_kept(1000 * entry, dtype)
    assert kept * entry == round(ratio * dense)  # exactly, where it divides


def test_at_least_one_and_never_more_than_there_are():
    compression = jaxinf.top_k(0.01)
    for num_elements in (0, 1, 2, 150, 199, 200, 201, 399, 400):
        kept = compression.num_kept(num_elements, np.float32)
        assert kept == min(num_elements, max(1, num_elements // 200))
    assert jaxinf.top_k(1.0).num_kept(3, np.float32) == 1
    assert jaxinf.top_k(1.0, values="float16").num_kept(3, np.float32) == 2
