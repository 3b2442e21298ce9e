"""The files of a step and of a store: their room, how they are made and removed.

    documents, links      by which zarr v3 and Orbax read a step as it lies
    carry.PATH/c/0/0      an array that a step carries, in one chunk; in commit.json
                          its path, shape, dtype and CRC-32C

Invariant: with the codec ``bytes``, little endian, a chunk file is the array's memory.
Files of a step with a record are replaced, and never written. Only files of this store
are removed, and only if it never committed a step, or is given up.
"""

import contextlib
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

from jaxinf.compat import ORBAX_DICT_KEY, ORBAX_HANDLER
from jaxinf.documents import MOST_BYTES, encode
from jaxinf.errors import StoreCorruptError, StoreFormatError, StoreSpaceError
from jaxinf.layout import scales_length
from jaxinf.store.commit import CARRY, CarriedArray, CommitRecord
from jaxinf.store.directory import SLOTS, StoreDirectory, link_beneath, link_file
from jaxinf.store.documents import encode_key
from jaxinf.store.manifest import ChunkFile, Manifest, dtype_of
from jaxinf.store.owners import check_owners, check_places, claim_csds
from jaxinf.terminal import format_bytes
from jaxinf.transfer import (
    allocate_file,
    crc32c,
    existing_parent,
    fsync_directory,
    open_beneath,
    read_beneath,
    translated,
    write_bytes_atomically,
)

BESIDE = re.compile(r"(?:stream|tokenizer)/[A-Za-z0-9_]+(?:\.[a-z]+)+")
"""Names of files beside a store's steps, which a run goes on with."""

TIMES = ("init_timestamp_nsecs", "commit_timestamp_nsecs")
"""Keys of a document that say when it was made."""

_ITEM = "default"  # a checkpoint's only tree for Orbax's CheckpointManager
_STATE = "state"  # the name of that tree for Orbax's newer Checkpointer
_OF_ITEMS = ("_CHECKPOINT_METADATA", "orbax.checkpoint")  # others it shares with a slot


def files_beside(store: Path) -> dict[str, bytes]:
    """Returns what a run needs beside its steps: cuts of programs, a tokenizer."""
    found = {}
    for name in ("stream", "tokenizer"):
        with contextlib.suppress(FileNotFoundError):
            os.close(open_beneath(store, name, os.O_DIRECTORY))  # it is no link
            files = [f"{name}/{file}" for file in sorted(os.listdir(store / name))]
            for file in filter(BESIDE.fullmatch, files):
                found[file] = read_beneath(store, file, MOST_BYTES)
    return found


def is_unfinished(path: Path) -> bool:
    """Whether a path has a store whose creation was interrupted; opens no file."""
    is_made = os.path.lexists(path / "current")
    return not is_made and os.path.lexists(path / "jaxinf.json")


def check_free_space(needs: Mapping[Path, int], what: str, remedy: str) -> None:
    """Raises StoreSpaceError if a file system lacks the bytes that directories need.

    These need not exist; `what` and `remedy` are parts of the message.
    """
    totals, places = Counter[int](), dict[int, Path]()
    for directory, need in needs.items():
        place = existing_parent(directory)
        device = place.stat().st_dev
        totals[device] += need
        places[device] = place
    for device, place in places.items():
        need, status = totals[device], os.statvfs(place)
        free = status.f_bavail * status.f_frsize
        if need > free:
            raise StoreSpaceError(
                f"{place}: {what} {need:,} bytes ({format_bytes(need)}) "
                f"there, the file system has {free:,} free ({format_bytes(free)}); "
                f"{remedy}"
            )


def required_bytes(directory: StoreDirectory, num_steps: int = 2) -> Counter[Path]:
    """Returns the bytes of a store's steps on each CSD, by default of both slots."""
    folders = directory.csd_directories
    found = Counter(dict.fromkeys(folders, 0))
    for one in directory.manifest.held():
        found[folders[one.csd]] += num_steps * one.drive_bytes
    return found


def check_space(directory: StoreDirectory, *, num_more: int = 0) -> None:
    """Refuses a store, not made yet, for whose slots, and more copies, is no room."""
    kept = f" and {num_more} kept steps" if num_more else ""
    check_free_space(
        required_bytes(directory, 2 + num_more),
        f"the store's two slots{kept} of {directory.manifest.num_params:,} params need",
        "free some, or choose another directory or more CSD roots",
    )


def create_store(directory: StoreDirectory) -> None:
    """Makes every directory and file of a new store, preallocated, without a step.

    The caller has called `check_space` before it locked the path.
    """
    check_places(directory)
    with translated("creation", directory.path):
        begin_store(directory)
        for slot in SLOTS:
            make_place(directory, slot)
    directory.sync()
    fsync_directory(directory.path)


def begin_store(directory: StoreDirectory) -> None:
    """Makes a store's own directories; with its manifest, its owner is known."""
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.manifest.write(directory.path / "jaxinf.json")
    claim_csds(directory, unmade=True)


