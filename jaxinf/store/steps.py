"""The steps of one store that can be read: the committed one, snapshots, checkpoints.

      snapshot     current slot ──links──► snapshots/ID, while it is read

Invariant: a step's files are only read. A step that is pinned by hard links is the
same, bit for bit, until it is released: the writer replaces every file that has a
second link. See docs/format.md, "Hard links".
"""

import contextlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxinf.errors import (
    StoreFormatError,
    StoreIOError,
    StoreLockedError,
    StoreMismatchError,
    StoreSpaceError,
)
from jaxinf.store.carried_arrays import read_carry
from jaxinf.store.claims import open_for_writing
from jaxinf.store.commit_record import CommitRecord
from jaxinf.store.directory import StoreDirectory, is_folder, link_file
from jaxinf.store.lock import LockFile, lock_exclusively
from jaxinf.store.manifest import Manifest
from jaxinf.store.step_files import make_step_files
from jaxinf.transfer import translated

_READER_LOCK = "owner.lock"


@dataclass(frozen=True)
class CommittedStep:
    """A committed step with its chunks, which do not change while it is read.

    A run's step has the manifest of a store of one process, whose CSDs are
    `chunk_roots`, and the checksums of all members. If chunks are no files, `fetch`
    returns the bytes of a chunk by its name, perhaps with more behind them.
    """

    path: Path  # of the step's directory; in a run the first member's
    manifest: Manifest  # as it was when the step was pinned
    commit: CommitRecord
    chunk_roots: tuple[Path, ...]  # by CSD, as in `StoreDirectory`
    warning: str = ""  # why chunks may change nevertheless
    fetch: Callable[[str], bytes] | None = None

    def check(self) -> None:
        """Raises StoreFormatError if the record is not of the manifest's arrays."""
        self.commit.check_fits(self.path / "commit.json", self.manifest)

    def read_carry(self) -> Sequence[bytes]:
        """Returns the contents of the carried arrays; raises as `read_carry`."""
        return read_carry(self.path, self.commit.carry, self.fetch)


def read_step(directory: StoreDirectory, path: Path) -> CommittedStep:
    """Returns a step of a store: a slot, a checkpoint or a snapshot."""
    record = CommitRecord.read(path / "commit.json")
    roots = tuple(directory.chunk_roots(directory.place_of(path)))
    return CommittedStep(path, directory.manifest, record, roots)


def find_step(directory: StoreDirectory, name: str | None = None) -> CommittedStep:
    """Returns a checkpoint; without a name the committed step, which is not pinned.

    A name that no checkpoint has is a ValueError; one of other arrays is refused.
    """
    if name is not None:
        check_checkpoint_exists(directory, name)
        root = directory.step_path(f"checkpoints/{name}")
        if Manifest.read(root / "jaxinf.json").leaves != directory.manifest.leaves:
            raise StoreMismatchError(
                f"{root}: the checkpoint holds other arrays than the store does now; "
                f'make a store of it: cp -rL "{root}" COPY, then jaxinf store copy '
                "COPY NEW"
            )
        step = read_step(directory, root)
        step.check()
        return step
    while True:
        slot = directory.require_committed_slot()
        try:
            return read_step(directory, directory.step_path(slot))
        except StoreFormatError:
            if directory.require_committed_slot() == slot:  # no commit came between
                raise


def checkpoint_names(*members: StoreDirectory) -> list[str]:
    """Returns the names of the checkpoints that each of the members has."""
    folders = [[*(member.path / "checkpoints").glob("[!.]*")] for member in members]
    names = [{folder.name for folder in filter(is_folder, f)} for f in folders]
    return sorted(set.intersection(*names))


def check_checkpoint_exists(directory: StoreDirectory, name: str) -> None:
    """Raises ValueError without a checkpoint of that name; lists the others."""
    if name not in (names := checkpoint_names(directory)):
        raise ValueError(
            f"{directory.path}: expected a checkpoint {name!r}; there are: "
            f"{', '.join(names) or 'none'}"
        )


def remove_step(directory: StoreDirectory, place: str) -> None:
    for root in reversed(directory.step_roots(place)):
        shutil.rmtree(root, ignore_errors=True)


# --- snapshots -----------------------------------------------------------------------


@contextlib.contextmanager
def pinned_step(directory: StoreDirectory) -> Iterator[CommittedStep]:
    """Pins the committed step by a snapshot until the context ends.

    Any process may do this, beside a running writer; no data moves. It raises as
    `open_for_writing`, and a StoreIOError if the store cannot be written to.
    """
    place = f"snapshots/{uuid.uuid4().hex}"
    root = directory.step_path(place)
    with contextlib.ExitStack() as undo:
        with (
            translated("snapshot of the committed step", root),
            lock_exclusively(directory.flip_lock),
        ):
            if directory.lock is None:  # a copy may have replaced the store in place
                directory = open_for_writing(directory.path)
            slot = directory.require_committed_slot()
            undo.callback(remove_step, directory, place)
            root.mkdir(parents=True)
            undo.enter_context(lock_exclusively(root / _READER_LOCK))
            record = directory.step_path(slot) / "commit.json"
            carry = CommitRecord.read(record).carry
            make_step_files(directory, place, carry, source=slot)
            link_file(record, root / "commit.json")
        yield read_step(directory, root)


@contextlib.contextmanager
def readable_step(directory: StoreDirectory) -> Iterator[CommittedStep]:
    """Pins the committed step if it can; otherwise yields it with a warning.

    It cannot if a chunk is missing, or if this user cannot write to the store.
    """
    with contextlib.ExitStack() as stack:
        try:
            step = stack.enter_context(pinned_step(directory))
        except (StoreIOError, StoreSpaceError) as error:
            if not isinstance(error.__cause__, OSError):  # what is there is not ours
                raise
            warning = (
                f"the committed step cannot be pinned ({error.__cause__.strerror}); if "
                "a run is writing to the store, chunks may be of different steps"
            )
            step = replace(find_step(directory), warning=warning)
        yield step


def prune_snapshots(directory: StoreDirectory) -> None:
    """Removes snapshots of ended processes; the caller is the store's writer."""
    root = directory.path / "snapshots"
    if not root.is_dir():
        return
    with lock_exclusively(directory.flip_lock):
        for entry in root.iterdir():
            if not is_folder(entry):
                continue
            try:
                with contextlib.closing(LockFile(entry / _READER_LOCK, waits=False)):
                    remove_step(directory, f"snapshots/{entry.name}")
            except BlockingIOError:
                pass  # its reader lives
            except StoreIOError:
                if entry.exists():  # otherwise its reader has just removed it
                    raise


def check_unread(directory: StoreDirectory) -> None:
    """Refuses a store that has a snapshot: another process reads it."""
    root = directory.path / "snapshots"
    if root.is_dir() and any(root.iterdir()):
        raise StoreLockedError(
            f"{directory.path}: expected nobody who reads its step, found a pinned one "
            f"in {root}: an export, a look or another copy is under way; wait for it, "
            "or copy to another path"
        )
