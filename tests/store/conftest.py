"""Stores with a few small leaves, made and filled without an engine."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import raw_stores

from jaxinf.store import Manifest, Slot, StateRecord, StoreDirectory, create_store

STATES = (
    StateRecord("params", "float32"),
    StateRecord("mu", "bfloat16"),
    StateRecord("count", "int32"),
)
# More than one chunk, odd rows, one row, one element, none.
SHAPES: dict[tuple[str, ...], tuple[int, ...]] = {
    ("h0", "attn", "kernel"): (13, 129),
    ("h0", "attn", "bias"): (129,),
    ("embed/%", "0"): (3, 4096),
    ("scale",): (),
    ("empty",): (0, 7),
}


def make_manifest(
    csds: Sequence[str] = (),
    states: Sequence[StateRecord] = STATES,
    shapes: dict[tuple[str, ...], tuple[int, ...]] | None = None,
    chunk_elements: int = 4096,
) -> Manifest:
    shapes = SHAPES if shapes is None else shapes
    leaves = {path: (shape, (1,) * len(shape)) for path, shape in shapes.items()}
    return raw_stores.make_manifest(states, leaves, csds, chunk_elements)


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
        roots = raw_stores.make_roots(place, name, num_csds)
        directory = StoreDirectory(place / name, make_manifest(roots, states))
        create_store(directory)
        return directory

    return make


@pytest.fixture
def write_step() -> Callable[..., dict[str, np.ndarray]]:
    """Writes a step's chunks as the engine does, and publishes it."""

    def write(directory: StoreDirectory, slot: Slot, step: int) -> dict:
        rng = np.random.default_rng(step)

        def draw(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            return rng.integers(-99, 99, shape).astype(dtype)

        return raw_stores.publish(directory, slot, draw, step=step)

    return write
