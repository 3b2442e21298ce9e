"""The files of a new store: made with room for two slots, or removed again.

Invariant: only files of this store are removed, and only if it never committed a step.
"""

import logging
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from jaxinf.documents import MOST_BYTES
from jaxinf.errors import StoreFormatError, StoreSpaceError
from jaxinf.layout import Chunk
from jaxinf.store.commit import CommitRecord
from jaxinf.store.directory import SLOTS, StoreDirectory, other_slot
from jaxinf.store.leaves import StateRecord
from jaxinf.store.making import csd_bytes
from jaxinf.store.owners import check_owners, check_places, make_csds
from jaxinf.store.stock_documents import (
    create_documents,
    document_names,
    make_folder,
)
from jaxinf.terminal import format_bytes
from jaxinf.transfer import (
    PAGE_BYTES,
    fsync_directory,
    read_beneath,
    write_bytes_atomically,
)
from jaxinf.transfer.failures import translated

_LOG = logging.getLogger("jaxinf")


def check_free_space(needs: Mapping[Path, int], what: str, remedy: str) -> None:
    """Refuses needs for which file systems have no room.

    Args:
      needs: bytes below each directory, which need not exist.
      what, remedy: parts of the message.

    Raises:
      StoreSpaceError: names the file system, the bytes needed and the bytes free.
    """
    totals: dict[int, int] = defaultdict(int)
    places: dict[int, Path] = {}
    for directory, need in needs.items():
        place, device = existing_parent(directory)
        totals[device] += need
        places.setdefault(device, place)
    for device, need in totals.items():
        status = os.statvfs(places[device])
        free = status.f_bavail * status.f_frsize
        if need > free:
            raise StoreSpaceError(
                f"{places[device]}: {what} {need:,} bytes ({format_bytes(need)}) "
                f"there, the file system has {free:,} free ({format_bytes(free)}); "
                f"{remedy}"
            )


def existing_parent(path: Path) -> tuple[Path, int]:
    """Returns the part of a path that exists, and the number of its file system."""
    while not path.exists():
        path = path.parent
    return path, path.stat().st_dev


def required_bytes(directory: StoreDirectory) -> dict[Path, int]:
    """Returns the bytes of a new store on each CSD, with both slots."""
    return {
        directory.csd_directory(csd): 2 * num_bytes
        for csd, num_bytes in enumerate(csd_bytes(directory.manifest))
    }


def _beside_bytes(directory: StoreDirectory) -> int:
    """Returns the bytes of both slots' directories and documents: a page for each."""
    num_pages = 0
    for number, record in enumerate(directory.manifest.leaves):
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
        begin_store(directory)
        make = partial(make_place, directory, timestamp_ns=time.time_ns())
        first, second = SLOTS
        with ThreadPoolExecutor(1) as threads:  # their calls of the system overlap
            try:
                making = threads.submit(make, first)
            except RuntimeError:  # the process can have no more threads
                make(first)
                make(second)
            else:
                make(second)
                making.result()
    directory.sync()
    fsync_directory(directory.path)


def begin_store(directory: StoreDirectory) -> None:
    """Makes a store's own directories; with its manifest, its owner is known."""
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.manifest.write(directory.path / "jaxinf.json")
    make_csds(directory)


def make_place(directory: StoreDirectory, place: str, timestamp_ns: int) -> None:
    """Makes the documents of a step, and the chunk files that are not there."""
    step = directory.step_path(place)
    create_documents(step, directory.manifest, timestamp_ns)
    _make_chunks(directory, place)


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
    chunks = [
        paths
        for *_, paths in _chunks(directory, spare)
        if not all(map(os.path.lexists, paths))
    ]
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
    roots = {step, *directory.data_paths(step)}
    for file in (Path(path) for paths in chunks for path in paths):
        _check_folders(next(root for root in roots if root in file.parents), file)
    directory.unpublish(spare)
    with translated("creation", step):
        for name in documents:
            (step / name).parent.mkdir(parents=True, exist_ok=True)
            content = read_beneath(source, name, MOST_BYTES)
            write_bytes_atomically(step / name, content)
        _make_chunks(directory, spare)
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


def _make_chunks(directory: StoreDirectory, place: str) -> None:
    """Makes chunk files of a step, with room, and their names, where there are none."""
    made: set[str] = set()
    for layout, state, paths in _chunks(directory, place):
        for path in paths:
            make_folder(os.path.dirname(path), made)
        file, *links = paths
        if not os.path.lexists(file):
            directory.allocate(file, layout, state)
        for link in links:
            if not os.path.lexists(link):
                os.symlink(file, link)


def _chunks(
    directory: StoreDirectory, place: str
) -> Iterator[tuple[Chunk, StateRecord, list[str]]]:
    """Yields chunks with their files, and with CSDs their names in the store.

    A store has tens of thousands, and a `Path` costs as much as a file.
    """
    step = str(directory.step_path(place))
    roots = [str(directory.data_path(place, csd)) for csd in range(directory.num_csds)]
    for number, leaf in enumerate(directory.manifest.leaves):
        for state in leaf.states:
            array = leaf.array_name(state.name)
            for chunk in leaf.held:
                layout = directory.state_chunk(number, chunk, state)
                places = dict.fromkeys((roots[leaf.csds[chunk]], step))
                paths = [f"{root}/{array}/{layout.key}" for root in places]
                yield layout, state, paths
