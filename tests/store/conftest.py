"""Stores of raw files, made and filled without an engine."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxinf.layout import assign_csds, choose_grid
from jaxinf.store import (
    CommitRecord,
    LeafRecord,
    Manifest,
    Slot,
    StateRecord,
    StoreDirectory,
    dtype_of,
    stored_bytes,
)

STATES = (
    StateRecord("params", "float32"),
    StateRecord("mu", "bfloat16"),
    StateRecord("count", "int32"),
)
# More than one chunk, odd rows, one row, one element, none.
SHAPES: dict[tuple[str, ...], tuple[int, ...]] = {
    ("h0", "attn", "kernel"): (97, 129),
    ("h0", "attn", "bias"): (129,),
    ("embed/%", "0"): (3, 4096),
    ("scale",): (),
    ("empty",): (0, 7),
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


def make_manifest(
    csds: tuple[str, ...] = (),
    states: tuple[StateRecord, ...] = STATES,
    shapes: dict[tuple[str, ...], tuple[int, ...]] | None = None,
    chunk_elements: int = 4096,
) -> Manifest:
    leaves = []
    for path, shape in (SHAPES if shapes is None else shapes).items():
        grid = choose_grid(shape, max_chunk_elements=chunk_elements)
        sizes = [sum(stored_bytes(c, s) for s in states) for c in grid.chunks()]
        leaves.append(
            LeafRecord(
                path=path,
                shape=shape,
                dtype="float32",
                kernel="k0",
                states=states,
                chunk_shape=grid.chunk_shape,
                shard_counts=(1,) * len(shape),
                csds=tuple(assign_csds(sizes, max(1, len(csds)))),
            )
        )
    return Manifest(
        store_id=uuid.uuid4().hex,
        csds=csds,
        kernels={"k0": ("%0 = mul #, gradient", "update = %0")},
        leaves=tuple(leaves),
        created_by={"jaxinf": "0"},
    )


@pytest.fixture
def manifest_of() -> Callable[..., Manifest]:
    """Makes manifests; see `make_manifest`."""
    return make_manifest


@pytest.fixture
def make_directory(place: Path) -> Callable[..., StoreDirectory]:
    """Creates a store, without a step, with its chunks on a number of CSD roots."""

    def make(
        name: str = "store", num_csds: int = 0, states: tuple[StateRecord, ...] = STATES
    ) -> StoreDirectory:
        roots = [place / f"{name}-csd{i}" for i in range(num_csds)]
        for root in roots:
            root.mkdir()
        manifest = make_manifest(tuple(map(str, roots)), states)
        directory = StoreDirectory(place / name, manifest)
        directory.create()
        return directory

    return make


@pytest.fixture
def write_step() -> Callable[..., dict[str, np.ndarray]]:
    """Writes a step's chunks as the engine does, and publishes it."""

    def write(directory: StoreDirectory, slot: Slot, step: int) -> dict:
        rng = np.random.default_rng(step)
        arrays = {}
        if directory.committed_slot() is not None:
            directory.unpublish(slot)
        for number, leaf in enumerate(directory.manifest.leaves):
            for state in leaf.states:
                values = rng.integers(-99, 99, leaf.shape).astype(dtype_of(state.dtype))
                arrays[leaf.array_name(state.name)] = values
                for position, chunk in enumerate(directory.chunks[number]):
                    file = directory.prepare_write(slot, number, position, state.name)
                    with open(file, "r+b") as stream:
                        stream.write(values[chunk.slices].tobytes())
        directory.sync()
        directory.publish(slot, CommitRecord(step=step, scalar_state=()))
        return arrays

    return write
