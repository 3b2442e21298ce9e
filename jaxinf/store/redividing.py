"""Divides a store among another number of processes: chunks get other owners.

      .jaxinf-new made whole ─► divide.json ─► old names out ─► new names in ─► removal
               PATH is as it was            │ the next division completes the move

Invariant: until the journal is written, nothing of the store changes; from then on the
  new division is valid, and all but a division refuse the path until it is complete. A
  chunk that stays on its file system is a hard link, and others are verified copies;
  those of leaves with a new grid are written anew. Stored bits do not change.
"""

import contextlib
import os
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxinf.errors import JaxinfError, StoreFormatError
from jaxinf.io import fsync_directory
from jaxinf.io.failures import translated
from jaxinf.schema import SchemaError
from jaxinf.store import schemas
from jaxinf.store.checkpoint import add_documents
from jaxinf.store.chunk_writer import ChunkWriter
from jaxinf.store.commit import CommitRecord
from jaxinf.store.contents import StateRecord
from jaxinf.store.creation import create_documents, step_documents
from jaxinf.store.directory import StoreDirectory
from jaxinf.store.division import Division, Source, division_for, held_source
from jaxinf.store.documents import (
    check_seal,
    no_document,
    read_document,
    write_document,
)
from jaxinf.store.lock import lock_exclusively
from jaxinf.store.making import (
    copy_beside,
    lay_out,
    member_of,
    process_roots,
)
from jaxinf.store.manifest import Manifest, Member
from jaxinf.store.owned import DIVISION, DIVISION_LOCK
from jaxinf.store.owners import check_owners, make_csds
from jaxinf.store.reader import StepReader
from jaxinf.store.rebalancing import (
    Move,
    bring_all,
    point,
    remove_csds,
    space_needs,
)
from jaxinf.store.regridding import ShardsOf, regrid
from jaxinf.store.space import check_free_space, stored_bytes
from jaxinf.store.stock_documents import stock_documents
from jaxinf.store.whole import (
    find_members,
    link_whole,
    member_name,
)
from jaxinf.store.zarr_metadata import ORBAX_ITEM, ORBAX_STATE
from jaxinf.typing import JsonValue, ProgressCallback

__all__ = ["Redivided", "Team", "build_part", "num_processes", "redivide"]

_NEW, _OLD = ".jaxinf-new", ".jaxinf-old"
_WHOLE = "whole"  # below _NEW, the store of one process
_LOCKS = ("lock", "publish.lock", "checkpoints.lock")
_PARTS = ("jaxinf.json", "current", "slots", "checkpoints", "snapshots", "stream")
_PARTS += ("tokenizer",)
_MOST_PROCESSES = 1 << 20
_WHAT = "the journal of a division among processes"
_REMEDY = (
    "restore it from a backup; the store's files are in .jaxinf-old and .jaxinf-new"
)


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


@dataclass(frozen=True)
class Team:
    """Processes that divide a store together; each sees all of it.

    Attributes:
      number: number of this process; the first, 0, leads.
      count: number of processes.
      say: tells the others a value by a name.
      hear: waits for what a process says by a name; raises if it fails or is silent.
    """

    number: int
    count: int
    say: Callable[[str, JsonValue], None]
    hear: Callable[[int, str], Any]


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
            targets = _targets(source, roots, division)
            _build(source, targets, progress, team)
            _write_journal(source, targets)
            _finish(path)
            return _report(source, targets)


