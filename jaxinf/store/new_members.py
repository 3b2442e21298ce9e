"""Makes the stores of a new division beside the old ones: in one process, or a team.

     source, division ─► manifests ─► links, copies, chunks of new grids ─► records
                                      each process of a team fills some of the stores

Invariant: old files are only read. A store has a committed step only when it is whole
  and durable.
"""

import contextlib
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
from jaxinf.store.checkpoint import add_documents
from jaxinf.store.chunk_writer import ChunkWriter
from jaxinf.store.commit import CommitRecord
from jaxinf.store.contents import StateRecord
from jaxinf.store.creation import create_documents, step_documents
from jaxinf.store.directory import StoreDirectory
from jaxinf.store.division import Division, Source, held_source
from jaxinf.store.making import (
    copy_beside,
    lay_out,
    member_of,
)
from jaxinf.store.manifest import Manifest, Member
from jaxinf.store.owners import check_owners, make_csds
from jaxinf.store.reader import StepReader
from jaxinf.store.rebalancing import (
    Move,
    bring_all,
    point,
    remove_csds,
    space_needs,
)
from jaxinf.store.regridding import regrid
from jaxinf.store.space import check_free_space, stored_bytes
from jaxinf.store.stock_documents import stock_documents
from jaxinf.store.whole import (
    member_name,
)
from jaxinf.store.zarr_metadata import ORBAX_ITEM, ORBAX_STATE
from jaxinf.typing import JsonValue, ProgressCallback

NEW = ".jaxinf-new"
WHOLE = "whole"  # below NEW, the store of one process


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


def targets_of(
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
        name = WHOLE if count == 1 else member_name(number)
        wanted.append(StoreDirectory(source.path / NEW / name, manifest))
    taken_up = _taken_up(wanted)
    if taken_up is None:
        _discard(source.path / NEW)
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
            member = Member(min(runs), member.number, member.count)
        expected = replace(new.manifest, store_id=one.manifest.store_id, member=member)
        if one.manifest != expected:
            return None
    return found


# --- filling it ---------------------------------------------------------------------


def build(
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
            _discard(source.path / NEW)
        raise
    fsync_directory(source.path / NEW)


def _check_complete(targets: Sequence[StoreDirectory]) -> None:
    """Refuses new stores that this process does not see whole."""
    for target in targets:
        if target.committed_slot() is None:
            raise StoreFormatError(
                f"{target.path}: expected the step that another process has written, "
                "found none; all processes must see one file system: give the command "
                "again, or without --distributed"
            )


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
    targets = [StoreDirectory.open(path / NEW / name) for name in own]
    with held_source(path, is_held=True) as source:
        _make(source, targets, begun["ids"], None)
    team.say("built", None)


def _make(
    source: Source,
    targets: Sequence[StoreDirectory],
    ids: Mapping[str, str],
    progress: ProgressCallback | None,
) -> None:
    """Fills new stores, durably.

    Args:
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
        for number, leaf, state, chunk in target.held():
            if source.has_other_grid(number, target):
                continue
            name = leaf.array_name(state.name)
            key = target.state_chunk(number, chunk, state).key
            csd = source.whole.leaves[number].csds[chunk]
            yield Move(
                place,
                folders[csd] / name / key,
                target.chunk_file(place, number, chunk, state.name),
                target.state_bytes(number, chunk, state),
                None if step is None else int(step.commit.checksums[name][chunk]),
                target.chunk_name(place, number, chunk, state.name),
            )


@dataclass(frozen=True)
class _ChunkAnew:
    """A chunk file of a new grid."""

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
        for number, leaf, state, chunk in target.held():
            if source.has_other_grid(number, target):
                yield _ChunkAnew(
                    place,
                    number,
                    chunk,
                    state,
                    leaf.csds[chunk],
                    target.chunk_file(place, number, chunk, state.name),
                    target.chunk_name(place, number, chunk, state.name),
                    stored_bytes(target.chunks[number][chunk], state),
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
            give_up_csds(StoreDirectory.open(place))
    shutil.rmtree(new, ignore_errors=True)


def give_up_csds(directory: StoreDirectory) -> None:
    """Removes the CSD directories of a store that is given up."""
    check_owners(directory, unmade=True)
    remove_csds(directory, keep=replace(directory.manifest, csds=()))
