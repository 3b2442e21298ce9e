"""Stores with a few small leaves, made and filled without an engine."""

import numpy as np
import pytest
import raw_stores

from jaxinf.store import StateRecord

STATES = (
    StateRecord("params", "float32"),
    StateRecord("mu", "bfloat16"),
    StateRecord("count", "int32"),
)
# More than one chunk, odd rows, one row, one element, none.
SHAPES = {
    ("h0", "attn", "kernel"): (13, 129),
    ("h0", "attn", "bias"): (129,),
    ("embed/%", "0"): (3, 4096),
    ("scale",): (),
    ("empty",): (0, 7),
}


LEAVES = {path: (shape, (1,) * len(shape)) for path, shape in SHAPES.items()}


@pytest.fixture
def manifest():
    return raw_stores.make_manifest(STATES, LEAVES, ("/mnt/a", "/mnt/b"))


@pytest.fixture
def make_directory(place):
    def make(name="store", num_csds=0, states=STATES):
        roots = raw_stores.make_roots(place, name, num_csds)
        return raw_stores.make_store(place / name, states, LEAVES, roots)

    return make


@pytest.fixture
def write_step():
    def write(directory, slot, step):
        rng = np.random.default_rng(step)

        def draw(shape, dtype):
            return rng.integers(-99, 99, shape).astype(dtype)

        return raw_stores.commit(directory, slot, draw, step=step)

    return write
