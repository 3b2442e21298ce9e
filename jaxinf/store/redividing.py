"""Divides a store among another number of processes: chunks get other owners.

      .jaxinf-new made whole ─► divide.json ─► old names out ─► new names in ─► removal
               PATH is as it was            │ the next division completes the move

Invariant: until the journal is written, nothing of the store changes; from then on the
  new division is valid, and all but a division refuse the path until it is complete. A
  chunk that stays on its file system is a hard link, and others are verified copies:
  stored bits do not change.
"""

import contextlib
import math
import os
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxinf.errors import JaxinfError, StoreFormatError, StoreMismatchError
from jaxinf.io import fsync_directory
from jaxinf.io.failures import translated
from jaxinf.layout import reassign_csds
from jaxinf.schema import SchemaError
from jaxinf.store import schemas
from jaxinf.store.checkpoint import add_documents, checkpoint_names, find_checkpoint
from jaxinf.store.commit import CommitRecord
from jaxinf.store.creation import create_documents, step_documents
from jaxinf.store.directory import StoreDirectory, next_slot
from jaxinf.store.documents import (
    check_seal,
    no_document,
    read_document,
    write_document,
)
from jaxinf.store.lock import lock_exclusively
from jaxinf.store.making import (
    chunk_holders,
    copy_beside,
    lay_out,
    member_of,
    process_roots,
)
from jaxinf.store.manifest import Manifest, Member
from jaxinf.store.owned import DIVISION, DIVISION_LOCK, hold_store
from jaxinf.store.owners import check_owners, make_csds
from jaxinf.store.rebalancing import (
    Move,
    bring_all,
    finish_rebalance,
    point,
    remove_csds,
    space_needs,
)
from jaxinf.store.snapshot import PinnedStep
from jaxinf.store.space import check_free_space, stored_bytes
from jaxinf.store.stock_documents import stock_documents
from jaxinf.store.whole import (
    agreed_of,
    all_members,
    find_members,
    hold_members,
    link_whole,
    member_name,
    to_step,
)
from jaxinf.store.whole_step import WholeStep, joined_step
from jaxinf.store.zarr_metadata import ORBAX_ITEM, ORBAX_STATE
from jaxinf.typing import ProgressCallback

__all__ = ["Redivided", "num_processes", "redivide"]

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
      dropped: checkpoints that some members had and others not, or of another commit;
        they went with the old division.
    """

    num_chunks: int
    num_bytes: int
    idle: tuple[int, ...] = ()
    dropped: tuple[str, ...] = ()


def redivide(
    path: Path,
    count: int,
    csd_roots: Sequence[str] = (),
    progress: ProgressCallback | None = None,
) -> Redivided:
    """Divides a store, or a run of several processes, among some processes; blocks.

    No bit of a committed step or of a checkpoint changes, and grids stay. Chunks of
    leaves that are not sharded are dealt anew, and most stay with their owners. Those
    of sharded leaves go by their place: devices are taken to be in a line, as many for
    each process. The step before the committed one is given up. Checkpoints that all
    members have are kept, and others are dropped. After an interruption the old
    division is valid or the new one; call it again.

    Args:
      path: the store's or the run's path, where all members can be seen.
      count: number of processes, at least 1.
      csd_roots: existing CSD roots of each process, in which ``{process}`` is its
        number; by default those of the member of that number.
      progress: called with the bytes of files done and in all.

    Raises:
      ValueError: a number or a root is wrong.
      StoreLockedError: a run has the store open.
      ProcessError: a member cannot be seen, or they have no step in common.
      StoreFormatError: the path has no store, or none with a committed step.
      StoreMismatchError: a checkpoint has other arrays than the store.
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
        with _held(path) as source:
            roots = [_roots(source, number, csd_roots) for number in range(count)]
            is_same = count == len(source.parts) and not csd_roots
            if is_same and source.is_run == (count > 1):
                return Redivided(0, 0)
            targets = _targets(source, roots)
            _build(source, targets, progress)
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


