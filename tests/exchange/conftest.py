"""Committed steps of raw files to export, and what they hold."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxinf.exchange import StepFiles
from jaxinf.io import crc32c
from jaxinf.layout import assign_csds, choose_grid
from jaxinf.store import (
    CommitRecord,
    LeafRecord,
    Manifest,
    ScalarState,
    StateRecord,
    StoreDirectory,
    dtype_of,
    stored_bytes,
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
    ("h0", "attn", "kernel"): ((97, 129), (1, 1)),
    ("h0", "attn", "bias"): ((129,), (1,)),
    ("embed/%", "0"): ((3, 9001), (1, 1)),
    ("scale",): ((), ()),
    ("empty",): ((0, 7), (1, 1)),
    ("sharded", "rows"): ((64, 640), (4, 1)),
    ("sharded", "columns"): ((48, 256), (1, 4)),
    ("sharded", "both"): ((6, 8, 192), (2, 1, 2)),
}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is such a file system."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="jaxinf-test-"))
    yield path
    shutil.rmtree(path)


def make_manifest(roots: list[str], leaves: dict, chunk_elements: int) -> Manifest:
    records = []
    for path, (shape, shards) in leaves.items():
        grid = choose_grid(
            shape, max_chunk_elements=chunk_elements, shard_counts=shards
        )
        sizes = [sum(stored_bytes(c, s) for s in STATES) for c in grid.chunks()]
        records.append(
            LeafRecord(
                path=path,
                shape=shape,
                dtype="float32",
                kernel="k0",
                states=STATES,
                chunk_shape=grid.chunk_shape,
                shard_counts=shards,
                csds=tuple(assign_csds(sizes, max(1, len(roots)))),
            )
        )
    return Manifest(
        store_id=uuid.uuid4().hex,
        csds=tuple(roots),
        kernels={"k0": ("%0 = mul #, gradient", "update = %0")},
        leaves=tuple(records),
        created_by={"jaxinf": "0"},
    )


def any_bits(rng: np.random.Generator, shape: tuple, dtype: np.dtype) -> np.ndarray:
    """Values of all kinds: NaN with payloads, denormals, infinities."""
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    count = int(np.prod(shape, dtype=np.int64))
    raw = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype)
    return raw.reshape(shape)


@pytest.fixture
def make_step(place: Path) -> Callable[..., tuple[StepFiles, dict]]:
    """Makes a store with one committed step; returns it and its arrays by name."""

    def make(
        num_csds: int = 0, leaves: dict | None = None, chunk_elements: int = 4096
    ) -> tuple[StepFiles, dict]:
        name = uuid.uuid4().hex[:8]
        roots = [place / f"{name}-csd{i}" for i in range(num_csds)]
        for root in roots:
            root.mkdir()
        manifest = make_manifest(
            list(map(str, roots)), leaves or LEAVES, chunk_elements
        )
        directory = StoreDirectory(place / f"{name}-store", manifest)
        directory.create()
        rng = np.random.default_rng(0)
        arrays, checksums = {}, {}
        for number, leaf in enumerate(manifest.leaves):
            for state in leaf.states:
                values = any_bits(rng, leaf.shape, dtype_of(state.dtype))
                arrays[leaf.array_name(state.name)] = values
                checksums[leaf.array_name(state.name)] = np.asarray(
                    [
                        crc32c(np.ascontiguousarray(values[chunk.slices]))
                        for chunk in directory.chunks[number]
                    ],
                    np.uint32,
                )
                for position, chunk in enumerate(directory.chunks[number]):
                    file = directory.prepare_write("a", number, position, state.name)
                    with open(file, "r+b") as stream:
                        stream.write(values[chunk.slices].tobytes())
        scalars = (
            ScalarState("[0].count", np.asarray(7, np.int32)),
            ScalarState("[1]['rate']", np.asarray([0.1, np.nan], ml_dtypes.bfloat16)),
        )
        directory.sync()
        record = CommitRecord(7, scalars, 2, {"seed": 3}, checksums)
        directory.publish("a", record)
        return StepFiles(directory.path / "current", manifest), arrays

    return make


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and found.tobytes() == expected.tobytes()
    )


@pytest.fixture
def check_bits() -> Callable[[dict, dict], None]:
    """Compares arrays by name, to the bit."""

    def check(found: dict, expected: dict) -> None:
        assert sorted(found) == sorted(expected)
        differing = [
            n for n in expected if not same_bits(np.asarray(found[n]), expected[n])
        ]
        assert not differing

    return check