def build_part(path: Path, team: Team) -> None:
    """Makes this process's part of a division that the first of a team leads; blocks.

    Args:
      path: as the first process has it; it sees all members and CSDs, too.
      team: the processes.

    Raises:
      Exception: as `redivide`, or the first process failed.
    """
    begun = team.hear(0, "begin")
    if begun is None:
        return
    own = begun["names"][team.number :: team.count]
    targets = [StoreDirectory.open(path / _NEW / name) for name in own]
    with held_source(path, is_held=True) as source:
        _make(source, targets, begun["ids"], None)
    team.say("built", None)


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
    journal = _read_journal(path)
    if journal is None:
        return
    new, old = path / _NEW, path / _OLD
    inside = new / _WHOLE if journal["is_whole"] else new
    with translated("division", path):
        if not journal["is_moved"]:
            old.mkdir(exist_ok=True)
            for name in journal["old"]:
                if not os.path.lexists(old / name):
                    (path / name).rename(old / name)
            fsync_directory(old)
            for name in journal["new"]:
                if os.path.lexists(inside / name):
                    (inside / name).rename(path / name)
            fsync_directory(path)
            write_document(path / DIVISION, {**journal, "is_moved": True})
        for place in (old, *old.glob("process-*")):
            if (place / "jaxinf.json").exists():
                _remove_csds(StoreDirectory.open(place))
        for folder in (old, new):
            if folder.exists():
                shutil.rmtree(folder)
        if not journal["is_whole"]:
            places = [path / name for name in journal["new"]]
            members = [StoreDirectory.open(place) for place in places]
            for name in journal["checkpoints"]:
                if not (path / "checkpoints" / name).exists():
                    link_whole(path, members, name)
        (path / DIVISION).unlink()
        fsync_directory(path)


# --- what is to be -------------------------------------------------------------------


def _roots(source: Source, number: int, given: Sequence[str]) -> list[str]:
    """Returns the CSD roots of a process."""
    if not given and number < len(source.parts):
        return list(source.parts[number].manifest.csds)
    is_needed = any(part.manifest.csds for part in source.parts)
    return process_roots(number, given, is_needed=is_needed)


def _targets(
    source: Source, roots: Sequence[Sequence[str]], division: Division
) -> list[StoreDirectory]:
    """Returns the new members, or the one store, at the places where they are made.

    Those of an interrupted call are taken up if they are the same, else removed.
    """
    count, run = len(roots), uuid.uuid4().hex
    whole = replace(source.whole, leaves=tuple(division.leaves))
    shapes = [leaf.chunk_shape for leaf in whole.leaves]
    wanted = []
    for number, own in enumerate(roots):
        manifest = lay_out(whole, shapes, own)
        if count > 1:
            member = Member(run, number, count)
            manifest = member_of(manifest, member, division.owners)
        name = _WHOLE if count == 1 else member_name(number)
        wanted.append(StoreDirectory(source.path / _NEW / name, manifest))
    taken_up = _taken_up(wanted)
    if taken_up is None:
        _discard(source.path / _NEW)
    return taken_up or wanted


def _taken_up(wanted: Sequence[StoreDirectory]) -> list[StoreDirectory] | None:
    """Returns what an interrupted call has begun; None if it is something else."""
    found = []
    for one in wanted:
        try:
            held = Manifest.read(one.path / "jaxinf.json")
        except StoreFormatError:
            return None
        found.append(StoreDirectory(one.path, held))
    runs = {d.manifest.member.run for d in found if d.manifest.member is not None}
    for one, new in zip(found, wanted, strict=True):
        member = new.manifest.member
        if member is not None and len(runs) == 1:
            member = replace(member, run=min(runs))
        expected = replace(new.manifest, store_id=one.manifest.store_id, member=member)
        if one.manifest != expected:
            return None
    return found


# --- making it -----------------------------------------------------------------------


