"""Divides a store among another number of processes: chunks get other owners.

      .jaxinf-new made whole ─► divide.json ─► old names out ─► new names in ─► removal
               PATH is as it was            │ the next division completes the move

Invariant: until the journal is written, nothing of the store changes; from then on the
  new division is valid, and all but a division refuse the path until it is complete. A
  chunk that stays on its file system is a hard link, and others are verified copies;
  those of leaves with a new grid are written anew. Stored bits do not change.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from jaxinf.documents import Document
from jaxinf.errors import StoreFormatError
from jaxinf.io import fsync_directory
from jaxinf.io.failures import translated
from jaxinf.store.directory import StoreDirectory
from jaxinf.store.division import Division, Source, division_for, held_source
from jaxinf.store.documents import Name, read_document, write_document
from jaxinf.store.lock import lock_exclusively
from jaxinf.store.making import (
    process_roots,
)
from jaxinf.store.manifest import Manifest
from jaxinf.store.new_members import (
    NEW,
    WHOLE,
    Team,
    build,
    give_up_csds,
    targets_of,
)
from jaxinf.store.owned import DIVISION, DIVISION_LOCK
from jaxinf.store.regridding import ShardsOf
from jaxinf.store.space import stored_bytes
from jaxinf.store.whole import (
    find_members,
    link_whole,
)
from jaxinf.typing import ProgressCallback

_OLD = ".jaxinf-old"
_LOCKS = ("lock", "publish.lock", "checkpoints.lock")
_PARTS = ("jaxinf.json", "current", "slots", "checkpoints", "snapshots", "stream")
_PARTS += ("tokenizer",)
_MOST_PROCESSES = 1 << 20
_WHAT = "the journal of a division among processes"
_REMEDY = (
    "restore it from a backup; the store's files are in .jaxinf-old and .jaxinf-new"
)


class _Journal(Document, frozen=True):
    """The names of what is moved out of the path and into it."""

    old: Annotated[tuple[Name, ...], Meta(max_length=2**20)]
    new: Annotated[tuple[Name, ...], Meta(max_length=2**20)]
    checkpoints: tuple[Name, ...]
    is_whole: bool
    is_moved: bool


@dataclass(frozen=True)
class Redivided:
    """The result of a division.

    Attributes:
      num_chunks: number of the leaves' chunks with another owner.
      num_bytes: bytes of their state, in one step.
      idle: numbers of the processes that own nothing.
      regridded: names of the leaves with another grid, whose chunks were written anew.
      dropped: checkpoints that some members had and others not, or of another commit;
        they went with the old division.
    """

    num_chunks: int
    num_bytes: int
    idle: tuple[int, ...] = ()
    regridded: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


def redivide(
    path: Path,
    count: int,
    csd_roots: Sequence[str] = (),
    progress: ProgressCallback | None = None,
    *,
    shards_of: ShardsOf | None = None,
    team: Team | None = None,
) -> Redivided:
    """Divides a store, or a run of several processes, among some processes; blocks.

    No bit of a committed step or of a checkpoint changes. Chunks of leaves that are not
    sharded are dealt anew, and most stay with their owners. Those of sharded leaves go
    to processes that have the shard. If shards would cut the chunks of a leaf, the leaf
    gets a new grid, in checkpoints, too. The step before the committed one is given up.
    Checkpoints that all members have are kept, and others are dropped. After an
    interruption the old division is valid or the new one; call it again.

    Args:
      path: the store's or the run's path, where all members can be seen.
      count: number of processes, at least 1.
      csd_roots: existing CSD roots of each process, in which ``{process}`` is its
        number; by default those of the member of that number.
      progress: called with the bytes of files done and in all, without chunks that
        are written anew; of a team, those of this process.
      shards_of: returns the shards that a leaf will have; by default as `in_line`, and
        a store that is among so many processes already stays as it is.
      team: processes that make the new stores with this one; the others call
        `build_part`.

    Raises:
      ValueError: a number or a root is wrong.
      Exception: another process of the team failed; nothing was changed, and what the
        others have made stays in ``.jaxinf-new``, for the next call.
      StoreLockedError: a run has the store open.
      ProcessError: a member cannot be seen, or they have no step in common.
      StoreFormatError: the path has no store, or none with a committed step.
      StoreMismatchError: a checkpoint has other arrays than the store, or a new grid
        would cut blocks of codes; nothing was changed.
      StoreSpaceError: a drive has too little room; nothing was moved.
      StoreCorruptError: a chunk is damaged; nothing was changed.
      StoreIOError: a drive failed.
    """
    if not 1 <= count <= _MOST_PROCESSES:
        raise ValueError(f"processes={count}: expected from 1 to {_MOST_PROCESSES}")
    if not path.is_dir():
        raise StoreFormatError(f"{path}: expected a store or a run, found none")
    with lock_exclusively(path / DIVISION_LOCK):
        _finish(path)
        with held_source(path) as source:
            roots = [_roots(source, number, csd_roots) for number in range(count)]
            is_same = count == len(source.parts) and source.is_run == (count > 1)
            is_same &= roots == [list(part.manifest.csds) for part in source.parts]
            division = present = Division(source.whole.leaves, source.owners)
            if not is_same or shards_of is not None:
                division = division_for(source, count, shards_of)
            if is_same and division == present:
                if team is not None:
                    team.say("begin", None)
                return Redivided(0, 0)
            targets = targets_of(source, roots, division)
            build(source, targets, progress, team)
            _write_journal(source, targets)
            _finish(path)
            return _report(source, targets)


def num_processes(path: Path) -> int | None:
    """Returns the number of processes that a path is divided among; None if none is.

    A division that was interrupted is completed first; one under way is waited for.
    """
    if os.path.lexists(path / DIVISION):
        with lock_exclusively(path / DIVISION_LOCK):
            _finish(path)
    if (path / "jaxinf.json").exists():
        return 1
    for place in find_members(path):
        member = Manifest.read(place / "jaxinf.json").member
        if member is not None:
            return member.count
    return None


def _finish(path: Path) -> None:
    """Completes a division that was interrupted after its journal was written."""
    if not (path / DIVISION).exists():
        return
    journal = read_document(path / DIVISION, _Journal, _WHAT, _REMEDY)
    new, old = path / NEW, path / _OLD
    inside = new / WHOLE if journal.is_whole else new
    with translated("division", path):
        if not journal.is_moved:
            old.mkdir(exist_ok=True)
            for name in journal.old:
                if not os.path.lexists(old / name):
                    (path / name).rename(old / name)
            fsync_directory(old)
            for name in journal.new:
                if os.path.lexists(inside / name):
                    (inside / name).rename(path / name)
            fsync_directory(path)
            moved = msgspec.structs.replace(journal, is_moved=True)
            write_document(path / DIVISION, moved)
        for place in (old, *old.glob("process-*")):
            if (place / "jaxinf.json").exists():
                give_up_csds(StoreDirectory.open(place))
        for folder in (old, new):
            if folder.exists():
                shutil.rmtree(folder)
        if not journal.is_whole:
            places = [path / name for name in journal.new]
            members = [StoreDirectory.open(place) for place in places]
            for name in journal.checkpoints:
                if not (path / "checkpoints" / name).exists():
                    link_whole(path, members, name)
        (path / DIVISION).unlink()
        fsync_directory(path)


def _roots(source: Source, number: int, given: Sequence[str]) -> list[str]:
    if not given and number < len(source.parts):
        return list(source.parts[number].manifest.csds)
    is_needed = any(part.manifest.csds for part in source.parts)
    return process_roots(number, given, is_needed=is_needed)


# --- the journal ---------------------------------------------------------------------


def _write_journal(source: Source, targets: Sequence[StoreDirectory]) -> None:
    """Writes what is to be moved; from here on the new division is valid."""
    is_whole = targets[0].manifest.member is None
    names = [target.path.name for target in targets]
    if is_whole:
        found = sorted(file.name for file in targets[0].path.iterdir())
        names = [name for name in found if name not in _LOCKS]
    if source.is_run:
        old = [part.path.name for part in source.parts]
        kept = source.path / "checkpoints"
        old += ["checkpoints"] if kept.exists() else []
        names_of_whole = {f.name for f in kept.iterdir()} if kept.exists() else set()
    else:
        old = [name for name in _PARTS if os.path.lexists(source.path / name)]
        names_of_whole = set()
    common = {place.removeprefix("checkpoints/") for place in source.steps}
    both = tuple(sorted(common & names_of_whole))
    journal = _Journal(tuple(old), tuple(names), both, is_whole, is_moved=False)
    write_document(source.path / DIVISION, journal)


def _report(source: Source, targets: Sequence[StoreDirectory]) -> Redivided:
    num_chunks = num_bytes = 0
    regridded = []
    for number, leaf in enumerate(targets[0].manifest.leaves):
        if source.has_other_grid(number, targets[0]):
            regridded.append(leaf.name)
            continue
        before, after = source.owners[number], leaf.owners or (0,) * len(leaf.csds)
        for chunk, layout in enumerate(leaf.grid.chunks()):
            if before[chunk] != after[chunk]:
                num_chunks += 1
                num_bytes += sum(stored_bytes(layout, s) for s in leaf.states)
    idle = [
        n
        for n, target in enumerate(targets)
        if not any(leaf.held for leaf in target.manifest.leaves)
    ]
    return Redivided(
        num_chunks, num_bytes, tuple(idle), tuple(regridded), source.dropped
    )