# --- what is there -------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """A store or a run as it is, held by this process.

    Attributes:
      path: as given.
      parts: the members by number, or the store alone.
      steps: the committed step as slot ``a``, and the checkpoints, by place.
      spares: directories of the other slot's chunks, as `WholeStep.places`.
      dropped: checkpoints that are not of all parts.
    """

    path: Path
    parts: Sequence[StoreDirectory]
    steps: Mapping[str, WholeStep]
    spares: Sequence[Path]
    dropped: tuple[str, ...]

    @property
    def is_run(self) -> bool:
        """Whether it is divided among processes."""
        return self.parts[0].manifest.member is not None

    @property
    def whole(self) -> Manifest:
        """The leaves, each with all chunks."""
        return self.steps["a"].manifest

    @property
    def owners(self) -> list[Sequence[int]]:
        """The owner of each chunk, by leaf."""
        leaves = self.parts[0].manifest.leaves
        return [leaf.owners or (0,) * len(leaf.csds) for leaf in leaves]


@contextlib.contextmanager
def _held(path: Path) -> Iterator[_Source]:
    """Holds a store or all members of a run, at one step."""
    with contextlib.ExitStack() as stack:
        if (path / "jaxinf.json").exists() or not find_members(path):
            parts = [stack.enter_context(hold_store(path))]
        else:
            parts = stack.enter_context(hold_members(path))
            to_step(parts, agreed_of(all_members(path)))
        for one in parts:
            finish_rebalance(one)
        parts = [
            StoreDirectory(p.path, Manifest.read(p.path / "jaxinf.json"), p.lock)
            for p in parts
        ]
        slots = [one.committed_slot() for one in parts]
        current = [
            d.step_path(slot) for d, slot in zip(parts, slots, strict=True) if slot
        ]
        if len(current) < len(parts):
            raise StoreFormatError(
                f"{path}: expected a committed step, found a store whose making was "
                "interrupted; start its run again first"
            )
        steps = {"a": _step([*map(PinnedStep, parts, current)])}
        kept = _common_checkpoints(parts)
        for name in kept:
            place = f"checkpoints/{name}"
            steps[place] = _step([PinnedStep(d, d.step_path(place)) for d in parts])
        spares = [
            d.data_paths(d.step_path(next_slot(d.committed_slot()))) for d in parts
        ]
        dropped = {name for one in parts for name in checkpoint_names(one)} - set(kept)
        yield _Source(
            path,
            parts,
            steps,
            [place for own in spares for place in own],
            tuple(sorted(dropped)),
        )


def _step(parts: Sequence[PinnedStep]) -> WholeStep:
    records = [CommitRecord.read(part.path / "commit.json") for part in parts]
    for part, record in zip(parts, records, strict=True):
        record.check_fits(part.path / "commit.json", part.directory.manifest)
    if parts[0].directory.manifest.member is not None:
        return joined_step(parts, records)
    places = tuple(parts[0].directory.data_paths(parts[0].path))
    return WholeStep(parts[0].path, parts[0].directory.manifest, records[0], places)


def _common_checkpoints(parts: Sequence[StoreDirectory]) -> list[str]:
    """Returns the checkpoints that all parts have of one commit.

    Raises:
      StoreMismatchError: one has other arrays than the store.
    """
    names = set(checkpoint_names(parts[0])).intersection(*map(checkpoint_names, parts))
    found = []
    for name in sorted(names):
        if len({find_checkpoint(one, name).commit for one in parts}) > 1:
            continue
        for one in parts:
            place = one.step_path(f"checkpoints/{name}")
            held = Manifest.read(place / "jaxinf.json")
            if held.leaves != one.manifest.leaves:
                raise StoreMismatchError(
                    f"{one.path}: the checkpoint {name} holds other arrays than the "
                    "store does now; export it, and remove it from the store"
                )
        found.append(name)
    return found


# --- what is to be -------------------------------------------------------------------


def _roots(source: _Source, number: int, given: Sequence[str]) -> list[str]:
    """Returns the CSD roots of a process."""
    if not given and number < len(source.parts):
        return list(source.parts[number].manifest.csds)
    is_needed = any(part.manifest.csds for part in source.parts)
    return process_roots(number, given, is_needed=is_needed)


def _owners(source: _Source, count: int) -> list[list[int]]:
    """Returns the new owner of each chunk, by leaf."""
    sizes, held, owners = [], [], []
    for leaf, own in zip(source.whole.leaves, source.owners, strict=True):
        num_shards = math.prod(leaf.shard_counts)
        if num_shards > 1:
            holders = [[shard * count // num_shards] for shard in range(num_shards)]
            places = chunk_holders(leaf, leaf.shard_counts, holders)
            owners.append([place[0] for place in places])
            continue
        for chunk, owner in zip(leaf.grid.chunks(), own, strict=True):
            sizes.append(sum(stored_bytes(chunk, state) for state in leaf.states))
            held.append(owner if owner < count else None)
        owners.append([])
    dealt = iter(reassign_csds(sizes, held, count))
    return [
        found or [next(dealt) for _ in leaf.csds]
        for leaf, found in zip(source.whole.leaves, owners, strict=True)
    ]


def _targets(source: _Source, roots: Sequence[Sequence[str]]) -> list[StoreDirectory]:
    """Returns the new members, or the one store, at the places where they are made.

    Those of an interrupted call are taken up if they are the same, else removed.
    """
    count, whole = len(roots), source.whole
    owners, run = _owners(source, count), uuid.uuid4().hex
    shapes = [leaf.chunk_shape for leaf in whole.leaves]
    wanted = []
    for number, own in enumerate(roots):
        manifest = lay_out(whole, shapes, own)
        if count > 1:
            member = Member(run, number, count)
            manifest = member_of(manifest, member, owners)
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
    source: _Source,
    targets: Sequence[StoreDirectory],
    progress: ProgressCallback | None,
) -> None:
    """Makes the new stores durably beside the old ones."""
    moves = [list(_moves(source, target)) for target in targets]
    ids = {place: f"{uuid.uuid4().hex}-0" for place in source.steps}
    total, before = sum(m.num_bytes for own in moves for m in own), 0
    try:
        with translated("division", source.path):
            for target in targets:
                target.path.mkdir(parents=True, exist_ok=True)
        needs: dict[Path, int] = defaultdict(int)
        for target, own in zip(targets, moves, strict=True):
            for root, num_bytes in space_needs(own, target).items():
                needs[root] += num_bytes
        check_free_space(needs, "the chunks to come need", "free some, or give others")
        for target in targets:
            target.manifest.write(target.path / "jaxinf.json")
        for target, own in zip(targets, moves, strict=True):

            def tell(done: int, _: int, before: int = before) -> None:
                if progress is not None:
                    progress(before + done, total)

            bring_all(own, target, tell)
            before += sum(move.num_bytes for move in own)
            with translated("division", target.path):
                _complete(source, target, own, ids)
    except (JaxinfError, ValueError, OSError):
        _discard(source.path / _NEW)
        raise
    fsync_directory(source.path / _NEW)


def _complete(
    source: _Source,
    target: StoreDirectory,
    moves: Sequence[Move],
    ids: Mapping[str, str],
) -> None:
    """Adds documents, links and records to a store with its chunks, durably."""
    make_csds(target)
    timestamp_ns = time.time_ns()
    for slot in ("a", "b"):
        create_documents(target, slot, timestamp_ns)
    if target.manifest.csds:
        for move in moves:
            move.link.parent.mkdir(parents=True, exist_ok=True)
            point(move.link, move.target)
    for place, whole in source.steps.items():
        commit = ids[place] if target.manifest.member is not None else ""
        record = whole.commit.part(target.manifest, commit)
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


def _moves(source: _Source, target: StoreDirectory) -> Iterator[Move]:
    """Yields the files of a new store, those of committed steps first."""
    places = [(place, step.places, step) for place, step in source.steps.items()]
    for place, folders, step in [*places, ("b", source.spares, None)]:
        for number, leaf in enumerate(target.manifest.leaves):
            held = source.whole.leaves[number]
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


def _write_journal(source: _Source, targets: Sequence[StoreDirectory]) -> None:
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


def _report(source: _Source, targets: Sequence[StoreDirectory]) -> Redivided:
    num_chunks = num_bytes = 0
    for number, leaf in enumerate(targets[0].manifest.leaves):
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
    return Redivided(num_chunks, num_bytes, tuple(idle), source.dropped)
