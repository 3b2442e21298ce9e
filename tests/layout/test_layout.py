"""Grids, chunks, portions, runs and subgroups of leaves, on leaves of any shape."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinf.layout import (
    CHUNK_ALIGNMENT_ELEMENTS,
    LeafGrid,
    box_runs,
    choose_grid,
    chunks_of_box,
    cut_portions,
    cut_subgroups,
    deal_chunks,
    gather,
    scatter,
    target_view,
)

UNIT = CHUNK_ALIGNMENT_ELEMENTS
SHORT = st.integers(0, 7) | st.integers(1, 120)
ANY = st.one_of(
    st.integers(0, 9),
    st.integers(1, 70_000),
    st.sampled_from([64, 768, 1023, 1024, 1025, 4095, 4096, 4097, 50257, 1 << 36]),
)
SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@st.composite
def shapes(draw, lengths, most_elements=None):
    """A leaf's shape, and shard counts that divide it."""
    shape, counts, size = [], [], 1
    for _ in range(draw(st.integers(0, 5))):
        count = draw(st.sampled_from([1, 1, 1, 2, 3, 4, 8]))
        length = draw(lengths) * count
        if most_elements is None or size * max(length, 1) <= most_elements:
            size *= max(length, 1)
            shape.append(length)
            counts.append(count)
    return tuple(shape), tuple(counts)


@st.composite
def grids(draw, most_elements=20_000, chunk_elements=(1, 300, 4096, 10_000)):
    """A grid of a small leaf, with many chunks, and its shard counts."""
    shape, counts = draw(shapes(SHORT, most_elements))
    most = draw(st.sampled_from(chunk_elements))
    return choose_grid(shape, shard_counts=counts, max_chunk_elements=most), counts


# --- the choice of a grid ------------------------------------------------------------


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


