"""A step that is read: of a store, or of a run, whose members have the chunks.

     member 0:  a b . .  ─┐
     member 1:  . . c d  ─┴─► manifest of a b c d, checksums of all, their directories

Invariant: a step is of one commit in all members, and its files are only read.
"""

import contextlib
import errno
import time
from collections.abc import Iterator, Sequence
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
from jaxinf.store.directory import StoreDirectory
from jaxinf.store.manifest import FORMAT_VERSION, Manifest
from jaxinf.store.reader import StepReader
from jaxinf.store.snapshot import PinnedStep, pinned_step

_CANNOT_PIN = {
    *(errno.EACCES, errno.EDQUOT, errno.EMLINK, errno.ENOENT, errno.ENOSPC),
    *(errno.EOPNOTSUPP, errno.EPERM, errno.EROFS),
}
_LIVE_ATTEMPTS = 20
_LIVE_PAUSE_S = 0.05


@dataclass(frozen=True)
class WholeStep:
    """A committed step with all chunks, which does not change while it is read.

    Attributes:
      path: a directory with a slot's layout, of a run the first member's.
      manifest: that of a store of one process; the CSDs of its chunks are `places`.
      commit: the step's record, of a run with the checksums of all members.
      places: directories that have chunks in a slot's layout.
      warning: why chunks may change nevertheless; else empty.
    """

    path: Path
    manifest: Manifest
    commit: CommitRecord
    places: tuple[Path, ...]
    warning: str = ""

    def check(self) -> None:
        """Checks that the record is of the store's arrays.

        Raises:
          StoreFormatError: it is not.
        """
        self.commit.check_fits(self.path / "commit.json", self.manifest)

    def reader(self, memory_bytes: int = 32 << 20) -> StepReader:
        """Makes a reader of its chunks, with so much memory for pieces."""
        options = {"places": self.places, "memory_bytes": memory_bytes}
        return StepReader(self.path, self.commit, **options)


def step_of(directory: StoreDirectory, path: Path) -> WholeStep:
    """Returns a step of a store: a slot, a checkpoint or a snapshot.

    Raises:
      StoreFormatError: there is no record of it.
    """
    record = CommitRecord.read(path / "commit.json")
    places = tuple(directory.data_paths(path))
    return WholeStep(path, directory.manifest, record, places)


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
            pinned = stack.enter_context(pinned_step(directory))
        except (StoreIOError, StoreSpaceError) as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in _CANNOT_PIN:
                raise
            warning = (
                f"the committed step cannot be pinned ({cause.strerror}); if a run is "
                "writing to the store, chunks may be of different steps"
            )
            step = replace(_live_step(directory), warning=warning)
        else:
            step = step_of(pinned.directory, pinned.path)
        yield step


def _live_step(directory: StoreDirectory) -> WholeStep:
    for attempt in range(1, _LIVE_ATTEMPTS + 1):
        path = directory.step_path(directory.need_slot())
        try:
            return step_of(directory, path)
        except StoreFormatError as error:
            # A writer has removed the record for its next step: `current` has changed.
            is_taken = isinstance(error.__cause__, FileNotFoundError)
            if not is_taken or attempt == _LIVE_ATTEMPTS:
                raise
            time.sleep(_LIVE_PAUSE_S)
    raise AssertionError("the last attempt raises")


def joined_step(parts: Sequence[PinnedStep]) -> WholeStep:
    """Returns a step of all members, from their parts by number, or of a store alone.

    Raises:
      StoreMismatchError: they have other leaves or owners.
      StoreFormatError: a record is not of its part.
    """
    first = parts[0].directory
    for part in parts:
        if part.directory.manifest.common != first.manifest.common:
            raise StoreMismatchError(
                f"{part.directory.path}: expected the leaves and owners of "
                f"{first.path}, found others; restore its jaxinf.json"
            )
    steps = [step_of(part.directory, part.path) for part in parts]
    for one in steps:
        one.check()
    if first.manifest.member is None:
        return steps[0]
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
    commit = replace(steps[0].commit, checksums=sums, commit="", inexact=bounds)
    places = tuple(place for one in steps for place in one.places)
    return WholeStep(steps[0].path, manifest, commit, places)
