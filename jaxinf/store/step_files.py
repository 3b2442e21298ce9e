"""The files of one step: its chunks, and what other zarr readers and Orbax need.

Invariant: with the codec ``bytes``, little endian, a chunk file is the array's memory.
Files of a step with a record are replaced, and never written.
"""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

from jaxinf.compat import ORBAX_DICT_KEY, ORBAX_HANDLER
from jaxinf.documents import MOST_BYTES, encode
from jaxinf.layout import scales_length
from jaxinf.store.carried_arrays import CARRY, CarriedArray
from jaxinf.store.directory import StoreDirectory, is_folder, link_beneath, link_file
from jaxinf.store.manifest import ChunkFile, Manifest, dtype_of
from jaxinf.store.names import encode_key
from jaxinf.transfer import (
    allocate_file,
    read_beneath,
    translated,
    write_bytes_atomically,
)

TIMES = ("init_timestamp_nsecs", "commit_timestamp_nsecs")
"""Keys of a document that say when it was made."""

_ITEM = "default"  # a checkpoint's only tree for Orbax's CheckpointManager
_STATE = "state"  # the name of that tree for Orbax's newer Checkpointer
_ITEM_DOCUMENTS = ("_CHECKPOINT_METADATA", "orbax.checkpoint")  # a slot's differ

StepFile: TypeAlias = bytes | CarriedArray | ChunkFile | str
"""A document's content, an array's only chunk, a chunk, or the target of a link."""


def step_files(
    directory: StoreDirectory,
    place: str,
    carry: Sequence[CarriedArray],
    *,
    final_place: str | None = None,
) -> Iterator[tuple[str, StepFile]]:
    """Yields the files of a step by name; the arguments are those of `make_step_files`.

    A checkpoint has links by which Orbax's managers find its only item. With CSDs a
    step has links to the chunks there, for other tools.
    """
    manifest, is_item = directory.manifest, place.startswith("checkpoints/")
    yield from step_documents(manifest, carry, is_item=is_item)
    yield from ((array.chunk, array) for array in carry)
    if is_item:
        names = [name for name, _, _ in manifest.arrays()]
        for name in (*names, "_METADATA", *(array.name for array in carry)):
            yield f"{_ITEM}/{name}", f"../{name}"
        yield _STATE, _ITEM
    roots = directory.chunk_roots(final_place or place)
    for chunk in manifest.held_chunks():
        yield chunk.name, chunk
        if manifest.csds:
            yield chunk.name, f"{roots[chunk.csd]}/{chunk.name}"


def make_step_files(
    directory: StoreDirectory,
    place: str,
    carry: Sequence[CarriedArray] = (),
    *,
    source: str | None = None,
    final_place: str | None = None,
) -> None:
    """Makes a step's documents, and those chunk files and links that do not exist.

    Hard links are made to real files on the same CSD, because a link to a symlink would
    pin nothing, and hard links do not cross file systems.

    Args:
      source: Place of a step whose files are hard-linked, documents as far as they say
        the same. Without it chunk files are allocated.
      final_place: The place that the step gets when it is complete, if another.
    """
    step, is_item = directory.step_path(place), place.startswith("checkpoints/")
    linked = None if source is None else directory.step_path(source)
    roots = [str(path) for path in directory.chunk_roots(place)]
    make_folder = cache(partial(os.makedirs, exist_ok=True))
    # A store has tens of thousands, and a `Path` costs as much as a file.
    for name, content in step_files(directory, place, carry, final_place=final_place):
        root = roots[content.csd] if isinstance(content, ChunkFile) else step
        file = f"{root}/{name}"
        make_folder(os.path.dirname(file))
        match content:
            case bytes() if linked is None or (is_item and name in _ITEM_DOCUMENTS):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
                with open(os.open(file, flags, 0o644), "wb", 0) as document:
                    document.write(content)
            case bytes() | CarriedArray() if linked is not None:
                link_beneath(linked, name, Path(file))
            case ChunkFile() if not os.path.lexists(file):
                if source is None:
                    allocate_file(file, content.file_bytes, content.num_bytes)
                else:
                    link_file(directory.chunk_path(source, content), Path(file))
            case str() if not os.path.lexists(file):
                os.symlink(content, file)