def _build(
    source: Source,
    targets: Sequence[StoreDirectory],
    progress: ProgressCallback | None,
    team: Team | None,
) -> None:
    """Makes the new stores durably beside the old ones."""
    ids = {place: f"{uuid.uuid4().hex}-0" for place in source.steps}
    are_others_writing = False
    try:
        with translated("division", source.path):
            for target in targets:
                target.path.mkdir(parents=True, exist_ok=True)
        needs: dict[Path, int] = defaultdict(int)
        for target in targets:
            moves = list(_moves(source, target))
            for root, num_bytes in space_needs(moves, target).items():
                needs[root] += num_bytes
            for one in _chunks_anew(source, target):
                needs[target.csd_directory(one.csd)] += one.num_bytes
        check_free_space(needs, "the chunks to come need", "free some, or give others")
        for target in targets:
            target.manifest.write(target.path / "jaxinf.json")
        if team is None:
            _make(source, targets, ids, progress)
        else:
            names: list[JsonValue] = [target.path.name for target in targets]
            are_others_writing = True
            team.say("begin", {"ids": ids, "names": names})
            _make(source, targets[:: team.count], ids, progress)
            for number in range(1, team.count):
                team.hear(number, "built")
            _check_complete(targets)
    except (JaxinfError, ValueError, OSError):
        if not are_others_writing:
            _discard(source.path / _NEW)
        raise
    fsync_directory(source.path / _NEW)


def _check_complete(targets: Sequence[StoreDirectory]) -> None:
    """Refuses new stores that this process does not see whole."""
    for target in targets:
        if target.committed_slot() is None:
            raise StoreFormatError(
                f"{target.path}: expected the step that another process has written, "
                "found none; all processes must see one file system: give the command "
                "again, or without --distributed"
            )


def _make(
    source: Source,
    targets: Sequence[StoreDirectory],
    ids: Mapping[str, str],
    progress: ProgressCallback | None,
) -> None:
    """Fills new stores, durably.

    Args:
      source: the old ones.
      targets: the new ones, or some of them, which have their manifests.
      ids: the id of each step's new commit, by place.
      progress: called with the bytes of files done and in all.
    """
    moves = [list(_moves(source, target)) for target in targets]
    total, before = sum(m.num_bytes for own in moves for m in own), 0
    for target, own in zip(targets, moves, strict=True):

        def tell(done: int, _: int, before: int = before) -> None:
            if progress is not None:
                progress(before + done, total)

        bring_all(own, target, tell)
        before += sum(move.num_bytes for move in own)
    with translated("division", source.path):
        steps = _write_anew(source, targets)
    for target, own in zip(targets, moves, strict=True):
        with translated("division", target.path):
            _complete(source, target, own, ids, steps)


def _complete(
    source: Source,
    target: StoreDirectory,
    moves: Sequence[Move],
    ids: Mapping[str, str],
    steps: Mapping[str, CommitRecord],
) -> None:
    """Adds documents, links and records to a store with its chunks, durably."""
    make_csds(target)
    timestamp_ns = time.time_ns()
    for slot in ("a", "b"):
        create_documents(target, slot, timestamp_ns)
    if target.manifest.csds:
        for one in [*moves, *_chunks_anew(source, target)]:
            one.link.parent.mkdir(parents=True, exist_ok=True)
            point(one.link, one.target)
    for place, step in steps.items():
        commit = ids[place] if target.manifest.member is not None else ""
        record = step.part(target.manifest, commit)
        root = target.step_path(place)
        if place == "a":
            documents = stock_documents(root, target.manifest)
            target.sync()
            target.publish("a", replace(record, documents=documents))
            continue
        for name, content in step_documents(target.manifest, timestamp_ns):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        if (root / ORBAX_ITEM).exists():
            shutil.rmtree(root / ORBAX_ITEM)
        (root / ORBAX_STATE).unlink(missing_ok=True)
        add_documents(target, root, record)
    for part in source.parts:
        copy_beside(part.path, target.path)
    target.sync()


