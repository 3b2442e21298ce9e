"""A committed step pinned for a reader while the run goes on.

Invariant: what a snapshot shows is one step, bit for bit, until it is released; making
one moves no data. See docs/format.md, "Hard links".
"""

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from jaxinf.errors import StoreFormatError, StoreIOError
from jaxinf.store.directory import Slot, StoreDirectory
from jaxinf.store.lock import lock_exclusively

__all__ = ["prune_snapshots", "snapshot"]

_OWNER_LOCK = "owner.lock"


@contextlib.contextmanager
def snapshot(directory: StoreDirectory) -> Iterator[Path]:
    """Pins the committed step; yields a directory laid out like a slot.

    Any process may do this, beside a running writer. The directory is a zarr group and
    an Orbax checkpoint, with `commit.json`; it goes when the context ends.

    Raises:
      StoreFormatError: no step is committed yet.
      StoreIOError: the store cannot be written to, or its file system has no hard
        links.
    """
    name = uuid.uuid4().hex
    owner = _pin(directory, name)
    try:
        yield directory.path / "snapshots" / name
    finally:
        _remove(directory, name)
        os.close(owner)


def _pin(directory: StoreDirectory, name: str) -> int:
    """Makes the links; returns the descriptor that marks the snapshot as in use."""
    root = directory.path / "snapshots" / name
    with contextlib.ExitStack() as undo:
        undo.callback(_remove, directory, name)
        try:
            with lock_exclusively(directory.publish_lock):
                slot = directory.committed_slot()
                if slot is None:
                    raise StoreFormatError(
                        f"{directory.path}: expected a committed step to take a "
                        "snapshot of, found a store that is just being created; try "
                        "again later"
                    )
                root.mkdir(parents=True)
                owner = _own(root)
                undo.callback(os.close, owner)
                _link_slot(directory, slot, name, root)
        except OSError as error:
            raise StoreIOError(
                f"{root}: cannot pin the committed step with hard links: "
                f"{error.strerror}; the store must be writable and its file systems "
                "must have hard links"
            ) from error
        undo.pop_all()
    return owner


def _own(root: Path) -> int:
    fd = os.open(root / _OWNER_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def _link_slot(directory: StoreDirectory, slot: Slot, name: str, root: Path) -> None:
    source = directory.slot_path(slot)
    for folder, _, files in os.walk(source):
        target = root / Path(folder).relative_to(source)
        target.mkdir(exist_ok=True)
        for file in files:
            path = Path(folder) / file
            if path.is_symlink():
                _link_on_csd(path, slot, name, target / file)
            else:
                os.link(path, target / file)


def _link_on_csd(path: Path, slot: Slot, name: str, link: Path) -> None:
    """Links the file behind a symlink inside its own CSD root, and points at that."""
    real = Path(os.readlink(path))
    below = Path(*link.parts[link.parts.index(name) + 1 :])
    csd_slot = real.parents[len(below.parts) - 1]
    assert csd_slot.name == slot
    pinned = csd_slot.parent / "snapshots" / name / below
    pinned.parent.mkdir(parents=True, exist_ok=True)
    os.link(real, pinned)
    link.symlink_to(pinned)


def _remove(directory: StoreDirectory, name: str) -> None:
    for csd in range(len(directory.manifest.csds)):
        shutil.rmtree(
            directory.csd_directory(csd) / "snapshots" / name, ignore_errors=True
        )
    shutil.rmtree(directory.path / "snapshots" / name, ignore_errors=True)


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
        _remove(directory, entry.name)
    finally:
        os.close(fd)
