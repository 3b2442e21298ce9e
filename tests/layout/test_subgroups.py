import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinf.layout import CHUNK_ALIGNMENT_ELEMENTS as UNIT
from jaxinf.layout import (
    LeafGrid,
    choose_grid,
    deal,
    subgroups,
)

_BYTES = st.one_of(st.integers(0, 50), st.sampled_from([4096, 16 << 20]))


@pytest.mark.long
@settings(deadline=None)
@given(
    st.lists(st.integers(0, 130), min_size=0, max_size=3).map(tuple),
    st.sampled_from([4096, 5000, 3 * 4096, 1 << 20]),
    st.sampled_from([4096, 1 << 16, 1 << 22]),
)
def test_every_element_is_in_one_subgroup(shape, max_elements, max_chunk_elements):
    grid = choose_grid(shape, max_chunk_elements=max_chunk_elements)
    chunks = grid.chunks()
    csds = [i % 3 for i in range(len(chunks))]
    found = subgroups(7, grid, csds, max_elements)
    ends = np.zeros(len(chunks), int)
    runs = [[] for _ in chunks]
    for run in found:
        assert (run.leaf, run.csd) == (7, csds[run.chunk])
        assert run.offset_elements == ends[run.chunk]
        assert run.offset_elements % UNIT == 0
        assert 1 <= run.num_elements <= max_elements
        ends[run.chunk] += run.num_elements
        runs[run.chunk].append(run.num_elements)
    assert ends.tolist() == [chunk.num_elements for chunk in chunks]
    for lengths, chunk in zip(runs, chunks, strict=True):
        limit = max_elements // UNIT * UNIT
        assert len(lengths) == -(-chunk.num_elements // limit)
        assert max(lengths) - min(lengths) < 2 * UNIT


@pytest.mark.parametrize(
    ("num_elements", "max_elements", "lengths"),
    [
        (1, 4096, [1]),
        (4096, 4096, [4096]),
        (4097, 4096, [4096, 1]),
        (4 * 4096, 3 * 4096, [2 * 4096, 2 * 4096]),
        (5 * 4096 + 5, 4 * 4096 + 9, [3 * 4096, 2 * 4096 + 5]),
    ],
)
def test_cut(num_elements, max_elements, lengths):
    grid = LeafGrid((num_elements,), (1 << 20,))
    runs = subgroups(0, grid, [0], max_elements)
    assert [run.num_elements for run in runs] == lengths


@given(st.lists(_BYTES, max_size=60), st.integers(1, 17))
def test_assignment_is_balanced_and_deterministic(chunk_bytes, num_csds):
    csds = deal(chunk_bytes, num_csds)
    assert csds == deal(list(chunk_bytes), num_csds)
    assert len(csds) == len(chunk_bytes)
    loads = [0] * num_csds
    for num_bytes, csd in zip(chunk_bytes, csds, strict=True):
        loads[csd] += num_bytes
    # Graham's bound for largest-first: the last chunk went to the least loaded CSD.
    smallest_possible = max(max(chunk_bytes, default=0), sum(loads) / num_csds)
    assert max(loads) <= 4 / 3 * smallest_possible + 1e-9 or max(loads) - min(
        loads
    ) <= max(chunk_bytes)


@given(st.integers(1, 80), st.integers(2, 17))
def test_equal_chunks_alternate(num_chunks, num_csds):
    csds = deal([4096] * num_chunks, num_csds)
    assert csds == [i % num_csds for i in range(num_chunks)]
