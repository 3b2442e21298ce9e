"""Files written raw in this layout are zarr v3 arrays to other readers."""

import json

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zarr

from jaxinf.layout import choose_grid, gather

_CASES = [
    ((), None, "float32"),
    ((1,), None, "float32"),
    ((5,), None, "bfloat16"),
    ((0, 5), None, "float32"),
    ((4097,), None, "int8"),
    ((257, 129), None, "float32"),
    ((40, 768), None, "bfloat16"),
    ((3, 70, 64), None, "float32"),
    ((2, 3, 3000), None, "float32"),
    ((64, 96), (1, 4), "float32"),
    ((64, 96), (2, 3), "float32"),
    ((24,), (4,), "bfloat16"),
    ((33, 4, 130), (3, 2, 1), "float32"),
]


def _metadata(grid, dtype):
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(grid.shape),
        "data_type": dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(grid.chunk_shape)},
        },
        "chunk_key_encoding": {
            "name": "default",
            "configuration": {"separator": "/"},
        },
        "fill_value": 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {},
    }


def _write_raw(directory, grid, leaf, dtype):
    directory.joinpath("zarr.json").write_text(json.dumps(_metadata(grid, dtype)))
    origin = (0,) * leaf.ndim
    for chunk in grid.chunks():
        path = directory / chunk.key
        path.parent.mkdir(parents=True, exist_ok=True)
        values = gather(leaf, chunk, origin, 0, chunk.num_elements)
        with open(path, "wb") as file:
            file.write(values.tobytes())
            file.truncate(chunk.stored_elements * leaf.itemsize)


@pytest.mark.parametrize(("shape", "shard_counts", "dtype"), _CASES)
def test_other_readers_see_the_leaf(tmp_path, shape, shard_counts, dtype):
    grid = choose_grid(shape, shard_counts=shard_counts, max_chunk_elements=8192)
    np_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    leaf = (np.arange(np.prod(shape, dtype=int)) % 251 - 125).reshape(shape)
    leaf = leaf.astype(np_dtype)
    _write_raw(tmp_path, grid, leaf, dtype)

    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/"},
    }
    array = ts.open(spec, read=True).result()
    if shape:  # tensorstore shows no chunk shape of a 0-d array
        assert array.chunk_layout.read_chunk.shape == grid.chunk_shape
    np.testing.assert_array_equal(array.read().result(), leaf)

    if dtype != "bfloat16":  # zarr-python has no bfloat16
        found = zarr.open_array(str(tmp_path), mode="r")
        assert found.chunks == grid.chunk_shape
        np.testing.assert_array_equal(found[...], leaf)
