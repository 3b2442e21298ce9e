"""The files of a new store: made with room for two slots, or removed again.

Invariant: only files of this store are removed, and only if it never committed a step.
"""

import contextlib
import logging
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from jaxinf.documents import MOST_BYTES, encode
from jaxinf.errors import StoreFormatError
from jaxinf.io import (
    PAGE_BYTES,
    fsync_directory,
    read_beneath,
    write_bytes_atomically,
)
from jaxinf.io.failures import translated
from jaxinf.store.commit import CARRY, CarriedArray, CommitRecord
from jaxinf.store.contents import StateRecord
from jaxinf.store.directory import SLOTS, Slot, StoreDirectory, other_slot
from jaxinf.store.manifest import Manifest
from jaxinf.store.owners import check_owners, check_places, make_csds
from jaxinf.store.space import check_free_space, stored_bytes
from jaxinf.store.stock_documents import document_names
from jaxinf.store.zarr_metadata import (
    COMMIT_SUCCESS_TEXT,
    array_metadata,
    group_metadata,
    orbax_checkpoint_metadata,
    orbax_tree_metadata,
)

_LOG = logging.getLogger("jaxinf")


def required_bytes(directory: StoreDirectory) -> dict[Path, int]:
    """Returns the bytes of a new store on each CSD, with both slots."""
    totals: dict[Path, int] = defaultdict(int)
    for _, record, chunks in directory.leaves():
        for position in record.held:
            chunk = chunks[position]
            need = sum(stored_bytes(chunk, state) for state in record.states)
            totals[directory.csd_directory(record.csds[position])] += 2 * need
    return dict(totals)


def _beside_bytes(directory: StoreDirectory) -> int:
    """Returns the bytes of both slots' directories and documents: a page for each."""
    num_pages = 0
    for number, record, _ in directory.leaves():
        for state in record.states:
            keys = [directory.state_chunk(number, n, state).key for n in record.held]
            folders = {key[:at] for key in keys for at, c in enumerate(key) if c == "/"}
            num_pages += 2 + len(folders)
    return 2 * PAGE_BYTES * num_pages


