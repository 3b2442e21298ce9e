"""Documents and links by which zarr v3 and Orbax read a step; their checksums.

Invariant: they describe raw chunk files: with the codec ``bytes``, little endian, a
chunk file is the array's memory. A document with another checksum than its step's
record has was not written by jaxinf.
"""

import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.compat import ORBAX_DICT_KEY, ORBAX_HANDLER
from jaxinf.documents import MOST_BYTES, encode
from jaxinf.store.commit import CARRY, CarriedArray
from jaxinf.store.leaves import dtype_of
from jaxinf.store.manifest import Manifest
from jaxinf.store.names import encode_key
from jaxinf.transfer import crc32c, read_beneath

ARRAYS = "*/zarr.json"
"""The common name of all arrays' metadata."""

_NAMES = ("zarr.json", "_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt")

STOCK_DOCUMENTS = (*_NAMES, ARRAYS)
"""All names of `stock_documents`."""

_ITEM = "default"  # a checkpoint's only tree for Orbax's CheckpointManager
_STATE = "state"  # the name of that tree for Orbax's newer Checkpointer


def array_metadata(
    shape: Sequence[int], chunk_shape: Sequence[int], dtype: str
) -> dict[str, Any]:
    """Returns ``zarr.json`` of one array; zarr has NumPy's names of all dtypes."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(chunk_shape)},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": dtype_of(dtype).type(0).item(),
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {},
    }


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


def checkpoint_document(timestamp_ns: int, *, is_item: bool) -> bytes:
    """Returns ``_CHECKPOINT_METADATA``, which marks a directory as a checkpoint."""
    return encode(
        {
            "item_handlers": {_ITEM: ORBAX_HANDLER} if is_item else ORBAX_HANDLER,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": timestamp_ns,
            "commit_timestamp_nsecs": timestamp_ns,
            "custom_metadata": {},
        }
    )


def step_documents(
    manifest: Manifest,
    timestamp_ns: int,
    carry: Sequence[CarriedArray] = (),
    *,
    is_item: bool = False,
) -> Iterator[tuple[str, bytes]]:
    """Yields the documents by which other tools read a step's chunks, by name.

    Args:
      manifest: manifest of the store.
      timestamp_ns: the time that they say.
      carry: arrays that the step carries, which have documents of their own.
      is_item: whether the tree is the item of a checkpoint, as Orbax's managers expect,
        rather than the checkpoint itself.
    """
    for leaf in manifest.leaves:
        for state in leaf.states:
            shape, chunk_shape = map(tuple, leaf.array_grid(state))
            content = _array_document(shape, chunk_shape, state.dtype)
            yield f"{leaf.array_name(state.name)}/zarr.json", content
    group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    yield "zarr.json", encode(group)
    yield "_METADATA", tree_document(manifest, carry)
    yield "_CHECKPOINT_METADATA", checkpoint_document(timestamp_ns, is_item=is_item)
    yield "commit_success.txt", b"Checkpoint commit was successful.\n"


@cache
def _array_document(
    shape: tuple[int, ...], chunk_shape: tuple[int, ...], dtype: str
) -> bytes:
    return encode(array_metadata(shape, chunk_shape, dtype))


def create_documents(
    step: Path,
    manifest: Manifest,
    timestamp_ns: int,
    carry: Sequence[CarriedArray] = (),
    *,
    is_item: bool = False,
) -> None:
    """Writes `step_documents` into a directory, with links to an item if it is one."""
    made: set[str] = set()
    for name, content in step_documents(manifest, timestamp_ns, carry, is_item=is_item):
        make_folder(os.path.dirname(f"{step}/{name}"), made)
        with open(f"{step}/{name}", "wb", buffering=0) as document:
            document.write(content)
    if is_item:
        make_orbax_item(step, manifest, carry)


def make_folder(folder: str, made: set[str]) -> None:
    """Makes a directory and those above it, but for those that are `made`."""
    if folder not in made:
        try:
            os.mkdir(folder)
        except FileExistsError:
            pass
        except FileNotFoundError:
            make_folder(os.path.dirname(folder), made)
            os.mkdir(folder)
        made.add(folder)


# --- checksums -----------------------------------------------------------------------


def document_names(manifest: Manifest) -> list[str]:
    """Returns the names of a step's documents in other formats."""
    return [*_NAMES, *_arrays(manifest)]


def stock_documents(step: Path, manifest: Manifest) -> dict[str, str]:
    """Returns CRC-32Cs of a step's documents in other formats, 8 hex digits, by name.

    The arrays' ``zarr.json`` are one entry, as if they were one file, in the manifest's
    order of leaves and states.

    Args:
      step: a slot or a checkpoint.
      manifest: manifest of the store.

    Raises:
      StoreIOError: a document is missing, or the drive failed.
    """
    return {name: document_checksum(step, manifest, name) for name in STOCK_DOCUMENTS}


def document_checksum(step: Path, manifest: Manifest, name: str) -> str:
    """Returns one of `stock_documents`."""
    names = _arrays(manifest) if name == ARRAYS else [name]
    raw = b"".join(read_beneath(step, name, MOST_BYTES) for name in names)
    return f"{crc32c(np.frombuffer(raw, np.uint8)):08x}"


def _arrays(manifest: Manifest) -> Iterator[str]:
    for leaf in manifest.leaves:
        for state in leaf.states:
            yield f"{leaf.array_name(state.name)}/zarr.json"


# --- Orbax's managers ----------------------------------------------------------------


def orbax_links(manifest: Manifest, carry: Sequence[CarriedArray]) -> dict[str, str]:
    """Returns a checkpoint's links, by which Orbax's managers find its only item."""
    names = ["_METADATA", *(os.path.dirname(name) for name in _arrays(manifest))]
    names += [one.name for one in carry]
    return {**{f"{_ITEM}/{name}": f"../{name}" for name in names}, _STATE: _ITEM}


def make_orbax_item(
    step: Path, manifest: Manifest, carry: Sequence[CarriedArray]
) -> None:
    """Makes a step's directory a checkpoint for Orbax's managers."""
    (step / "orbax.checkpoint").touch()
    (step / _ITEM).mkdir(exist_ok=True)
    for name, target in orbax_links(manifest, carry).items():
        (step / name).unlink(missing_ok=True)
        (step / name).symlink_to(target)
