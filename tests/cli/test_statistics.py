import math
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import jaxinf.cli.statistics as statistics
from jaxinf.io import crc32c
from jaxinf.layout import LeafGrid, choose_grid
from jaxinf.store import CommitRecord, LeafRecord, StateRecord, StepReader


@pytest.fixture
def write_array(tmp_path):
    """Writes an array to disk in the form of a slot."""

    def write(array, chunk_shape=None):
        if chunk_shape is None:
            chunk_shape = choose_grid(array.shape).chunk_shape
        record = LeafRecord(
            path=("w",),
            shape=array.shape,
            dtype="float32",
            kernel="k0",
            states=(StateRecord("params", array.dtype.name),),
            chunk_shape=chunk_shape,
            shard_counts=(1,) * array.ndim,
            csds=(0,) * math.prod(LeafGrid(array.shape, chunk_shape).grid_shape),
        )
        sums = []
        for chunk in record.grid.chunks():
            file = tmp_path / "params.w" / chunk.key
            file.parent.mkdir(parents=True, exist_ok=True)
            stored = np.zeros(chunk.stored_elements, array.dtype)
            stored[: chunk.num_elements] = array[chunk.slices].ravel()
            stored.tofile(file)
            sums.append(crc32c(stored[: chunk.num_elements]))
        commit = CommitRecord(
            step=1, scalar_state=(), checksums={"params.w": np.array(sums, np.uint32)}
        )
        # Several pieces of the longest arrays.
        with StepReader(tmp_path, commit, memory_bytes=1 << 16) as reader:
            return statistics.measure_array(reader, record, record.states[0])

    return write


def _total(found):
    histogram = found.histogram
    return sum(histogram.counts) + histogram.num_below + histogram.num_above


@pytest.mark.parametrize("num_elements", [1, 1023, 1024, 1025, 4097, 300_000])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values(num_elements, dtype, write_array):
    array = np.random.default_rng(1).normal(3, 2, num_elements).astype(dtype)
    found = write_array(array)
    wide = array.astype(np.float64)
    assert found.num_elements == num_elements
    assert found.mean == pytest.approx(wide.mean(), rel=1e-12)
    assert found.std == pytest.approx(wide.std(), rel=1e-9, abs=1e-12)
    assert (found.minimum, found.maximum) == (wide.min(), wide.max())
    assert _total(found) == num_elements


def test_special_values(write_array):
    array = np.array([0, -0.0, np.nan, np.inf, -np.inf, 1, -3], np.float32)
    found = write_array(array)
    assert (found.num_zeros, found.num_non_finite) == (2, 3)
    assert (found.minimum, found.maximum, found.mean) == (-3, 1, -0.5)
    assert found.histogram.scale == "linear"
    assert _total(found) == 4


@pytest.mark.parametrize(
    "array", [np.zeros((0, 3), np.float32), np.full(5, np.nan, np.float32)]
)
def test_nothing_finite(array, write_array):
    document = write_array(array).to_json()
    assert document["num_non_finite"] == array.size
    for key in ("mean", "std", "min", "max", "histogram"):
        assert document[key] is None


@pytest.mark.parametrize("value", [0.0, -2.5, 7.0, 1e-45, 3e38])
def test_one_value(value, write_array):
    found = write_array(np.full(70, value, np.float32))
    assert found.mean == pytest.approx(np.float32(value))
    in_bins = _total(found)
    assert in_bins == 70
    assert max(found.histogram.counts) == 70


def test_log_scale_for_what_is_not_negative(write_array):
    array = 10.0 ** np.random.default_rng(2).uniform(-30, 0, 5000).astype(np.float32)
    array[:10] = 0
    found = write_array(array.astype(np.float32))
    assert found.histogram.scale == "log10"
    assert found.num_zeros == 10
    assert found.histogram.num_above == 0
    assert found.histogram.num_below > 0
    assert _total(found) == 5000 - 10


def test_outliers_do_not_flatten_the_rest(write_array):
    array = np.random.default_rng(3).normal(size=20_000).astype(np.float32)
    array[7] = 1e6
    found = write_array(array)
    assert found.histogram.num_above == 1
    assert found.maximum == 1e6


def test_memory_does_not_grow_with_the_array(write_array):
    array = np.ones(1 << 22, np.float32)
    tracemalloc.start()
    write_array(array)
    before = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert before < 36 << 20  # the writer's copies; all of it in float64 is 32 more