def _moves(source: Source, target: StoreDirectory) -> Iterator[Move]:
    """Yields the files of a new store, those of committed steps first."""
    places = [(place, step.places, step) for place, step in source.steps.items()]
    for place, folders, step in [*places, ("b", source.spares, None)]:
        for number, leaf in enumerate(target.manifest.leaves):
            held = source.whole.leaves[number]
            if source.has_other_grid(number, target):
                continue
            for state in leaf.states:
                name = leaf.array_name(state.name)
                for chunk in leaf.held:
                    key = target.state_chunk(number, chunk, state).key
                    yield Move(
                        place,
                        folders[held.csds[chunk]] / name / key,
                        target.chunk_file(place, number, chunk, state.name),
                        target.state_bytes(number, chunk, state),
                        None
                        if step is None
                        else int(step.commit.checksums[name][chunk]),
                        target.step_path(place) / name / key,
                    )


@dataclass(frozen=True)
class _ChunkAnew:
    """A chunk file of a new grid.

    Attributes:
      place, leaf, chunk, state: what it is.
      csd: the CSD that has it.
      target: the file.
      link: its name in the store.
      num_bytes: bytes on the drive.
    """

    place: str
    leaf: int
    chunk: int
    state: StateRecord
    csd: int
    target: Path
    link: Path
    num_bytes: int


def _chunks_anew(source: Source, target: StoreDirectory) -> Iterator[_ChunkAnew]:
    """Yields the files of a new store that are written anew, in all its steps."""
    for place in (*source.steps, "b"):
        for number, leaf, chunks in target.leaves():
            if not source.has_other_grid(number, target):
                continue
            for state in leaf.states:
                for chunk in leaf.held:
                    key = target.state_chunk(number, chunk, state).key
                    name = leaf.array_name(state.name)
                    yield _ChunkAnew(
                        place,
                        number,
                        chunk,
                        state,
                        leaf.csds[chunk],
                        target.chunk_file(place, number, chunk, state.name),
                        target.step_path(place) / name / key,
                        stored_bytes(chunks[chunk], state),
                    )


def _write_anew(
    source: Source, targets: Sequence[StoreDirectory]
) -> dict[str, CommitRecord]:
    """Writes the chunks of new grids; returns the records of all steps with them."""
    for target in targets:
        for one in _chunks_anew(source, target):
            one.target.parent.mkdir(parents=True, exist_ok=True)
            one.target.unlink(missing_ok=True)
            layout = target.state_chunk(one.leaf, one.chunk, one.state)
            target.allocate(one.target, layout, one.state)
    numbers = [
        number
        for number in range(len(source.whole.leaves) if targets else 0)
        if source.has_other_grid(number, targets[0])
    ]
    found = {}
    for place, step in source.steps.items():
        writers = [ChunkWriter(target, place) for target in targets]
        sums = dict(step.commit.checksums)
        with StepReader(step.path, step.commit, places=step.places) as reader:
            for number in numbers:
                leaf = step.manifest.leaves[number]
                sums |= regrid(reader, number, leaf, writers)
        found[place] = replace(step.commit, checksums=sums)
    return found


def _discard(new: Path) -> None:
    """Removes what a call has made that will not be completed."""
    for place in new.glob("*") if new.exists() else ():
        with contextlib.suppress(StoreFormatError):
            _remove_csds(StoreDirectory.open(place))
    shutil.rmtree(new, ignore_errors=True)


def _remove_csds(directory: StoreDirectory) -> None:
    check_owners(directory, unmade=True)
    remove_csds(directory, keep=replace(directory.manifest, csds=()))


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
    document = {
        "old": old,
        "new": names,
        "checkpoints": sorted(common & names_of_whole),
        "is_whole": is_whole,
        "is_moved": False,
    }
    write_document(source.path / DIVISION, document)


def _read_journal(path: Path) -> dict[str, Any] | None:
    file = path / DIVISION
    if not file.exists():
        return None
    raw, document = read_document(file, _WHAT, _REMEDY)
    check_seal(file, raw, _WHAT, _REMEDY)
    try:
        schemas.DIVISION.check(document)
    except SchemaError as error:
        raise no_document(file, _WHAT, _REMEDY, error) from error
    return document


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