@given(shapes(ANY), st.sampled_from([1, 4096, 5000, 1 << 16, 1 << 22]))
def test_grid_obeys_the_rules(sharded, max_elements):
    shape, counts = sharded
    grid = choose_grid(shape, shard_counts=counts, max_chunk_elements=max_elements)
    shard = [max(n // c, 1) for n, c in zip(shape, counts, strict=True)]
    assert len(grid.chunk_shape) == len(shape)
    assert 1 <= math.prod(grid.chunk_shape) <= max(16 * max_elements, UNIT)
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
        assert math.prod(grid.chunk_shape) % UNIT == 0


# --- chunks --------------------------------------------------------------------------


@given(grids())
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


@given(grids())
def test_shards_are_covered_by_whole_chunks(case):
    grid, counts = case
    extent = tuple(n // c for n, c in zip(grid.shape, counts, strict=True))
    found, chunks = [], grid.chunks()
    for shard in itertools.product(*map(range, counts)):
        start = tuple(i * e for i, e in zip(shard, extent, strict=True))
        positions = chunks_of_box(grid, start, extent)
        assert positions == sorted(positions)
        for chunk in (chunks[i] for i in positions):
            for dim, first in enumerate(chunk.start):
                assert first >= start[dim]
                assert first + chunk.extent[dim] <= start[dim] + extent[dim]
        found += positions
    assert sorted(found) == list(range(grid.num_chunks))


def test_a_partly_covered_chunk_is_refused():
    for start, extent, dim in (
        ((2, 0), (8, 6), 0),
        ((4, 0), (5, 6), 0),
        ((4, 1), (6, 2), 1),
        ((4, 3), (4, 1), 1),
    ):
        with pytest.raises(ValueError, match=f"partly inside along dimension {dim}"):
            chunks_of_box(LeafGrid((10, 6), (4, 3)), start, extent)


# --- parts of chunks -----------------------------------------------------------------


@given(grids(4000, (4096,)), st.integers(1, 50))
def test_portions_partition_the_leaf_and_are_runs_of_chunks(case, max_elements):
    grid, _ = case
    seen = np.zeros(grid.shape, int)
    whole = np.arange(math.prod(grid.shape)).reshape(grid.shape)
    chunks = grid.chunks()
    for portion in cut_portions(grid, max_elements):
        assert 0 < portion.num_elements <= max_elements
        seen[portion.slices] += 1
        file = whole[chunks[portion.chunk].slices].reshape(-1)
        run = file[portion.offset_elements :][: portion.num_elements]
        np.testing.assert_array_equal(run, whole[portion.slices].reshape(-1))
    assert (seen == 1).all()


@settings(max_examples=300)
@given(st.data())
def test_runs_are_the_box(data):
    shape = data.draw(SHAPES)
    start = [data.draw(st.integers(0, n)) for n in shape]
    extent = [
        data.draw(st.integers(0, n - s)) for n, s in zip(shape, start, strict=True)
    ]
    flat = np.arange(math.prod(shape))
    ends = [s + e for s, e in zip(start, extent, strict=True)]
    box = flat.reshape(shape)[tuple(map(slice, start, ends))]
    runs = [flat[o : o + n] for o, n in box_runs(shape, start, extent)]
    found = np.concatenate(runs) if runs else flat[:0]
    np.testing.assert_array_equal(found, box.reshape(-1))


@settings(max_examples=300)
@given(st.data(), st.booleans())
def test_gather_and_scatter_agree_with_numpy(data, fortran):
    """Of a run of a chunk, in an array that holds the chunk with a margin."""
    draw = data.draw
    shape = draw(SHAPES.filter(lambda shape: math.prod(shape) > 0))
    cut = draw(st.integers(0, max(len(shape) - 1, 0)))
    chunk_shape = (*(1,) * cut, draw(st.integers(1, 9)), *shape[cut + 1 :])
    chunk = draw(st.sampled_from(LeafGrid(shape, chunk_shape[: len(shape)]).chunks()))
    margins = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in shape]
    origin = tuple(s - m[0] for s, m in zip(chunk.start, margins, strict=True))
    held = tuple(sum(m) + e for m, e in zip(margins, chunk.extent, strict=True))
    offset = draw(st.integers(0, chunk.num_elements))
    num_elements = draw(st.integers(0, chunk.num_elements - offset))
    corner = [m[0] for m in margins]
    ends = [c + e for c, e in zip(corner, chunk.extent, strict=True)]
    block = (*map(slice, corner, ends), ...)

    source = np.arange(np.prod(held, dtype=int), dtype=np.float32).reshape(held)
    if fortran:
        source = source.copy(order="F")
    expected = source[block].reshape(-1)[offset : offset + num_elements]
    values = gather(source, chunk, origin, offset, num_elements)
    assert values.ndim == 1
    np.testing.assert_array_equal(values, expected)

    target = np.full_like(source, -1)
    scatter(target, chunk, origin, offset, values)
    flat = np.full(chunk.num_elements, -1, np.float32)
    flat[offset : offset + num_elements] = expected
    written = np.full_like(target, -1)
    written[block] = flat.reshape(chunk.extent)
    np.testing.assert_array_equal(target, written)

    view = target_view(target, chunk, origin, offset, num_elements)
    if view is None:
        assert not np.shares_memory(values, source)
    else:
        view[...] = 7
        assert (target == 7).sum() == num_elements
        assert num_elements == 0 or np.shares_memory(values, source)


@given(
    st.lists(st.integers(0, 130), min_size=0, max_size=3).map(tuple),
    st.sampled_from([4096, 5000, 3 * 4096, 1 << 20]),
    st.sampled_from([4096, 1 << 16, 1 << 22]),
)
def test_every_element_is_in_one_subgroup(shape, max_elements, max_chunk_elements):
    grid = choose_grid(shape, max_chunk_elements=max_chunk_elements)
    chunks = grid.chunks()
    csds, runs = [i % 3 for i in range(len(chunks))], [[] for _ in chunks]
    for run in cut_subgroups(7, grid, csds, max_elements):
        assert (run.leaf, run.csd) == (7, csds[run.chunk])
        assert run.offset_elements == sum(runs[run.chunk])
        assert run.offset_elements % UNIT == 0
        assert 1 <= run.num_elements <= max_elements
        runs[run.chunk].append(run.num_elements)
    limit = max_elements // UNIT * UNIT
    for lengths, chunk in zip(runs, chunks, strict=True):
        assert sum(lengths) == chunk.num_elements
        assert len(lengths) == -(-chunk.num_elements // limit)
        assert max(lengths) - min(lengths) < 2 * UNIT


@given(
    st.lists(st.integers(0, 50) | st.sampled_from([4096, 16 << 20]), max_size=60),
    st.integers(1, 17),
)
def test_assignment_is_balanced_and_deterministic(chunk_bytes, num_csds):
    csds = deal_chunks(chunk_bytes, num_csds)
    assert csds == deal_chunks(list(chunk_bytes), num_csds)
    assert len(csds) == len(chunk_bytes)
    loads = [0] * num_csds
    for num_bytes, csd in zip(chunk_bytes, csds, strict=True):
        loads[csd] += num_bytes
    # Graham's bound for largest-first: the last chunk went to the least loaded CSD.
    smallest_possible = max(max(chunk_bytes, default=0), sum(loads) / num_csds)
    is_bounded = max(loads) <= 4 / 3 * smallest_possible + 1e-9
    assert is_bounded or max(loads) - min(loads) <= max(chunk_bytes)
    assert deal_chunks([4096] * 20, num_csds) == [i % num_csds for i in range(20)]
