"""A committed step that is read: of a store, or of all members of a run.

     member 0:  a b . .  ─┐
     member 1:  . . c d  ─┴─► manifest of a b c d, checksums of all, their directories

Invariant: a step is of one commit in all members, and its files are only read. One that
is pinned by hard links is the same, bit for bit, until it is released; see
docs/format.md, "Hard links".
"""

import contextlib
import errno
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from msgspec import structs

from jaxinf.errors import (
    StoreFormatError,
    StoreIOError,
    StoreMismatchError,
    StoreSpaceError,
)
from jaxinf.store.commit import CommitRecord
from jaxinf.store.creation import make_place
from jaxinf.store.directory import StoreDirectory, link_file
from jaxinf.store.lock import LockFile, lock_exclusively
from jaxinf.store.manifest import FORMAT_VERSION, Manifest
from jaxinf.store.owners import current_store
from jaxinf.store.reader import StepReader
from jaxinf.store.stock import read_carry
from jaxinf.transfer import translated
from jaxinf.typing import Array

_CANNOT_PIN = {
    *(errno.EACCES, errno.EDQUOT, errno.EMLINK, errno.ENOENT, errno.ENOSPC),
    *(errno.EOPNOTSUPP, errno.EPERM, errno.EROFS),
}
_OWNER_LOCK = "owner.lock"


@dataclass(frozen=True)
class WholeStep:
    """A committed step with its chunks, which does not change while it is read.

    Attributes:
      path: a directory with a slot's layout, of a run the first member's.
      manifest: the store's, as it was when the step was pinned; of a run that of a
        store of one process. The CSDs of its chunks are `places`.
      commit: the step's record, of a run with the checksums of all members.
      places: directories that have chunks in a slot's layout.
      warning: why chunks may change nevertheless; else empty.
      read_pieces: reads its chunks, if they are no files; see `StepReader`.
      carried: what it carries, if that is in no file.
    """

    path: Path
    manifest: Manifest
    commit: CommitRecord
    places: tuple[Path, ...]
    warning: str = ""
    read_pieces: Callable[..., Iterator[Array]] | None = None
    carried: Sequence[bytes] | None = None

    def check(self) -> None:
        """Raises StoreFormatError if the record is not of the store's arrays."""
        self.commit.check_fits(self.path / "commit.json", self.manifest)

    def reader(self, memory_bytes: int = 32 << 20) -> StepReader:
        """Makes a reader of its chunks, with so much memory for pieces."""
        options = {"places": self.places, "read_pieces": self.read_pieces}
        return StepReader(self.path, self.commit, memory_bytes=memory_bytes, **options)

    def read_carry(self) -> Sequence[bytes]:
        """Returns the arrays that it carries; raises as `jaxinf.store.read_carry`."""
        if self.carried is not None:
            return self.carried
        return read_carry(self.path, self.commit.carry)


def step_of(directory: StoreDirectory, path: Path) -> WholeStep:
    """Returns a step of a store: a slot, a checkpoint or a snapshot."""
    record = CommitRecord.read(path / "commit.json")
    places = tuple(directory.data_paths(path))
    return WholeStep(path, directory.manifest, record, places)


@contextlib.contextmanager
def pinned_step(directory: StoreDirectory) -> Iterator[WholeStep]:
    """Pins the committed step until the context ends.

    Any process may do this, beside a running writer; no data moves.

    Raises:
      StoreFormatError: no step is committed yet; or as `jaxinf.store.read_owned`.
      StoreIOError: the store cannot be written to.
    """
    place = f"snapshots/{uuid.uuid4().hex}"
    root = directory.step_path(place)
    with contextlib.ExitStack() as undo:
        with (
            translated("snapshot of the committed step", root),
            lock_exclusively(directory.publish_lock),
        ):
            directory = current_store(directory)
            slot = directory.need_slot()
            undo.callback(remove_step, directory, place)
            root.mkdir(parents=True)
            owner = LockFile(root / _OWNER_LOCK)
            undo.callback(owner.close)
            owner.hold()
            live = directory.step_path(slot)
            carry = CommitRecord.read(live / "commit.json").carry
            make_place(directory, place, carry, source=slot)
            link_file(live / "commit.json", root / "commit.json")
        yield step_of(directory, root)


