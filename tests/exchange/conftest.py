"""Committed steps of raw files to export, and their arrays."""

import uuid
from functools import partial

import numpy as np
import pytest
import raw_stores

from jaxinf.store import ScalarState, StateRecord, read_step
from jaxinf.typing import BFLOAT16

STATES = (
    StateRecord("params", "float32"),
    StateRecord("mu", "bfloat16"),
    StateRecord("nu", "float16"),
    StateRecord("sign", "bool"),
    StateRecord("age", "int32"),
)
# Name: shape and shards. More than one chunk, odd rows, long rows, one row, one
# element, none, and grids that are divided at shard boundaries.
LEAVES = {
    ("h0", "attn", "kernel"): ((13, 129), (1, 1)),
    ("h0", "attn", "bias"): ((129,), (1,)),
    ("embed/%", "0"): ((3, 9001), (1, 1)),
    ("scale",): ((), ()),
    ("empty",): ((0, 7), (1, 1)),
    ("sharded", "rows"): ((64, 640), (4, 1)),
    ("sharded", "columns"): ((48, 256), (1, 4)),
    ("sharded", "both"): ((6, 8, 192), (2, 1, 2)),
}


@pytest.fixture
def make_step(place):
    """Makes a store with one committed step; returns it and its arrays by name."""

    def make(num_csds=0, leaves=None, chunk_elements=4096):
        name = uuid.uuid4().hex[:8]
        roots = raw_stores.make_roots(place, name, num_csds)
        how = STATES, leaves or LEAVES, roots, chunk_elements
        directory = raw_stores.make_store(place / f"{name}-store", *how)
        scalars = (
            ScalarState.of("[0].count", np.asarray(7, np.int32)),
            ScalarState.of("[1]['rate']", np.asarray([0.1, np.nan], BFLOAT16)),
        )
        fields = {"scalar_state": scalars, "skipped_steps": 2, "payload": {"seed": 3}}
        draw = partial(raw_stores.any_bits, np.random.default_rng(0))
        arrays = raw_stores.commit(directory, "a", draw, step=7, **fields)
        return read_step(directory, directory.path / "current"), arrays

    return make


@pytest.fixture
def check_bits():
    """Compares arrays by name, to the bit."""

    def check(found, expected):
        assert sorted(found) == sorted(expected)
        for name, array in expected.items():
            one = np.asarray(found[name])
            assert (one.dtype, one.shape) == (array.dtype, array.shape), name
            assert one.tobytes() == array.tobytes(), name

    return check
