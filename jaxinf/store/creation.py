"""A new store's files: the room for them, how they are made, how they are removed.

Invariant: only files of this store are removed, and only if it never committed a step,
or is given up.
"""

import contextlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from jaxinf.documents import MOST_BYTES
from jaxinf.errors import StoreFormatError, StoreSpaceError
from jaxinf.store.commit import CarriedArray, CommitRecord
from jaxinf.store.directory import SLOTS, StoreDirectory, link_file
from jaxinf.store.owners import check_owners, check_places, claim_csds
from jaxinf.store.stock import OF_ITEMS, orbax_links, step_documents
from jaxinf.terminal import format_bytes
from jaxinf.transfer import (
    allocate_file,
    check_holds,
    fsync_directory,
    open_beneath,
    read_beneath,
    translated,
)

BESIDE = re.compile(r"(?:stream|tokenizer)/[A-Za-z0-9_]+(?:\.[a-z]+)+")
"""Names of files beside a store's steps, which a run goes on with."""


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
        place, device = existing_parent(directory)
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


def existing_parent(path: Path) -> tuple[Path, int]:
    """Returns the part of a path that exists, and the number of its file system."""
    while not path.exists():
        path = path.parent
    return path, path.stat().st_dev


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
        same; by default chunks and carried arrays have room.
      named: the name that the place gets when it is complete.
    """
    is_item = place.startswith("checkpoints/")
    step, manifest = directory.step_path(place), directory.manifest
    held = None if source is None else directory.step_path(source)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    make_folder = cache(partial(os.makedirs, exist_ok=True))
    files = dict(step_documents(manifest, carry, is_item=is_item))
    if held is not None:
        files |= dict.fromkeys((one.chunk for one in carry), b"")
    for name, content in files.items():
        make_folder(os.path.dirname(f"{step}/{name}"))
        if held is not None and not (is_item and name in OF_ITEMS):
            check_holds(held, name, 0)  # no link leads there
            link_file(held / name, step / name)
        else:
            with open(os.open(f"{step}/{name}", flags, 0o644), "wb", 0) as document:
                document.write(content)
    roots = [str(path) for path in directory.data_paths(place)]
    # A store has tens of thousands, and a `Path` costs as much as a file.
    for one in manifest.held():
        file = f"{roots[one.csd]}/{one.name}"
        make_folder(os.path.dirname(file))
        if not os.path.lexists(file):
            if source is None:
                allocate_file(file, one.file_bytes, one.num_bytes)
            else:
                link_file(directory.chunk_file(source, one), Path(file))
    for name, target in step_links(directory, place, carry, named=named):
        make_folder(os.path.dirname(f"{step}/{name}"))
        if not os.path.lexists(f"{step}/{name}"):
            os.symlink(target, f"{step}/{name}")


def step_links(
    directory: StoreDirectory,
    place: str,
    carry: Sequence[CarriedArray],
    *,
    named: str | None = None,
) -> Iterator[tuple[str, str]]:
    """Yields names and targets of the links by which other tools find what it has.

    The arguments are those of `make_place`.
    """
    if place.startswith("checkpoints/"):
        yield from orbax_links(directory.manifest, carry).items()
    if directory.manifest.csds:
        roots = directory.data_paths(named or place)
        for one in directory.manifest.held():
            yield one.name, f"{roots[one.csd]}/{one.name}"


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
