"""Committed steps of raw files to export, and their arrays."""

import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import raw_stores

from jaxinf.store import (
    CommittedStep,
    ScalarState,
    StateRecord,
    StoreDirectory,
    create_store,
    step_of,
)

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
def make_step(place: Path) -> Callable[..., tuple[CommittedStep, dict]]:
    """Makes a store with one committed step; returns it and its arrays by name."""

    def make(
        num_csds: int = 0, leaves: dict | None = None, chunk_elements: int = 4096
    ) -> tuple[CommittedStep, dict]:
        name = uuid.uuid4().hex[:8]
        roots = raw_stores.make_roots(place, name, num_csds)
        manifest = raw_stores.make_manifest(
            STATES, leaves or LEAVES, roots, chunk_elements
        )
        directory = StoreDirectory(place / f"{name}-store", manifest)
        create_store(directory)
        scalars = (
            ScalarState.of("[0].count", np.asarray(7, np.int32)),
            ScalarState.of(
                "[1]['rate']", np.asarray([0.1, np.nan], ml_dtypes.bfloat16)
            ),
        )
        fields = {"scalar_state": scalars, "skipped_steps": 2, "payload": {"seed": 3}}
        draw = partial(raw_stores.any_bits, np.random.default_rng(0))
        arrays = raw_stores.publish(directory, "a", draw, step=7, **fields)
        return step_of(directory, directory.path / "current"), arrays

    return make


@pytest.fixture
def check_bits() -> Callable[[dict, dict], None]:
    """Compares arrays by name, to the bit."""

    def form(array: np.ndarray) -> tuple:
        return array.dtype, array.shape, array.tobytes()

    def check(found: dict, expected: dict) -> None:
        assert sorted(found) == sorted(expected)
        wanted = {name: form(array) for name, array in expected.items()}
        differing = [n for n in wanted if form(np.asarray(found[n])) != wanted[n]]
        assert not differing

    return check
