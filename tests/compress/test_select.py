"""Selection on the JAX device, against a sort in NumPy."""

from itertools import product

import jax
import numpy as np
import pytest
from families import family

from jaxinf.compress.blocks import select

pytestmark = pytest.mark.optimized("long")

jitted = jax.jit(select, static_argnums=1)
rng = np.random.default_rng(0)


def largest(block, k):
    """Returns ascending indices of the k largest; of equal ones, the first."""
    order = np.argsort(-np.abs(block), kind="stable")
    return np.sort(order[:k])


def heavy_tailed(n):
    return (rng.standard_normal(n) ** 3).astype(np.float32)


@pytest.mark.parametrize(
    ("n", "share"),
    [
        *((n, 0.01) for n in (1, 31, 32, 33, 16383)),
        *((16383, share) for share in (0.0001, 0.5, 1.0)),
    ],
)
def test_short_blocks_are_exact(n, share):
    block, k = heavy_tailed(n), max(1, int(n * share))
    found = np.asarray(jitted(block, k))
    np.testing.assert_array_equal(found, largest(block, k))


THRESHOLDS = [*product((16384, 16385, 300_001), (0.0001, 0.01, 0.5, 1.0))]


@pytest.mark.parametrize(
    ("n", "share"),
    family(
        THRESHOLDS,
        short=[(300_001, 0.0001)],
    ),
)
def test_threshold_is_within_half_a_percent(n, share):
    block, k = heavy_tailed(n), max(1, int(n * share))
    found = np.asarray(jitted(block, k))
    assert found.dtype == np.int32
    assert found.size == k
    assert (np.diff(found) > 0).all()
    assert 0 <= found[0] <= found[-1] < n
    exact = largest(block, k)
    smallest = np.abs(block[exact]).min()
    missed = np.abs(block[np.setdiff1d(exact, found)])
    extra = np.abs(block[np.setdiff1d(found, exact)])
    assert (missed <= smallest * 1.004).all()
    assert (extra >= smallest * 0.996).all()
    assert missed.size < 0.02 * k + 1


BLOCKS = {
    "all equal": np.ones(40_000, np.float32),
    "all zero": np.zeros(40_000, np.float32),
    "few not zero": np.where(np.arange(40_000) % 9000 == 8999, 1.0, 0.0),
    "denormal": np.full(40_000, 1e-40),
    # A sample of every fourth element says nothing about the rest.
    "large where not sampled": np.where(np.arange(40_000) % 4 == 1, 100.0, 1e-6),
    "rising": np.arange(40_000),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("k", family([1, 50, 20_000, 40_000], short=[50]))
def test_hard_blocks(name, k):
    block = BLOCKS[name].astype(np.float32)
    found = np.asarray(jitted(block, k))
    assert (np.diff(found) > 0).all()
    assert found.size == k
    exact = np.sort(np.abs(block[largest(block, k)]))
    np.testing.assert_allclose(np.sort(np.abs(block[found])), exact, rtol=0.004)


def test_nan_and_inf_come_first():
    block = heavy_tailed(20_000)
    block[[7, 19_999]] = np.nan
    block[100] = np.uint32(0x7FFFFFFF).view(np.float32)
    block[[3, 500]] = np.inf, -np.inf
    found = jitted(block, 5)
    np.testing.assert_array_equal(found, [3, 7, 100, 500, 19_999])
