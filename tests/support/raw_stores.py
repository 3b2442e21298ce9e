"""Stores of raw files, made, filled and read without an engine."""

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import tensorstore

import jaxinf
from jaxinf.layout import choose_grid
from jaxinf.store import (
    ChunkFile,
    CommitRecord,
    LeafRecord,
    Manifest,
    StoreDirectory,
    create_store,
    dtype_of,
    find_leaf,
    place_chunks,
    seal,
)
from jaxinf.transfer import crc32c


@contextlib.contextmanager
def memory_directory():
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


def make_roots(place, name, num_csds):
    roots = [place / f"{name}-csd{number}" for number in range(num_csds)]
    for root in roots:
        root.mkdir()
    return [str(root) for root in roots]


def make_manifest(states, leaves, csd_roots=(), chunk_elements=4096):
    """Makes a manifest of leaves, by path: shape and shards; all have these states."""
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
    )
    return place_chunks(contents, csd_roots)


def chunk_of(directory, leaf, state, chunk=0):
    """Returns a chunk of a state's array, by numbers and the state's name."""
    record = directory.manifest.leaves[leaf]
    return ChunkFile(leaf, record, record.state(state), chunk)


def chunk_file(directory, place, leaf, state, chunk=0):
    """Returns the real file of a step's chunk; the arguments are as for `chunk_of`."""
    return directory.chunk_path(place, chunk_of(directory, leaf, state, chunk))


def make_store(path, states, leaves, csd_roots=(), chunk_elements=4096):
    """Creates a store without a step; see `make_manifest`."""
    manifest = make_manifest(states, leaves, csd_roots, chunk_elements)
    directory = StoreDirectory(path, manifest)
    create_store(directory)
    return directory


def commit(directory, slot, draw, **record):
    """Writes a step as the engine does; returns its arrays, which `draw` makes."""
    if directory.committed_slot() is not None:
        directory.remove_record(slot)
    arrays, checksums = {}, {}
    for number, leaf in enumerate(directory.manifest.leaves):
        for state in leaf.states:
            name = leaf.array_name(state.name)
            arrays[name] = values = draw(leaf.shape, dtype_of(state.dtype))
            parts = [np.ascontiguousarray(values[c.slices]) for c in leaf.grid.chunks()]
            checksums[name] = np.asarray([crc32c(part) for part in parts], np.uint32)
            for position, part in enumerate(parts):
                one = ChunkFile(number, leaf, state, position)
                file = directory.prepare_write(slot, one)
                with open(file, "r+b") as stream:
                    stream.write(part.tobytes())
    directory.sync()
    fields = {"scalar_state": (), "checksums": checksums} | record
    directory.write_record(slot, CommitRecord(**fields))
    directory.flip(slot)
    return arrays


def any_bits(rng, shape, dtype):
    """Draws values of all kinds: NaN with payloads, denormals, infinities."""
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).reshape(shape)


def edit(file, change=lambda document: None, **values):
    """Changes a sealed document by a function or by values, and seals it anew."""
    document = json.loads(file.read_bytes())
    change(document)
    file.write_bytes(seal(document | values))


def flip_bit(file, at=0):
    """Flips one bit of a file in place, or flips it back."""
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 4]))


def bytes_below(*roots):
    """Returns every file's bytes, except locks', and symlinks' targets."""
    found = {}
    for root in roots:
        for folder, folders, files in os.walk(root):
            for name in (*folders, *files):
                path = os.path.join(folder, name)
                if os.path.islink(path):
                    found[path] = os.readlink(path)
                elif os.path.isfile(path) and not name.endswith("lock"):
                    found[path] = Path(path).read_bytes()
    return found


def read_array(step, leaf, state):
    """Returns an array of a step's directory, in the form that is stored.

    As tensorstore shows it, without jaxinf's readers.
    """
    path = f"{step / leaf.array_name(state)}/"
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
    return tensorstore.open(spec, open=True, read=True).result().read().result()


def decoded(reader, leaf, state):
    """Returns an array of a step in the leaf's shape, coded states as float32."""
    out = np.empty(leaf.shape, dtype_of(state.decoded().dtype))
    for box, values in reader.boxes(leaf, state, 1 << 20):
        out[box.slices] = values
    return out


def stored(store, state, leaf):
    """Returns an array of an open store's last step."""
    store.wait()
    record = find_leaf(StoreDirectory.open(store.path).manifest, state, leaf)
    return read_array(store.path / "current", record, state)
