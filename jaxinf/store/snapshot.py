"""Pins a committed step for a reader while the run goes on.

Invariant: a snapshot shows one step, bit for bit, until it is released; making one
moves no data. See docs/format.md, "Hard links".
"""

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxinf.errors import StoreFormatError
from jaxinf.io.failures import translated
from jaxinf.store.commit import CommitRecord
from jaxinf.store.directory import Slot, StoreDirectory
from jaxinf.store.links import link_or_copy
from jaxinf.store.lock import LockFile, lock_exclusively
from jaxinf.store.owned import current_store
from jaxinf.store.pins import link_arrays, remove_step

_OWNER_LOCK = "owner.lock"

_DOCUMENTS = (
    "zarr.json",
    "_METADATA",
    "_CHECKPOINT_METADATA",
    "commit_success.txt",
    "commit.json",
)


@dataclass(frozen=True)
class PinnedStep:
    """A committed step that does not change while it is pinned.

    Attributes:
      directory: the store as it was when the step was pinned; since then its chunks may
        have moved to other CSDs.
      path: a directory with a slot's layout: a zarr group, an Orbax checkpoint,
        ``commit.json``.
    """

    directory: StoreDirectory
    path: Path


@contextlib.contextmanager
def snapshot(directory: StoreDirectory) -> Iterator[Path]:
    """Like `pinned_step`, but yields only the path."""
    with pinned_step(directory) as step:
        yield step.path


@contextlib.contextmanager
def pinned_step(directory: StoreDirectory) -> Iterator[PinnedStep]:
    """Pins the committed step until the context ends.

    Any process may do this, beside a running writer.

    Raises:
      StoreFormatError: no step is committed yet; or as `jaxinf.store.read_owned`.
      StoreIOError: the store cannot be written to.
    """
    place = f"snapshots/{uuid.uuid4().hex}"
    directory, owner = _pin(directory, place)
    try:
        yield PinnedStep(directory, directory.step_path(place))
    finally:
        remove_step(directory, place)
        owner.close()


def _pin(directory: StoreDirectory, place: str) -> tuple[StoreDirectory, LockFile]:
    """Makes the links; returns the store as read then, and the snapshot's lock."""
    root = directory.step_path(place)
    with contextlib.ExitStack() as undo:
        with (
            translated("snapshot of the committed step", root),
            lock_exclusively(directory.publish_lock),
        ):
            directory = current_store(directory)
            undo.callback(remove_step, directory, place)
            slot = _committed(directory)
            root.mkdir(parents=True)
            owner = _own(root)
            undo.callback(owner.close)
            carry = CommitRecord.read(directory.step_path(slot) / "commit.json").carry
            link_arrays(directory, slot, place, root, carry)
            for name in _DOCUMENTS:
                link_or_copy(directory.step_path(slot) / name, root / name)
        undo.pop_all()
    return directory, owner


def _committed(directory: StoreDirectory) -> Slot:
    slot = directory.committed_slot()
    if slot is None:
        raise StoreFormatError(
            f"{directory.path}: expected a committed step to take a snapshot of, found "
            "a store that is just being created; try again later"
        )
    return slot


def _own(root: Path) -> LockFile:
    owner = LockFile(root / _OWNER_LOCK)
    owner.hold()
    return owner


def prune_snapshots(directory: StoreDirectory) -> None:
    """Removes snapshots of ended processes; the caller is the store's writer."""
    root = directory.path / "snapshots"
    if not root.is_dir():
        return
    with lock_exclusively(directory.publish_lock):
        for entry in root.iterdir():
            # The snapshot's owner may be removing it at this moment.
            if entry.is_dir() and not entry.is_symlink():
                with contextlib.suppress(FileNotFoundError):
                    _remove_if_stale(directory, entry)


def _remove_if_stale(directory: StoreDirectory, entry: Path) -> None:
    owner = LockFile(entry / _OWNER_LOCK)
    try:
        owner.hold(waits=False)
    except BlockingIOError:
        return
    else:
        remove_step(directory, f"snapshots/{entry.name}")
    finally:
        owner.close()
