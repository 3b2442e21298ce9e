import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinf.layout import LeafGrid, choose_grid, covers


@st.composite
def sharded_grids(draw):
    """A small leaf, its shard counts, and a grid with many chunks."""
    shape, counts, size = [], [], 1
    for _ in range(draw(st.integers(0, 5))):
        count = draw(st.sampled_from([1, 1, 2, 3]))
        length = draw(st.one_of(st.integers(0, 7), st.integers(1, 120))) * count
        if size * max(length, 1) > 200_000:
            continue
        size *= max(length, 1)
        shape.append(length)
        counts.append(count)
    max_elements = draw(st.sampled_from([1, 300, 4096, 10_000]))
    grid = choose_grid(
        tuple(shape), shard_counts=tuple(counts), max_chunk_elements=max_elements
    )
    return grid, tuple(counts)


@settings(deadline=None)
@given(sharded_grids())
def test_every_element_is_in_one_chunk_and_a_prefix_of_its_file(case):
    grid, _ = case
    leaf = np.arange(grid.num_elements).reshape(grid.shape)
    seen = np.zeros(grid.shape, np.int8)
    chunks = grid.chunks()
    assert len(chunks) == grid.num_chunks == np.prod(grid.grid_shape, dtype=int)
    for chunk in chunks:
        block = leaf[(*chunk.slices, ...)]
        seen[(*chunk.slices, ...)] += 1
        assert block.shape == chunk.extent
        assert 1 <= block.size == chunk.num_elements <= chunk.stored_elements
        # What zarr stores: the block in the corner of a full-size chunk.
        stored = np.full(grid.chunk_shape, -1)
        stored[(*map(slice, chunk.extent), ...)] = block
        prefix = stored.reshape(-1)[: chunk.num_elements]
        np.testing.assert_array_equal(prefix, block.reshape(-1))
    assert (seen == 1).all()


@pytest.mark.long
@settings(deadline=None)
@given(sharded_grids())
def test_shards_are_covered_by_whole_chunks(case):
    grid, counts = case
    extent = tuple(n // c for n, c in zip(grid.shape, counts, strict=True))
    found = []
    for shard in itertools.product(*map(range, counts)):
        start = tuple(i * e for i, e in zip(shard, extent, strict=True))
        positions = covers(grid, start, extent)
        assert positions == sorted(positions)
        chunks = grid.chunks()
        for chunk in (chunks[i] for i in positions):
            for dim, first in enumerate(chunk.start):
                assert first >= start[dim]
                assert first + chunk.extent[dim] <= start[dim] + extent[dim]
        found += positions
    assert sorted(found) == list(range(grid.num_chunks))


def test_scalar_and_empty_leaves():
    (chunk,) = LeafGrid((), ()).chunks()
    assert (chunk.key, chunk.num_elements, chunk.stored_elements) == ("c", 1, 1)
    empty = LeafGrid((0, 5), (1, 4096))
    assert (empty.grid_shape, empty.num_chunks, empty.chunks()) == ((0, 1), 0, ())


@pytest.mark.parametrize(
    ("shape", "chunk_shape", "message"),
    [
        ((4, 4), (4,), "has 1 lengths"),
        ((4,), (0,), "and of a chunk >= 1"),
        ((-1,), (4,), "lengths >= 0"),
        ((4, 5), (2, 4), "pads dimension 1 between real elements"),
        ((5, 5), (8, 8), "pads dimension 1 between real elements"),
    ],
)
def test_impossible_grids_are_refused(shape, chunk_shape, message):
    with pytest.raises(ValueError, match=message):
        LeafGrid(shape, chunk_shape)


def test_partly_covered_chunk_is_named():
    for start, extent, key in (
        ((2, 0), (8, 6), "c/0/0"),
        ((4, 0), (5, 6), "c/2/0"),
        ((4, 1), (6, 2), "c/1/0"),
        ((4, 3), (4, 1), "c/1/1"),
    ):
        with pytest.raises(ValueError, match=f"chunk {key} .* only partly inside"):
            covers(LeafGrid((10, 6), (4, 3)), start, extent)
