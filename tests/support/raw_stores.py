"""Stores of raw files, made, filled and read without an engine."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

import jaxinf
from jaxinf.layout import choose_grid
from jaxinf.store import (
    ChunkFile,
    CommitRecord,
    LeafRecord,
    Manifest,
    Slot,
    StateRecord,
    StepReader,
    StoreDirectory,
    dtype_of,
    find_leaf,
    lay_out,
    seal,
)
from jaxinf.transfer import crc32c


@contextlib.contextmanager
def memory_directory() -> Iterator[Path]:
    """A new directory in a tmpfs; on the temporary files' drive without one.

    Stores in it that are still open are closed first: the thread that commits their
    last step makes files, and a directory that gets files cannot be removed.
    """
    has_memory = os.access("/dev/shm", os.W_OK)
    path = tempfile.mkdtemp(
        dir="/dev/shm" if has_memory else None, prefix="jaxinf-test-"
    )
    try:
        yield Path(path).resolve()
    finally:
        for manifest in Path(path).resolve().rglob("jaxinf.json"):
            jaxinf.close(manifest.parent)
        shutil.rmtree(path)


def make_roots(place: Path, name: str, num_csds: int) -> list[str]:
    """Makes `num_csds` CSD roots."""
    roots = [place / f"{name}-csd{number}" for number in range(num_csds)]
    for root in roots:
        root.mkdir()
    return [str(root) for root in roots]


def make_manifest(
    states: Sequence[StateRecord],
    leaves: Mapping[tuple[str, ...], tuple[tuple[int, ...], tuple[int, ...]]],
    csd_roots: Sequence[str] = (),
    chunk_elements: int = 4096,
) -> Manifest:
    """Makes a manifest of leaves that all have the same states.

    Args:
      states: the states of each leaf.
      leaves: shape and shard counts by path.
      csd_roots, chunk_elements: as for a real store.
    """
    records = [
        LeafRecord(
            path=path,
            shape=shape,
            dtype="float32",
            kernel="k0",
            states=tuple(states),
            chunk_shape=choose_grid(
                shape, max_chunk_elements=chunk_elements, shard_counts=shards
            ).chunk_shape,
            shard_counts=shards,
            csds=(),
        )
        for path, (shape, shards) in leaves.items()
    ]
    contents = Manifest.of_contents(
        kernels={"k0": ("%0 = mul #, gradient", "update = %0")},
        leaves=records,
        created_by={"jaxinf": "0"},
    )
    return lay_out(contents, csd_roots)


def chunk_of(
    directory: StoreDirectory, leaf: int, state: str, chunk: int = 0
) -> ChunkFile:
    """Returns a chunk of a state's array, by numbers and the state's name."""
    record = directory.manifest.leaves[leaf]
    return ChunkFile(leaf, record, record.state(state), chunk)


def chunk_file(
    directory: StoreDirectory, place: str, leaf: int, state: str, chunk: int = 0
) -> Path:
    """Returns the real file of a step's chunk; the arguments are as for `chunk_of`."""
    return directory.chunk_file(place, chunk_of(directory, leaf, state, chunk))


def fill_slot(
    directory: StoreDirectory,
    slot: Slot,
    values_of: Callable[[tuple[int, ...], np.dtype], np.ndarray],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Writes a step's chunks like the engine; returns arrays and checksums by name.

    Args:
      values_of: makes an array of a shape and dtype.
    """
    arrays, checksums = {}, {}
    for number, leaf in enumerate(directory.manifest.leaves):
        for state in leaf.states:
            values = values_of(leaf.shape, dtype_of(state.dtype))
            sums = []
            for position, chunk in enumerate(leaf.grid.chunks()):
                data = np.ascontiguousarray(values[chunk.slices])
                sums.append(crc32c(data))
                one = ChunkFile(number, leaf, state, position)
                file = directory.prepare_write(slot, one)
                with open(file, "r+b") as stream:
                    stream.write(data.tobytes())
            arrays[leaf.array_name(state.name)] = values
            checksums[leaf.array_name(state.name)] = np.asarray(sums, np.uint32)
    directory.sync()
    return arrays, checksums


def publish(directory: StoreDirectory, slot: Slot, draw: Any, **record: Any) -> dict:
    """Writes a step's chunks and its record as the engine does; returns the arrays.

    Args:
      draw: as for `fill_slot`.
      record: fields of the record.
    """
    if directory.committed_slot() is not None:
        directory.unpublish(slot)
    arrays, checksums = fill_slot(directory, slot, draw)
    fields = {"scalar_state": (), "checksums": checksums} | record
    directory.write_record(slot, CommitRecord(**fields))
    directory.flip(slot)
    return arrays


def any_bits(rng: np.random.Generator, shape: tuple, dtype: np.dtype) -> np.ndarray:
    """Draws values of all kinds: NaN with payloads, denormals, infinities."""
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).reshape(shape)


def edit(
    file: Path, change: Callable[[Any], Any] = lambda document: None, **values: Any
) -> None:
    """Changes a sealed document, and seals it anew.

    Args:
      change: called with the document.
      values: of its keys.
    """
    document = json.loads(file.read_bytes())
    change(document)
    file.write_bytes(seal(document | values))


def flip_bit(file: Path, at: int = 0) -> None:
    """Flips one bit of a file in place, or flips it back."""
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 4]))


def read_array(step: Path, leaf: LeafRecord, state: str) -> np.ndarray:
    """Returns an array of a step's directory, in the form that is stored.

    As tensorstore shows it, without jaxinf's readers.
    """
    path = f"{step / leaf.array_name(state)}/"
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
    return tensorstore.open(spec, open=True, read=True).result().read().result()


def decoded(reader: StepReader, leaf: LeafRecord, state: StateRecord) -> np.ndarray:
    """Returns an array of a step in the leaf's shape, coded states as float32."""
    out = np.empty(leaf.shape, dtype_of(state.decoded().dtype))
    for box, values in reader.boxes(leaf, state, 1 << 20):
        out[box.slices] = values
    return out


def stored(store: jaxinf.Store, state: str, leaf: str) -> np.ndarray:
    """Returns an array of an open store's last step."""
    store.wait()
    record = find_leaf(StoreDirectory.open(store.path).manifest, state, leaf)
    return read_array(store.path / "current", record, state)
