"""Portions partition a leaf and are runs of its chunks' files."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinf.layout import LeafGrid, box_runs, choose_grid, portions
from jaxinf.layout.runs import portion_shape

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@st.composite
def grids(draw):
    shape = draw(SHAPES)
    shards = [
        draw(st.sampled_from([d for d in (1, 2, 3) if n % d == 0])) for n in shape
    ]
    if math.prod(shape) == 0:
        shards = [1] * len(shape)
    return choose_grid(shape, max_chunk_elements=4096, shard_counts=tuple(shards))


@settings(deadline=None, max_examples=300)
@given(grids(), st.integers(1, 50))
def test_portions_partition_the_leaf_and_are_runs_of_chunks(grid, max_elements):
    seen = np.zeros(grid.shape, int)
    whole = np.arange(math.prod(grid.shape)).reshape(grid.shape)
    chunks = grid.chunks()
    for portion in portions(grid, max_elements):
        assert 0 < portion.num_elements <= max_elements
        seen[portion.slices] += 1
        file = whole[chunks[portion.chunk].slices].reshape(-1)
        run = file[portion.offset_elements :][: portion.num_elements]
        np.testing.assert_array_equal(run, whole[portion.slices].reshape(-1))
    assert (seen == 1).all()


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_runs_are_the_box(data):
    shape = data.draw(SHAPES)
    start = [data.draw(st.integers(0, n)) for n in shape]
    extent = [
        data.draw(st.integers(0, n - s)) for n, s in zip(shape, start, strict=True)
    ]
    flat = np.arange(math.prod(shape))
    box = flat.reshape(shape)[
        tuple(slice(s, s + e) for s, e in zip(start, extent, strict=True))
    ]
    runs = [flat[o : o + n] for o, n in box_runs(shape, start, extent)]
    found = np.concatenate(runs) if runs else flat[:0]
    np.testing.assert_array_equal(found, box.reshape(-1))


def test_portion_shape():
    for shape, chunk_shape, most, expected in (
        ((100, 64), (64, 64), 4096, (64, 64)),
        ((100, 64), (64, 64), 1000, (8, 64)),  # divides 64, for two chunks
        ((50, 64), (64, 64), 1000, (15, 64)),  # one chunk: no need to
        ((5, 5000), (1, 8192), 4096, (1, 4096)),
        ((), (), 1, ()),
        ((0, 7), (4096, 7), 100, (1, 7)),
    ):
        assert portion_shape(LeafGrid(shape, chunk_shape), most) == expected
