import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinf.layout import LeafGrid, gather, scatter, target_view


@st.composite
def _runs(draw):
    """A chunk, an array that holds it with a margin, and a run of the chunk."""
    ndim = draw(st.integers(0, 4))
    shape = tuple(draw(st.integers(1, 8)) for _ in range(ndim))
    cut = draw(st.integers(0, max(ndim - 1, 0)))
    chunk_shape = tuple(
        1 if dim < cut else draw(st.integers(1, 9)) if dim == cut else length
        for dim, length in enumerate(shape)
    )
    chunk = draw(st.sampled_from(LeafGrid(shape, chunk_shape).chunks()))
    margins = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in shape]
    origin = tuple(s - m[0] for s, m in zip(chunk.start, margins, strict=True))
    held = tuple(sum(m) + e for m, e in zip(margins, chunk.extent, strict=True))
    offset = draw(st.integers(0, chunk.num_elements))
    num_elements = draw(st.integers(0, chunk.num_elements - offset))
    return chunk, origin, held, offset, num_elements


def _block_of(array, chunk, origin):
    corner = [s - o for s, o in zip(chunk.start, origin, strict=True)]
    ends = [c + e for c, e in zip(corner, chunk.extent, strict=True)]
    return array[(*map(slice, corner, ends), ...)]


@settings(deadline=None, max_examples=300)
@given(_runs(), st.booleans())
def test_gather_and_scatter_agree_with_numpy(run, fortran):
    chunk, origin, held, offset, num_elements = run
    source = np.arange(np.prod(held, dtype=int), dtype=np.float32).reshape(held)
    if fortran:
        source = source.copy(order="F")
    block = _block_of(source, chunk, origin)
    expected = block.reshape(-1)[offset : offset + num_elements]
    values = gather(source, chunk, origin, offset, num_elements)
    assert values.ndim == 1
    np.testing.assert_array_equal(values, expected)

    target = np.full_like(source, -1)
    scatter(target, chunk, origin, offset, values)
    flat = np.full(chunk.num_elements, -1, np.float32)
    flat[offset : offset + num_elements] = expected
    written = np.full_like(target, -1)
    _block_of(written, chunk, origin)[...] = flat.reshape(chunk.extent)
    np.testing.assert_array_equal(target, written)

    view = target_view(target, chunk, origin, offset, num_elements)
    if view is None:
        assert not np.shares_memory(values, source)
    else:
        view[...] = 7
        assert (target == 7).sum() == num_elements
        assert num_elements == 0 or np.shares_memory(values, source)