@contextlib.contextmanager
def readable_step(directory: StoreDirectory) -> Iterator[WholeStep]:
    """Pins a store's committed step while the context lasts.

    One that lacks a chunk, or whose store this user cannot write to, is read as it is,
    with a warning.

    Raises:
      StoreFormatError: the store is damaged, or no step is committed yet.
      StoreIOError: a CSD's directory is missing, or a drive failed.
    """
    with contextlib.ExitStack() as stack:
        try:
            step = stack.enter_context(pinned_step(directory))
        except (StoreIOError, StoreSpaceError) as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in _CANNOT_PIN:
                raise
            warning = (
                f"the committed step cannot be pinned ({cause.strerror}); if a run is "
                "writing to the store, chunks may be of different steps"
            )
            step = replace(_live_step(directory), warning=warning)
        yield step


def _live_step(directory: StoreDirectory) -> WholeStep:
    """Returns the committed step as it is, also if another is committed meanwhile."""
    while True:
        slot = directory.need_slot()
        try:
            return step_of(directory, directory.step_path(slot))
        except StoreFormatError:
            if directory.need_slot() == slot:
                raise


def joined_step(steps: Sequence[WholeStep]) -> WholeStep:
    """Returns one step of those of all members by number, or of a store alone."""
    first = steps[0]
    for one in steps:
        if one.manifest.common != first.manifest.common:
            raise StoreMismatchError(
                f"{one.path}: expected the leaves and owners of {first.path}, found "
                "others; restore the member's jaxinf.json"
            )
        one.check()
    if first.manifest.member is None:
        return first
    starts = np.cumsum([0, *(len(one.places) for one in steps)]).tolist()
    leaves, sums, bounds = [], {}, dict[str, float]()
    for held in zip(*(one.manifest.leaves for one in steps), strict=True):
        owners = held[0].owners
        csds = [starts[own] + held[own].csds[n] for n, own in enumerate(owners)]
        leaves.append(structs.replace(held[0], csds=tuple(csds), owners=()))
        for state in held[0].states:
            name = held[0].array_name(state.name)
            sums[name] = np.zeros(len(owners), np.uint32)
            for leaf, one in zip(held, steps, strict=True):
                sums[name][list(leaf.held)] = one.commit.checksums[name]
    for one in steps:
        for name, bound in one.commit.inexact.items():
            bounds[name] = max(bound, bounds.get(name, 0))
    manifest = structs.replace(
        first.manifest,
        leaves=tuple(leaves),
        csds=(),
        member=None,
        format_version=FORMAT_VERSION,
    )
    commit = first.commit.replace(checksums=sums, commit="", inexact=bounds)
    places = tuple(place for one in steps for place in one.places)
    return WholeStep(first.path, manifest, commit, places)


def remove_step(directory: StoreDirectory, place: str) -> None:
    """Removes a step at a place, on every CSD and in the store."""
    paths = [directory.data_path(place, csd) for csd in range(directory.num_csds)]
    for path in (*paths, directory.step_path(place)):
        shutil.rmtree(path, ignore_errors=True)


def prune_snapshots(directory: StoreDirectory) -> None:
    """Removes snapshots of ended processes; the caller is the store's writer."""
    root = directory.path / "snapshots"
    if not root.is_dir():
        return
    with lock_exclusively(directory.publish_lock):
        for entry in root.iterdir():
            if not entry.is_dir() or entry.is_symlink():
                continue
            # The snapshot's owner may be removing it at this moment.
            with contextlib.suppress(FileNotFoundError):
                owner = LockFile(entry / _OWNER_LOCK)
                with contextlib.closing(owner), contextlib.suppress(BlockingIOError):
                    owner.hold(waits=False)
                    remove_step(directory, f"snapshots/{entry.name}")
