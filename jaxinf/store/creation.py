"""Makes a new store, or removes one that never committed a step; checks its room.

Invariant: a store has its manifest and its notes on CSDs before anything else, so that
its owner is known if its creation is interrupted. Only files of this store are removed,
and only if it never committed a step, or is given up.
"""

import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from jaxinf.errors import StoreFormatError, StoreSpaceError
from jaxinf.store.claims import check_claims, check_roots_outside_store, claim_csds
from jaxinf.store.commit_record import CommitRecord
from jaxinf.store.directory import SLOTS, StoreDirectory
from jaxinf.store.step_files import make_step_files
from jaxinf.terminal import format_bytes
from jaxinf.transfer import existing_parent, fsync_directory, translated


def is_unfinished(path: Path) -> bool:
    """Whether a path has a store whose creation was interrupted; opens no file."""
    is_made = os.path.lexists(path / "current")
    return not is_made and os.path.lexists(path / "jaxinf.json")


def check_free_space(needs: Mapping[Path, int], what: str, remedy: str) -> None:
    """Raises StoreSpaceError if a file system lacks the bytes that directories need.

    The directories need not exist; `what` and `remedy` are parts of the message.
    """
    totals, folders = Counter[int](), dict[int, Path]()
    for directory, need in needs.items():
        folder = existing_parent(directory)
        device = folder.stat().st_dev
        totals[device] += need
        folders[device] = folder
    for device, folder in folders.items():
        need, status = totals[device], os.statvfs(folder)
        free = status.f_bavail * status.f_frsize
        if need > free:
            raise StoreSpaceError(
                f"{folder}: {what} {need:,} bytes ({format_bytes(need)}) "
                f"there, the file system has {free:,} free ({format_bytes(free)}); "
                f"{remedy}"
            )


def required_bytes(directory: StoreDirectory, num_steps: int = 2) -> Counter[Path]:
    """Returns the bytes of a store's steps on each CSD, by default of both slots."""
    folders = directory.csd_directories
    needs = Counter(dict.fromkeys(folders, 0))
    for chunk in directory.manifest.held_chunks():
        needs[folders[chunk.csd]] += num_steps * chunk.drive_bytes
    return needs


def check_space(directory: StoreDirectory, *, num_more: int = 0) -> None:
    """Refuses a new store if its slots, and `num_more` kept steps, have no room."""
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
    check_roots_outside_store(directory)
    with translated("creation", directory.path):
        begin_store(directory)
        for slot in SLOTS:
            make_step_files(directory, slot)
    directory.sync()
    fsync_directory(directory.path)


def begin_store(directory: StoreDirectory) -> None:
    """Makes a store's own directories, with its manifest and its notes on CSDs."""
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.manifest.write(directory.path / "jaxinf.json")
    claim_csds(directory, unmade=True)


def discard_store(directory: StoreDirectory) -> None:
    """Removes a store that never committed a step; the caller holds its lock.

    Refuses a store that committed one, or whose chunks are another store's.
    """
    check_never_committed(directory)
    remove_csds(directory)
    shutil.rmtree(directory.path / "slots", ignore_errors=True)
    fsync_directory(directory.path)  # without a manifest the rest cannot be removed
    with translated("removal", directory.path):
        (directory.path / "jaxinf.json").unlink(missing_ok=True)
    fsync_directory(directory.path)


def remove_csds(directory: StoreDirectory) -> None:
    """Removes a store's directories on its CSDs, durably; refuses other stores'."""
    check_claims(directory, unmade=True)
    for folder in directory.csd_directories[: len(directory.manifest.csds)]:
        for name in (*SLOTS, "checkpoints", "."):  # the note of the owner goes last
            shutil.rmtree(folder / name, ignore_errors=True)
        if folder.parent.is_dir():
            fsync_directory(folder.parent)


def check_never_committed(directory: StoreDirectory) -> None:
    """Refuses a store with a committed step, even if it has lost `current`."""
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
