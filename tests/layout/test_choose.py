import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinf.layout import (
    CHUNK_ALIGNMENT_ELEMENTS,
    choose_grid,
)

_LENGTHS = st.one_of(
    st.integers(0, 9),
    st.integers(1, 70_000),
    st.sampled_from([64, 768, 1023, 1024, 1025, 4095, 4096, 4097, 50257, 1 << 36]),
)


@st.composite
def _sharded_shapes(draw):
    shape, counts = [], []
    for _ in range(draw(st.integers(0, 5))):
        count = draw(st.sampled_from([1, 1, 1, 2, 3, 4, 8, 16]))
        shape.append(draw(_LENGTHS) * count)
        counts.append(count)
    return tuple(shape), tuple(counts)


# The format's own goldens: changing one makes stores of the same model differ.
@pytest.mark.parametrize(
    ("shape", "shard_counts", "chunk_shape", "num_chunks"),
    [
        ((50257, 768), None, (5040, 768), 10),
        ((257, 129), None, (4096, 129), 1),
        ((1, 5000001), None, (1, 2502656), 2),
        ((768,), None, (4096,), 1),
        ((4097, 4097, 3), None, (4096, 4097, 3), 2),
        ((100000, 3, 5), None, (102400, 3, 5), 1),
        ((257, 4097), None, (4096, 4097), 1),
        ((2, 4097), None, (1, 8192), 2),
        ((3, 3, 3, 64), None, (64, 3, 3, 64), 1),
        ((), None, (), 1),
        ((0, 5), None, (1, 4096), 0),
        ((5, 0), None, (4096, 1), 0),
        ((768, 3072), (1, 4), (768, 768), 4),
        ((50304, 768), (4, 1), (4192, 768), 12),
        ((151936, 8192), (8, 1), (4748, 8192), 32),
        ((3072,), (4,), (768,), 4),
        ((4, 768), (4, 1), (1, 4096), 4),
    ],
)
def test_golden(shape, shard_counts, chunk_shape, num_chunks):
    grid = choose_grid(shape, shard_counts=shard_counts)
    assert grid.chunk_shape == chunk_shape
    assert grid.num_chunks == num_chunks


@settings(deadline=None)
@given(_sharded_shapes(), st.sampled_from([1, 4096, 5000, 1 << 16, 1 << 22]))
def test_grid_obeys_the_rules(sharded, max_elements):
    shape, counts = sharded
    grid = choose_grid(shape, shard_counts=counts, max_chunk_elements=max_elements)
    shard = [max(n // c, 1) for n, c in zip(shape, counts, strict=True)]
    assert len(grid.chunk_shape) == len(shape)
    stored = math.prod(grid.chunk_shape)
    assert 1 <= stored <= max(16 * max_elements, CHUNK_ALIGNMENT_ELEMENTS)
    if not shape:
        return
    # (1, …, 1, r, e, …, e): one dimension is cut, those after it are whole.
    assert any(
        all(c == 1 for c in grid.chunk_shape[:dim])
        and list(grid.chunk_shape[dim + 1 :]) == shard[dim + 1 :]
        for dim in range(len(shape))
    )
    for dim, count in enumerate(counts):
        if count > 1:
            assert shard[dim] % grid.chunk_shape[dim] == 0
    if all(count == 1 for count in counts):
        assert math.prod(grid.chunk_shape) % CHUNK_ALIGNMENT_ELEMENTS == 0


def test_bad_shard_counts():
    with pytest.raises(ValueError, match=r"dimension 0 of length 50257 .* 4 shards"):
        choose_grid((50257, 768), shard_counts=(4, 1))
    for counts in ((1,), (1, 0), (1, -1), (1, 1, 1)):
        with pytest.raises(ValueError, match="one positive count a dimension"):
            choose_grid((8, 8), shard_counts=counts)