def make_place(
    directory: StoreDirectory,
    place: str,
    carry: Sequence[CarriedArray] = (),
    *,
    source: str | None = None,
    named: str | None = None,
) -> None:
    """Makes a step's documents, and the chunk files and names that are not there.

    Links lead to real files inside the same CSD root, because a link to a symlink would
    pin nothing, and hard links do not cross file systems.

    Args:
      carry: arrays that the step carries.
      source: the step whose files are linked to, documents as far as they say the
        same; by default chunks have room.
      named: the name that the place gets when it is complete.
    """
    step, is_item = directory.step_path(place), place.startswith("checkpoints/")
    held = None if source is None else directory.step_path(source)
    roots = [str(path) for path in directory.data_paths(place)]
    make_folder = cache(partial(os.makedirs, exist_ok=True))
    # A store has tens of thousands, and a `Path` costs as much as a file.
    for name, what in step_files(directory, place, carry, named=named):
        file = f"{roots[what.csd] if isinstance(what, ChunkFile) else step}/{name}"
        make_folder(os.path.dirname(file))
        match what:
            case bytes() if held is None or (is_item and name in _OF_ITEMS):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
                with open(os.open(file, flags, 0o644), "wb", 0) as document:
                    document.write(what)
            case bytes() | CarriedArray() if held is not None:
                link_beneath(held, name, Path(file))
            case ChunkFile() if not os.path.lexists(file):
                if source is None:
                    allocate_file(file, what.file_bytes, what.num_bytes)
                else:
                    link_file(directory.chunk_file(source, what), Path(file))
            case str() if not os.path.lexists(file):
                os.symlink(what, file)


def discard_store(directory: StoreDirectory) -> None:
    """Removes a store that never committed a step; the caller holds its lock.

    One that did, or whose chunks are another store's, is refused.
    """
    check_never_committed(directory)
    remove_csds(directory)
    shutil.rmtree(directory.path / "slots", ignore_errors=True)
    fsync_directory(directory.path)  # without a manifest the rest cannot be removed
    with translated("removal", directory.path):
        (directory.path / "jaxinf.json").unlink(missing_ok=True)
    fsync_directory(directory.path)


def remove_csds(directory: StoreDirectory) -> None:
    """Removes what a store has on its CSDs, if it is the owner, and durably."""
    check_owners(directory, unmade=True)
    for folder in directory.csd_directories[: len(directory.manifest.csds)]:
        for name in (*SLOTS, "checkpoints", "."):  # the note of the owner goes last
            shutil.rmtree(folder / name, ignore_errors=True)
        if folder.parent.is_dir():
            fsync_directory(folder.parent)


def check_never_committed(directory: StoreDirectory) -> None:
    """Refuses a store with a committed step, also one that lost `current`."""
    if directory.committed_slot() is not None:
        raise StoreFormatError(
            f"{directory.path}: expected no committed step, found one"
        )
    for slot in SLOTS:
        record = directory.step_path(slot) / "commit.json"
        if record.exists() and (step := CommitRecord.read(record).step) > 0:
            raise StoreFormatError(
                f"{directory.path}: expected the symlink `current` to name the "
                f"committed slot, found none, but step {step} in slots/{slot}; was "
                "the store copied without its symlinks? Copy it with cp -a, or "
                f"restore the symlink (ln -s slots/{slot} current), to the slot of "
                "the higher step if both have a commit.json"
            )


# --- what other tools read ------------------------------------------------------------


@cache
def array_document(
    shape: tuple[int, ...], chunk_shape: tuple[int, ...], dtype: str
) -> bytes:
    """Returns ``zarr.json`` of one array; zarr has NumPy's names of all dtypes."""
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
    manifest: Manifest, carry: Sequence[CarriedArray] = (), *, is_item: bool = False
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


StepFile: TypeAlias = bytes | CarriedArray | ChunkFile | str
"""A document's content, an array's only chunk, a chunk, or the target of a link."""


def step_files(
    directory: StoreDirectory,
    place: str,
    carry: Sequence[CarriedArray],
    *,
    named: str | None = None,
) -> Iterator[tuple[str, StepFile]]:
    """Yields the files of a step by name; the arguments are those of `make_place`.

    Of a checkpoint they have links by which Orbax's managers find its only item, and
    with CSD roots links to the chunks there, for other tools.
    """
    manifest, is_item = directory.manifest, place.startswith("checkpoints/")
    yield from step_documents(manifest, carry, is_item=is_item)
    yield from ((one.chunk, one) for one in carry)
    if is_item:
        names = [name for name, _, _ in manifest.arrays()]
        for name in (*names, "_METADATA", *(one.name for one in carry)):
            yield f"{_ITEM}/{name}", f"../{name}"
        yield _STATE, _ITEM
    roots = directory.data_paths(named or place)
    for one in manifest.held():
        yield one.name, one
        if manifest.csds:
            yield one.name, f"{roots[one.csd]}/{one.name}"


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
        get = fetch or partial(read_beneath, step, limit_bytes=one.num_bytes)
        raw = get(one.chunk)
        found = f"{crc32c(raw):08x}"
        if len(raw) != one.num_bytes or found != one.crc32c:
            raise StoreCorruptError(
                f"{step}: {one.chunk}: expected {one.num_bytes} bytes with CRC-32C "
                f"{one.crc32c}, found {len(raw)} with {found}; restore a checkpoint or "
                "a backup"
            )
        values.append(raw)
    return values


def _carried_document(one: CarriedArray) -> bytes:
    chunk_shape = tuple(max(1, length) for length in one.shape)
    return array_document(tuple(one.shape), chunk_shape, one.dtype)
