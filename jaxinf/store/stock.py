"""The files by which zarr v3 and Orbax read a step, and arrays that it carries.

    commit.json: path, shape, dtype, CRC-32C    carry.PATH/zarr.json, c/0/0: one chunk

Invariant: documents describe raw chunk files: with the codec ``bytes``, little endian,
a chunk file is the array's memory. Files of a step with a record are replaced, and
never written. A store whose steps carry nothing has no file of it.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.compat import ORBAX_DICT_KEY, ORBAX_HANDLER
from jaxinf.documents import MOST_BYTES, DocumentError, encode, parse_json
from jaxinf.errors import StoreCorruptError, StoreError
from jaxinf.store.commit import CARRY, CarriedArray
from jaxinf.store.directory import link_file
from jaxinf.store.documents import encode_key
from jaxinf.store.manifest import Manifest, dtype_of
from jaxinf.transfer import (
    check_holds,
    crc32c,
    read_beneath,
    translated,
    write_bytes_atomically,
)

_ITEM = "default"  # a checkpoint's only tree for Orbax's CheckpointManager
_STATE = "state"  # the name of that tree for Orbax's newer Checkpointer
_OF_ITEMS = ("_CHECKPOINT_METADATA", "orbax.checkpoint")  # others are a slot's, too
_TIMES = ("init_timestamp_nsecs", "commit_timestamp_nsecs")


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
    """Yields the documents by which other tools read a step's chunks, by name.

    Args:
      carry: arrays that the step carries, which have documents of their own.
      is_item: whether the tree is the item of a checkpoint, as Orbax's managers expect,
        rather than the checkpoint itself.
    """
    for name, leaf, state in manifest.arrays():
        shape, chunk_shape = map(tuple, leaf.array_grid(state))
        yield f"{name}/zarr.json", array_document(shape, chunk_shape, state.dtype)
    group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    yield "zarr.json", encode(group)
    yield "_METADATA", tree_document(manifest, carry)
    now = time.time_ns()
    checkpoint = {
        "item_handlers": {_ITEM: ORBAX_HANDLER} if is_item else ORBAX_HANDLER,
        "metrics": {},
        "performance_metrics": {},
        **dict.fromkeys(_TIMES, now),
        "custom_metadata": {},
    }
    yield "_CHECKPOINT_METADATA", encode(checkpoint)
    yield "commit_success.txt", b"Checkpoint commit was successful.\n"
    if is_item:
        yield "orbax.checkpoint", b""  # by which Orbax knows a checkpoint


def create_documents(
    step: Path,
    manifest: Manifest,
    carry: Sequence[CarriedArray] = (),
    *,
    is_item: bool = False,
    source: Path | None = None,
) -> None:
    """Writes `step_documents` into a directory, with links to an item if it is one.

    With a source they are links to those of that step, as far as they say the same.
    """
    made: set[str] = set()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    for name, content in step_documents(manifest, carry, is_item=is_item):
        make_folder(os.path.dirname(f"{step}/{name}"), made)
        if source is not None and not (is_item and name in _OF_ITEMS):
            check_holds(source, name, 0)  # no link leads there
            link_file(source / name, step / name)
            continue
        with open(os.open(f"{step}/{name}", flags, 0o644), "wb", 0) as document:
            document.write(content)
    if is_item:
        make_folder(f"{step}/{_ITEM}", made)
        for name, target in orbax_links(manifest, carry).items():
            (step / name).symlink_to(target)


def document_problems(
    step: Path,
    manifest: Manifest,
    carry: Sequence[CarriedArray],
    *,
    is_item: bool,
) -> Iterator[tuple[str, str]]:
    """Yields the name and the problem of each document or carried array that differs.

    Spelling and times of documents may differ.
    """
    own = [(one.document, _carried_document(one)) for one in carry]
    for name, expected in (*step_documents(manifest, carry, is_item=is_item), *own):
        try:
            found = read_beneath(step, name, MOST_BYTES)
            if found != expected and _content(found) != _content(expected):
                yield name, "expected what jaxinf writes, found others"
        except (StoreError, DocumentError) as error:
            yield name, f"cannot be read ({error})"
    for one in carry:
        try:
            read_carry(step, [one])
        except StoreError as error:
            yield one.chunk, str(error)


def _content(raw: bytes) -> Any:
    """Returns what a document says, but for times."""
    found = parse_json(raw)
    for name in _TIMES:
        if isinstance(found, dict) and isinstance(found.get(name), int):
            del found[name]
    return found


def make_folder(folder: str, made: set[str]) -> None:
    """Makes a directory and those above it, but for those that are `made`."""
    if folder not in made:
        os.makedirs(folder, exist_ok=True)
        made.add(folder)


# --- Orbax's managers ----------------------------------------------------------------


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
        for entry in list(os.scandir(step)):
            if entry.name != CARRY and not entry.name.startswith(f"{CARRY}."):
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        for one in carry:
            (step / one.chunk).parent.mkdir(parents=True)
            (step / one.document).write_bytes(_carried_document(one))
        document = tree_document(manifest, carry)
        if read_beneath(step, "_METADATA", MOST_BYTES) != document:
            write_bytes_atomically(step / "_METADATA", document)


def write_carry(
    step: Path, carry: Sequence[CarriedArray], values: Sequence[bytes]
) -> None:
    """Writes the arrays, where `make_carry` has made room; the caller syncs them."""
    for one, value in zip(carry, values, strict=True):
        with translated("write", step / one.chunk):
            (step / one.chunk).unlink(missing_ok=True)  # a checkpoint may have it, too
            (step / one.chunk).write_bytes(value)


def link_carry(source: Path, target: Path, carry: Sequence[CarriedArray]) -> None:
    """Links the arrays of a step into another one, without a record."""
    for one in carry:
        (target / one.chunk).parent.mkdir(parents=True, exist_ok=True)
        for name in (one.document, one.chunk):
            check_holds(source, name, 0)  # no link leads there
            (target / name).unlink(missing_ok=True)
            link_file(source / name, target / name)


def read_carry(
    step: Path,
    carry: Sequence[CarriedArray],
    fetch: Callable[[str], bytes] | None = None,
) -> list[bytes]:
    """Returns the arrays of a step, whose chunks are fetched if they are no files.

    Raises:
      StoreCorruptError: one differs from its checksum.
      StoreError: one is missing, or cannot be read.
    """
    values = []
    for one in carry:
        if fetch is None:
            raw = read_beneath(step, one.chunk, one.num_bytes)
        else:
            raw = fetch(one.chunk)
        found = crc32c(np.frombuffer(raw, np.uint8))
        if len(raw) != one.num_bytes or f"{found:08x}" != one.crc32c:
            raise StoreCorruptError(
                f"{step}: {one.chunk}: expected {one.num_bytes} bytes with CRC-32C "
                f"{one.crc32c}, found {len(raw)} with {found:08x}; restore a "
                "checkpoint or a backup"
            )
        values.append(raw)
    return values


def carry_files(
    carry: Sequence[CarriedArray], values: Sequence[bytes]
) -> Mapping[str, bytes]:
    """Returns all files of the arrays, by name in a step."""
    found = {one.chunk: value for one, value in zip(carry, values, strict=True)}
    return found | {one.document: _carried_document(one) for one in carry}


def _carried_document(one: CarriedArray) -> bytes:
    chunk_shape = tuple(max(1, length) for length in one.shape)
    return array_document(tuple(one.shape), chunk_shape, one.dtype)
