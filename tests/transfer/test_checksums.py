"""CRC-32C, of wholes and of parts."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinf.transfer import crc32c, crc32c_combine


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (4097,)])
def test_the_bytes_count_and_nothing_else(shape, dtype):
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    assert crc32c(array) == crc32c(np.frombuffer(array.tobytes(), np.uint8))
    published = crc32c(np.frombuffer(b"123456789", np.uint8))
    assert published == 0xE3069283


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_parts_make_the_whole(data, cuts):
    whole = np.frombuffer(data, np.uint8)
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [whole[start:stop] for start, stop in itertools.pairwise(bounds)]
    assert crc32c_combine((crc32c(p), p.size) for p in parts) == crc32c(whole)


def test_parts_of_many_megabytes():
    data = np.random.default_rng(0).integers(0, 256, 40_000_003, np.uint8)
    parts = [data[: 1 << 24], data[1 << 24 : 1 << 25], data[1 << 25 :]]
    assert crc32c_combine((crc32c(p), p.size) for p in parts) == crc32c(data)
