"""The committed step of a store, for a reader in any process.

Invariant: a pinned step does not change while a writer goes on. If a step could not be
pinned, a warning says so.
"""

import contextlib
import errno
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxinf.errors import StoreError, StoreFormatError, StoreIOError, StoreSpaceError
from jaxinf.store import (
    CommitRecord,
    Manifest,
    StoreDirectory,
    look_at_store,
    pinned_step,
)
from jaxinf.terminal import make_console

_CANNOT_PIN = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EMLINK,
    errno.ENOENT,
    errno.ENOSPC,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EROFS,
}
_LIVE_ATTEMPTS = 20
_LIVE_PAUSE_S = 0.05


@dataclass(frozen=True)
class CommittedStep:
    """A committed step, ready to be read.

    Attributes:
      path: a directory with a slot's layout: a snapshot, or the slot of `current`.
      warnings: why not all data is certain to be of this step; else none.
    """

    directory: StoreDirectory
    path: Path
    commit: CommitRecord
    warnings: tuple[str, ...] = ()

    @property
    def manifest(self) -> Manifest:
        return self.directory.manifest


@contextlib.contextmanager
def open_committed(path: Path) -> Iterator[CommittedStep]:
    """Pins a store's committed step while the context lasts.

    One that lacks a chunk, or cannot be written to, is read unpinned, with a warning.

    Raises:
      StoreFormatError: there is no store, it is damaged, or no step is committed yet.
      StoreIOError: a CSD's directory is missing, or a drive failed.
    """
    directory = open_directory(path)
    with contextlib.ExitStack() as stack:
        try:
            pinned = stack.enter_context(pinned_step(directory))
        except (StoreIOError, StoreSpaceError) as error:
            warning = _fallback_warning(error)
            make_console(sys.stderr).print(f"warning: {path}: {warning}")
            slot_path, commit = _read_live(directory)
            yield CommittedStep(directory, slot_path, commit, (warning,))
            return
        commit = CommitRecord.read(pinned.path / "commit.json")
        yield CommittedStep(pinned.directory, pinned.path, commit)


def open_directory(path: Path) -> StoreDirectory:
    """Opens a store's files without locking it.

    Raises:
      StoreFormatError: there is no store, it has links that lead out of it, or a CSD's
        directory is missing.
    """
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        raise StoreFormatError(
            f"{path}: expected the directory of a jaxinf store, found {found}; check "
            "the path, or mount the drive it is on"
        )
    return look_at_store(path)


def _fallback_warning(error: StoreError) -> str:
    """Explains an unpinned step; raises errors that an unpinned read would meet."""
    cause = error.__cause__
    if not isinstance(cause, OSError) or cause.errno not in _CANNOT_PIN:
        raise error
    return (
        f"the committed step cannot be pinned ({cause.strerror}); if a run is writing "
        "to the store, chunks may be of different steps"
    )


def _read_live(directory: StoreDirectory) -> tuple[Path, CommitRecord]:
    """Reads the committed slot's path and its record, both of one step."""
    for attempt in range(1, _LIVE_ATTEMPTS + 1):
        slot_path = directory.step_path(directory.need_slot())
        try:
            return slot_path, CommitRecord.read(slot_path / "commit.json")
        except StoreFormatError as error:
            # A writer has removed the record for its next step: `current` has changed.
            taken = isinstance(error.__cause__, FileNotFoundError)
            if not taken or attempt == _LIVE_ATTEMPTS:
                raise
            time.sleep(_LIVE_PAUSE_S)
    raise AssertionError("the last attempt raises")