def check_space(directory: StoreDirectory, *, num_more: int = 0) -> None:
    """Refuses a store for which its file systems have no room.

    Args:
      directory: the store, not made yet.
      num_more: number of further copies of the state, beside the two slots.

    Raises:
      StoreSpaceError: names the file system, the bytes needed and the bytes free.
    """
    needs = required_bytes(directory)
    needs[directory.path] = needs.get(directory.path, 0) + _beside_bytes(directory)
    kept = f" and {num_more} kept steps" if num_more else ""
    check_free_space(
        {place: num_bytes // 2 * (2 + num_more) for place, num_bytes in needs.items()},
        f"the store's two slots{kept} of {directory.manifest.num_params:,} params need",
        "free some, or choose another directory or more CSD roots",
    )


def create_store(directory: StoreDirectory) -> None:
    """Makes every directory and file of a new store, preallocated, without a step.

    The caller has called `check_space` before it locked the path.

    Raises:
      StoreFormatError: a CSD root is inside the store, or below ``/proc``.
      StoreSpaceError: the file system is full.
      StoreIOError: the operating system refused something.
    """
    check_places(directory)
    with translated("creation", directory.path):
        directory.path.mkdir(parents=True, exist_ok=True)
        directory.manifest.write(directory.path / "jaxinf.json")
        make_csds(directory)
        timestamp_ns = time.time_ns()
        for slot in SLOTS:
            create_documents(directory, slot, timestamp_ns)
            for leaf, record, _ in directory.leaves():
                for state in record.states:
                    _create_chunks(directory, slot, leaf, state)
    directory.sync()
    fsync_directory(directory.path)


def complete_spare(directory: StoreDirectory) -> None:
    """Makes files of the spare slot again that are gone; nothing needs their content.

    The caller is the store's writer. A step that the slot held is given up.

    Raises:
      StoreIOError, StoreSpaceError: the file system refused something.
    """
    committed = directory.committed_slot()
    if committed is None:
        return
    spare = other_slot(committed)
    step, source = directory.step_path(spare), directory.step_path(committed)
    names = document_names(directory.manifest)
    documents = [name for name in names if not os.path.lexists(f"{step}/{name}")]
    chunks = list(_missing_chunks(directory, spare))
    if not documents and not chunks:
        return
    _LOG.warning(
        "%s: %d files of the spare slot, which holds no step that is needed, are gone; "
        "they are made again",
        step,
        len(documents) + len(chunks),
    )
    for name in documents:
        _check_folders(step, step / name)
    for leaf, position, state in chunks:
        csd = directory.manifest.leaves[leaf].csds[position]
        file = directory.chunk_file(spare, leaf, position, state.name)
        _check_folders(directory.data_path(spare, csd), file)
        _check_folders(step, directory.chunk_name(spare, leaf, position, state.name))
    directory.unpublish(spare)
    with translated("creation", step):
        for name in documents:
            (step / name).parent.mkdir(parents=True, exist_ok=True)
            content = read_beneath(source, name, MOST_BYTES)
            write_bytes_atomically(step / name, content)
        for leaf, position, state in chunks:
            _complete_chunk(directory, spare, leaf, position, state)
    directory.sync()


def _check_folders(root: Path, file: Path) -> None:
    """Refuses a file to which a link of a folder below the root leads."""
    for folder in file.parents:
        if folder == root:
            return
        if folder.is_symlink():
            raise StoreFormatError(
                f"{folder}: expected a directory of the store, found a link; nothing "
                "was written through it. Remove the link, and open the store again"
            )


def _missing_chunks(
    directory: StoreDirectory, slot: Slot
) -> Iterator[tuple[int, int, StateRecord]]:
    """Yields chunks of which the file, or the name in the store, is gone."""
    step = str(directory.step_path(slot))
    roots = [str(directory.data_path(slot, csd)) for csd in range(directory.num_csds)]
    for leaf, record, _ in directory.leaves():
        for state in record.states:
            array = record.array_name(state.name)
            for position in record.held:
                root = roots[record.csds[position]]
                key = directory.state_chunk(leaf, position, state).key
                is_there = os.path.lexists(f"{root}/{array}/{key}")
                if is_there and root != step:
                    is_there = os.path.lexists(f"{step}/{array}/{key}")
                if not is_there:
                    yield leaf, position, state


def discard_store(directory: StoreDirectory, named: Sequence[Path] = ()) -> None:
    """Removes a store that never committed a step: its creation was interrupted.

    Args:
      directory: the store, whose lock the caller holds.
      named: CSD roots that the user has named, which are accepted without a note.

    Raises:
      StoreFormatError: it has committed a step, or its chunks are another store's;
        nothing is removed.
    """
    check_never_committed(directory)
    check_owners(directory, named, unmade=True)
    for csd, root in enumerate(directory.manifest.csds):
        shutil.rmtree(directory.csd_directory(csd), ignore_errors=True)
        if os.path.isdir(root):
            fsync_directory(root)
    shutil.rmtree(directory.path / "slots", ignore_errors=True)
    fsync_directory(directory.path)  # without a manifest the rest cannot be removed
    with translated("removal", directory.path):
        (directory.path / "jaxinf.json").unlink(missing_ok=True)
    fsync_directory(directory.path)


def check_never_committed(directory: StoreDirectory) -> None:
    """Distinguishes a store that was never finished from one that lost `current`.

    Raises:
      StoreFormatError: the store has committed a step.
    """
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


def step_documents(
    manifest: Manifest, timestamp_ns: int, carry: Sequence[CarriedArray] = ()
) -> Iterator[tuple[str, bytes]]:
    """Yields the documents by which other tools read a step's chunks, by name.

    Args:
      manifest: manifest of the store.
      timestamp_ns: the time that they say.
      carry: arrays that the step carries, which have documents of their own.
    """
    for leaf in manifest.leaves:
        for state in leaf.states:
            shape, chunk_shape = map(tuple, leaf.array_grid(state))
            content = _array_document(shape, chunk_shape, state.dtype)
            yield f"{leaf.array_name(state.name)}/zarr.json", content
    yield "zarr.json", encode(group_metadata())
    yield "_METADATA", tree_document(manifest, carry)
    yield "_CHECKPOINT_METADATA", encode(orbax_checkpoint_metadata(timestamp_ns))
    yield "commit_success.txt", COMMIT_SUCCESS_TEXT.encode()


def tree_document(manifest: Manifest, carry: Sequence[CarriedArray] = ()) -> bytes:
    """Returns ``_METADATA``, which lists a step's arrays for Orbax."""
    keys = [(s.name, *leaf.path) for leaf in manifest.leaves for s in leaf.states]
    keys += [(CARRY, *one.path) for one in carry]
    return encode(orbax_tree_metadata(keys))


@cache
def _array_document(
    shape: tuple[int, ...], chunk_shape: tuple[int, ...], dtype: str
) -> bytes:
    return encode(array_metadata(shape, chunk_shape, dtype))


def create_documents(directory: StoreDirectory, slot: Slot, timestamp_ns: int) -> None:
    root = str(directory.step_path(slot))
    os.makedirs(root, exist_ok=True)
    made = {root}
    for name, content in step_documents(directory.manifest, timestamp_ns):
        file = f"{root}/{name}"
        _make_folder(os.path.dirname(file), made)
        with open(file, "wb", buffering=0) as document:
            document.write(content)


# A store has tens of thousands of files, and a `Path` costs as much as a file.
def _create_chunks(
    directory: StoreDirectory, slot: Slot, leaf: int, state: StateRecord
) -> None:
    """Makes an array's chunk files, and their names in the store, all of them new."""
    record = directory.manifest.leaves[leaf]
    array, step = record.array_name(state.name), str(directory.step_path(slot))
    made = {step, f"{step}/{array}"}  # which has a document already
    for position in record.held:
        layout = directory.state_chunk(leaf, position, state)
        root = str(directory.data_path(slot, record.csds[position]))
        if root not in made:
            os.makedirs(root, exist_ok=True)
            made.add(root)
        file, link = (f"{place}/{array}/{layout.key}" for place in (root, step))
        _make_folder(os.path.dirname(file), made)
        directory.allocate(file, layout, state)
        if root != step:
            _make_folder(os.path.dirname(link), made)
            os.symlink(file, link)


def _make_folder(folder: str, made: set[str]) -> None:
    """Makes a directory, and those above it up to one of `made`."""
    if folder not in made:
        _make_folder(os.path.dirname(folder), made)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        made.add(folder)


def _complete_chunk(
    directory: StoreDirectory, slot: Slot, leaf: int, position: int, state: StateRecord
) -> None:
    """Makes a chunk's file, and its name in the store, where they are not there."""
    file = directory.chunk_file(slot, leaf, position, state.name)
    link = directory.chunk_name(slot, leaf, position, state.name)
    for folder in {file.parent, link.parent}:
        folder.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(file):
        layout = directory.state_chunk(leaf, position, state)
        directory.allocate(file, layout, state)
    if not os.path.lexists(link):
        link.symlink_to(file)
