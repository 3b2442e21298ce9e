"""Pins a committed step for a reader while the run goes on.

Invariant: a snapshot shows one step, bit for bit, until it is released; making one
moves no data. See docs/format.md, "Hard links".
"""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from jaxinf.errors import StoreFormatError
from jaxinf.io.failures import translated
from jaxinf.store.directory import Slot, StoreDirectory
from jaxinf.store.links import link_or_copy
from jaxinf.store.lock import lock_exclusively
from jaxinf.store.pins import link_arrays, remove_step

__all__ = ["prune_snapshots", "snapshot"]

_OWNER_LOCK = "owner.lock"

_DOCUMENTS = (
    "zarr.json",
    "_METADATA",
    "_CHECKPOINT_METADATA",
    "commit_success.txt",
    "commit.json",
)


@contextlib.contextmanager
def snapshot(directory: StoreDirectory) -> Iterator[Path]:
    """Pins the committed step; yields a directory laid out like a slot.

    Any process may do this, beside a running writer. The directory is a zarr group and
    an Orbax checkpoint, with `commit.json`; it goes when the context ends.

    Raises:
      StoreFormatError: no step is committed yet.
      StoreIOError: the store cannot be written to.
    """
    place = f"snapshots/{uuid.uuid4().hex}"
    owner = _pin(directory, place)
    try:
        yield directory.step_path(place)
    finally:
        remove_step(directory, place)
        os.close(owner)


def _pin(directory: StoreDirectory, place: str) -> int:
    """Makes the links; returns the descriptor that marks the snapshot as in use."""
    root = directory.step_path(place)
    with contextlib.ExitStack() as undo:
        undo.callback(remove_step, directory, place)
        with (
            translated("snapshot of the committed step", root),
            lock_exclusively(directory.publish_lock),
        ):
            slot = _committed(directory)
            root.mkdir(parents=True)
            owner = _own(root)
            undo.callback(os.close, owner)
            link_arrays(directory, slot, place, root)
            for name in _DOCUMENTS:
                link_or_copy(directory.step_path(slot) / name, root / name)
        undo.pop_all()
    return owner


def _committed(directory: StoreDirectory) -> Slot:
    slot = directory.committed_slot()
    if slot is None:
        raise StoreFormatError(
            f"{directory.path}: expected a committed step to take a snapshot of, found "
            "a store that is just being created; try again later"
        )
    return slot


def _own(root: Path) -> int:
    fd = os.open(root / _OWNER_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def prune_snapshots(directory: StoreDirectory) -> None:
    """Removes snapshots whose process is gone."""
    root = directory.path / "snapshots"
    if not root.is_dir():
        return
    with lock_exclusively(directory.publish_lock):
        for entry in root.iterdir():
            # Its owner may be removing it at this moment.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                _remove_if_stale(directory, entry)


def _remove_if_stale(directory: StoreDirectory, entry: Path) -> None:
    fd = os.open(entry / _OWNER_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        remove_step(directory, f"snapshots/{entry.name}")
    finally:
        os.close(fd)