def make_carry(step: Path, manifest: Manifest, carry: Sequence[CarriedArray]) -> None:
    """Gives a step without a record the directories of these arrays, and no others."""
    if CARRY in manifest.state_names:  # whose arrays have such names
        return
    with translated("carried arrays", step):
        for entry in [*step.glob(CARRY), *step.glob(f"{CARRY}.*")]:
            if is_folder(entry):
                shutil.rmtree(entry)
            else:
                entry.unlink()
        for array in carry:
            (step / array.name).mkdir()
            (step / array.name / "zarr.json").write_bytes(_carried_document(array))
        document = _tree_document(manifest, carry)
        if read_beneath(step, "_METADATA", MOST_BYTES) != document:
            write_bytes_atomically(step / "_METADATA", document)


# --- documents for other tools --------------------------------------------------------


def step_documents(
    manifest: Manifest, carry: Sequence[CarriedArray] = (), *, is_item: bool = False
) -> Iterator[tuple[str, bytes]]:
    """Yields the documents by which other tools read a step's arrays, by name.

    With `is_item` the tree is a checkpoint's only item, as Orbax's managers expect.
    """
    for name, leaf, state in manifest.arrays():
        shape, chunk_shape = leaf.shape, leaf.chunk_shape
        if state.codec == "scale":
            chunk_shape = (scales_length(leaf.grid),)
            shape = (len(leaf.csds) * chunk_shape[0],)
        yield f"{name}/zarr.json", _array_document(shape, chunk_shape, state.dtype)
    for array in carry:
        yield f"{array.name}/zarr.json", _carried_document(array)
    group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    yield "zarr.json", encode(group)
    yield "_METADATA", _tree_document(manifest, carry)
    now = time.time_ns()
    checkpoint = {
        "item_handlers": {_ITEM: ORBAX_HANDLER} if is_item else ORBAX_HANDLER,
        "metrics": {},
        "performance_metrics": {},
        **dict.fromkeys(TIMES, now),
        "custom_metadata": {},
    }
    yield "_CHECKPOINT_METADATA", encode(checkpoint)
    yield "commit_success.txt", b"Checkpoint commit was successful.\n"
    if is_item:
        yield "orbax.checkpoint", b""  # by which Orbax knows a checkpoint


@cache
def _array_document(
    shape: tuple[int, ...], chunk_shape: tuple[int, ...], dtype: str
) -> bytes:
    grid, keys = {"chunk_shape": chunk_shape}, {"separator": "/"}
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": grid},
        "chunk_key_encoding": {"name": "default", "configuration": keys},
        "fill_value": dtype_of(dtype).type(0).item(),
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {},
    }
    return encode(document)


def _carried_document(array: CarriedArray) -> bytes:
    chunk_shape = tuple(max(1, length) for length in array.shape)
    return _array_document(tuple(array.shape), chunk_shape, array.dtype)


def _tree_document(manifest: Manifest, carry: Sequence[CarriedArray]) -> bytes:
    """Returns ``_METADATA``: the pytree that Orbax restores, as nested dicts."""
    states = [(s.name, *leaf.path) for leaf in manifest.leaves for s in leaf.states]
    tree: dict[str, Any] = {}
    for keys in [*states, *((CARRY, *array.path) for array in carry)]:
        path = tuple(encode_key(key) for key in keys)
        tree[str(path)] = {
            "key_metadata": [{"key": key, "key_type": ORBAX_DICT_KEY} for key in path],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
    return encode(
        {
            "tree_metadata": tree,
            "use_ocdbt": False,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
    )
