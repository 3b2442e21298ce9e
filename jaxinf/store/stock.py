"""The files by which zarr v3 and Orbax read a step, and arrays that it carries.

    commit.json: path, shape, dtype, CRC-32C    carry.PATH/zarr.json, c/0/0: one chunk

Invariant: documents describe raw chunk files: with the codec ``bytes``, little endian,
a chunk file is the array's memory. Files of a step with a record are replaced, and
never written. A store whose steps carry nothing has no file of it.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.compat import ORBAX_DICT_KEY, ORBAX_HANDLER
from jaxinf.documents import MOST_BYTES, encode
from jaxinf.errors import StoreCorruptError
from jaxinf.layout import scales_length
from jaxinf.store.commit import CARRY, CarriedArray
from jaxinf.store.documents import encode_key
from jaxinf.store.manifest import Manifest, dtype_of
from jaxinf.transfer import (
    crc32c,
    read_beneath,
    translated,
    write_bytes_atomically,
)

_ITEM = "default"  # a checkpoint's only tree for Orbax's CheckpointManager
_STATE = "state"  # the name of that tree for Orbax's newer Checkpointer
OF_ITEMS = ("_CHECKPOINT_METADATA", "orbax.checkpoint")
"""Documents that are a checkpoint's own; it shares others with a slot."""

TIMES = ("init_timestamp_nsecs", "commit_timestamp_nsecs")
"""Keys of a document that say when it was made."""


@cache
def array_document(
    shape: tuple[int, ...], chunk_shape: tuple[int, ...], dtype: str
) -> bytes:
    """Returns ``zarr.json`` of one array; zarr has NumPy's names of all dtypes."""
    return encode(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": dtype,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": chunk_shape},
            },
            "chunk_key_encoding": {
                "name": "default",
                "configuration": {"separator": "/"},
            },
            "fill_value": dtype_of(dtype).type(0).item(),
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "attributes": {},
        }
    )


def tree_document(manifest: Manifest, carry: Sequence[CarriedArray] = ()) -> bytes:
    """Returns ``_METADATA``: the pytree that Orbax restores, as nested dicts."""
    keys = [(s.name, *leaf.path) for leaf in manifest.leaves for s in leaf.states]
    tree: dict[str, Any] = {}
    for raw in [*keys, *((CARRY, *one.path) for one in carry)]:
        path = tuple(encode_key(key) for key in raw)
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


def step_documents(
    manifest: Manifest,
    carry: Sequence[CarriedArray] = (),
    *,
    is_item: bool = False,
) -> Iterator[tuple[str, bytes]]:
    """Yields the documents by which other tools read a step's arrays, by name.

    With `is_item` the tree is a checkpoint's item, as Orbax's managers expect, rather
    than the checkpoint itself.
    """
    for name, leaf, state in manifest.arrays():
        shape, chunk_shape = leaf.shape, leaf.chunk_shape
        if state.codec == "scale":
            chunk_shape = (scales_length(leaf.grid),)
            shape = (len(leaf.csds) * chunk_shape[0],)
        yield f"{name}/zarr.json", array_document(shape, chunk_shape, state.dtype)
    for one in carry:
        yield f"{one.name}/zarr.json", _carried_document(one)
    group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    yield "zarr.json", encode(group)
    yield "_METADATA", tree_document(manifest, carry)
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


def orbax_links(manifest: Manifest, carry: Sequence[CarriedArray]) -> dict[str, str]:
    """Returns a checkpoint's links, by which Orbax's managers find its only item."""
    names = [name for name, _, _ in manifest.arrays()]
    names += ["_METADATA", *(one.name for one in carry)]
    return {**{f"{_ITEM}/{name}": f"../{name}" for name in names}, _STATE: _ITEM}


# --- arrays that a step carries ------------------------------------------------------


def make_carry(step: Path, manifest: Manifest, carry: Sequence[CarriedArray]) -> None:
    """Gives a step without a record the directories of these arrays, and no others."""
    if CARRY in manifest.state_names:  # whose arrays have such names
        return
    with translated("carried arrays", step):
        for entry in [*step.glob(CARRY), *step.glob(f"{CARRY}.*")]:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        for one in carry:
            (step / one.name).mkdir()
            (step / one.name / "zarr.json").write_bytes(_carried_document(one))
        document = tree_document(manifest, carry)
        if read_beneath(step, "_METADATA", MOST_BYTES) != document:
            write_bytes_atomically(step / "_METADATA", document)


def write_carry(
    step: Path, carry: Sequence[CarriedArray], values: Sequence[bytes]
) -> None:
    """Writes the arrays beside their documents; the caller syncs them."""
    for one, value in zip(carry, values, strict=True):
        chunk = step / one.chunk
        with translated("write", chunk):
            chunk.parent.mkdir(parents=True, exist_ok=True)
            chunk.unlink(missing_ok=True)  # a checkpoint may have it, too
            chunk.write_bytes(value)


def read_carry(
    step: Path,
    carry: Sequence[CarriedArray],
    fetch: Callable[[str], bytes] | None = None,
) -> list[bytes]:
    """Returns the arrays of a step, whose chunks are fetched if they are no files.

    A StoreError is raised of one that is missing, or differs from its checksum.
    """
    values = []
    for one in carry:
        get = fetch or partial(read_beneath, step, most_bytes=one.num_bytes)
        raw = get(one.chunk)
        found = crc32c(np.frombuffer(raw, np.uint8))
        if len(raw) != one.num_bytes or f"{found:08x}" != one.crc32c:
            raise StoreCorruptError(
                f"{step}: {one.chunk}: expected {one.num_bytes} bytes with CRC-32C "
                f"{one.crc32c}, found {len(raw)} with {found:08x}; restore a "
                "checkpoint or a backup"
            )
        values.append(raw)
    return values


def _carried_document(one: CarriedArray) -> bytes:
    chunk_shape = tuple(max(1, length) for length in one.shape)
    return array_document(tuple(one.shape), chunk_shape, one.dtype)
