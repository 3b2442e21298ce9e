"""The one way to write a step: a copy in other formats, on other drives, among others.

      OLD ──links, copies, recoded chunks──► .NEW.copying ──sync, records──► NEW
      only read                              complete, durable     one rename at the end

Invariant: OLD is whole until NEW is, and NEW appears whole. A crash has nothing to
  undo: the same call goes on. If NEW is OLD, they are exchanged at the end.
"""

import contextlib
import ctypes
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxinf.errors import (
    ExchangeError,
    JaxinfError,
    StoreFormatError,
    StoreIOError,
    StoreMismatchError,
)
from jaxinf.io import fsync_directory, write_bytes_atomically
from jaxinf.io.failures import translated
from jaxinf.store.carry import make_carry, write_carry
from jaxinf.store.checkpoint import add_documents, checkpoint_names
from jaxinf.store.commit import CommitRecord
from jaxinf.store.copy_files import CopiedFile, copied_files, make_files, room_needed
from jaxinf.store.copy_source import CopySource, check_unread
from jaxinf.store.creation import check_free_space, make_chunks
from jaxinf.store.directory import SLOTS, StoreDirectory
from jaxinf.store.division import Division, division_for
from jaxinf.store.formats import AS_IT_IS, Formats
from jaxinf.store.lock import StoreLock, lock_exclusively
from jaxinf.store.making import lay_out, member_of, process_roots, room_for_shares
from jaxinf.store.manifest import Manifest, Member
from jaxinf.store.owners import check_owners, check_places, claim_csds, make_csds
from jaxinf.store.regridding import ShardsOf
from jaxinf.store.stock_documents import create_documents, stock_documents
from jaxinf.store.whole import find_members, link_whole, member_name
from jaxinf.typing import ProgressCallback

_MOST_PROCESSES = 1 << 20
_RENAME_EXCHANGE = 2
_AT_CWD = -100

# Names of a store's and a run's own; others in a path belong to its user.
_OWN = re.compile(
    r"jaxinf\.json|current(\.tmp)?|slots|checkpoints|snapshots|stream|tokenizer"
    r"|((publish|checkpoints)\.)?lock|replacement\.new|process-\d{5,}|\.jaxinf.*"
)


@dataclass(frozen=True)
class CopyLayout:
    """The form of a copy; what is not given stays.

    Attributes:
      formats: of its arrays.
      csd_roots: existing CSD roots, in which ``{process}`` is a process's number. By
        default none, and in place those that there are.
      shares: for each root its share of the chunks' bytes, as far as it has room.
      processes: number of processes.
      shards_of: returns the shards that a leaf will have; by default as `in_line`.
    """

    formats: Formats = AS_IT_IS
    csd_roots: Sequence[str] = ()
    shares: Sequence[float] = ()
    processes: int | None = None
    shards_of: ShardsOf | None = None


@dataclass(frozen=True)
class Copied:
    """What came of a copy.

    Attributes:
      step: the step.
      num_bytes: bytes that it wrote; others are links. 0 in place if nothing changes.
      regridded: names of leaves with another grid.
      idle: numbers of the processes that hold no chunk.
      dropped: checkpoints that some members lacked.
    """

    step: int
    num_bytes: int
    regridded: tuple[str, ...] = ()
    idle: tuple[int, ...] = ()
    dropped: tuple[str, ...] = ()


def copy_step(
    source: CopySource,
    target: Path,
    layout: CopyLayout,
    progress: ProgressCallback | None = None,
) -> Copied:
    """Makes a store, or a run of several processes, of a source's steps; blocks.

    Chunks whose bytes stay are hard links where they can be, and else verified copies.
    Float32 values do not change; to fewer bits they are rounded as a step would.

    Args:
      source: the steps. If this process holds it, the target is its path.
      target: missing or an empty directory; in place the source itself.
      progress: called with the bytes of elements done and in all.

    Raises:
      ValueError: a number, a root or a format is wrong.
      StoreFormatError: something else is at the target.
      StoreMismatchError: a new grid would cut blocks of codes, or chunks cannot be
        recoded on it.
      StoreSpaceError: there is no room; nothing was written.
      StoreLockedError: another process makes the same copy.
      StoreCorruptError: a chunk is damaged; there is no copy.
      StoreError: a drive failed, or the source cannot be read.
    """
    target = Path(os.path.realpath(target))
    staging = _staging(target)
    manifests, division = _manifests(source, layout, target)
    _check_target(source, target)
    if source.held and _is_same(source, manifests):
        _discard(staging, target)
        return Copied(source.steps["a"].commit.step, 0)
    with translated("copy", staging):
        staging.mkdir(parents=True, exist_ok=True)
    lock = StoreLock(staging)
    try:
        files = _build(source, manifests, staging, target, progress)
        _publish(source, staging, target)
    finally:
        lock.release()
    members = [StoreDirectory.open(place) for place in find_members(target)]
    for one in members or [StoreDirectory.open(target)]:
        claim_csds(one, [Path(root) for root in one.manifest.csds])
    num_written = sum(
        one.room_bytes for one in files if one.how not in ("link", "room")
    )
    regridded = {
        new.name
        for old, new in zip(source.whole.leaves, division.leaves, strict=True)
        if old.chunk_shape != new.chunk_shape
    }
    idle = [n for n, m in enumerate(manifests) if not any(x.held for x in m.leaves)]
    return Copied(
        source.steps["a"].commit.step,
        num_written,
        tuple(sorted(regridded)),
        tuple(idle),
        source.dropped,
    )


def left_by_copy(path: Path) -> Path | None:
    """Returns the directory of a copy to a path that is not complete, if any."""
    staging = _staging(Path(os.path.realpath(path)))
    return staging if os.path.lexists(staging) else None


def _staging(target: Path) -> Path:
    return target.with_name(f".{target.name}.copying")


# --- what is to be -------------------------------------------------------------------


def _manifests(
    source: CopySource, layout: CopyLayout, target: Path
) -> tuple[list[Manifest], Division]:
    """Returns the manifests of the new members, or of the one store."""
    held = source.division
    count = held.count if layout.processes is None else layout.processes
    if not 1 <= count <= _MOST_PROCESSES:
        raise ValueError(f"processes={count}: expected from 1 to {_MOST_PROCESSES}")
    whole = layout.formats.of(source.whole, source.where)
    held = replace(held, leaves=whole.leaves)
    division = division_for(held, count, layout.shards_of, source.where)
    for old, new in zip(source.whole.leaves, division.leaves, strict=True):
        if old.chunk_shape != new.chunk_shape and old.states != new.states:
            raise StoreMismatchError(
                f"{source.where}: leaf {new.name}: expected another grid or other "
                "formats, found both; make two copies, one after the other"
            )
    run, found = uuid.uuid4().hex, []
    for number in range(count):
        roots = _roots(source, layout, number, target)
        contents = replace(whole, leaves=tuple(division.leaves))
        shapes = [leaf.chunk_shape for leaf in division.leaves]
        if count > 1:
            member = Member(run, number, count)
            made = member_of(lay_out(contents, shapes, roots), member, division.owners)
        else:
            made = _of_one(source, contents, roots, layout.shares)
        found.append(made)
    return found, division


def _of_one(
    source: CopySource,
    contents: Manifest,
    roots: Sequence[str],
    shares: Sequence[float],
) -> Manifest:
    """Returns the manifest of one store; chunks stay on their drives if they may."""
    shapes = [leaf.chunk_shape for leaf in contents.leaves]
    [held] = source.parts if len(source.parts) == 1 else [None]
    if held is not None and [n.chunk_shape for n in held.leaves] != shapes:
        held = None
    room = room_for_shares(roots, held, len(source.steps) + 1) if shares else ()
    return lay_out(contents, shapes, roots, held=held, shares=shares, room=room)


def _roots(
    source: CopySource, layout: CopyLayout, number: int, target: Path
) -> list[str]:
    if source.held and not layout.csd_roots and number < len(source.parts):
        return list(source.parts[number].csds)
    is_needed = bool(source.held) and any(part.csds for part in source.parts)
    roots = process_roots(number, layout.csd_roots, is_needed=is_needed)
    if len(set(roots)) != len(roots):
        raise ValueError(f"the same CSD root is given twice: {roots}")
    return roots


def _is_same(source: CopySource, wanted: Sequence[Manifest]) -> bool:
    """Whether a source has these leaves, owners, roots and, alone, places already."""
    if len(source.parts) != len(wanted):
        return False
    is_one = len(wanted) == 1
    return all(
        old.csds == new.csds
        and _without_places(old, keeps=is_one) == _without_places(new, keeps=is_one)
        for old, new in zip(source.parts, wanted, strict=True)
    )


def _without_places(manifest: Manifest, *, keeps: bool) -> list[object]:
    if keeps:
        return list(manifest.leaves)
    return [replace(leaf, csds=()) for leaf in manifest.leaves]


def _check_target(source: CopySource, target: Path) -> None:
    """Refuses a target where a copy cannot appear; what it tries, it removes."""
    if source.held:
        if os.path.ismount(target):
            raise StoreFormatError(
                f"{target}: expected a directory that can be renamed, found a mount "
                "point; give another path for the copy"
            )
        _check_exchange(target.parent)
        return
    found = os.listdir(target) if target.is_dir() else ["a file"]
    if os.path.lexists(target) and (found or os.path.ismount(target)):
        what = ", ".join(sorted(found)[:3]) or "a mount point"
        raise StoreFormatError(
            f"{target}: expected nothing there, or an empty directory, for a new "
            f"store, found {what}; give another path"
        )


def _check_exchange(folder: Path) -> None:
    with (
        translated("copy", folder),
        tempfile.TemporaryDirectory(prefix=".jaxinf-", dir=folder) as first,
        tempfile.TemporaryDirectory(prefix=".jaxinf-", dir=folder) as second,
    ):
        _exchange(Path(first), Path(second))


# --- making it -----------------------------------------------------------------------


def _parts(
    source: CopySource, manifests: Sequence[Manifest], staging: Path, target: Path
) -> list[StoreDirectory]:
    """Returns the new stores at their places, with those that a call has begun.

    What is there of another copy is removed.
    """
    is_run = len(manifests) > 1
    names = [member_name(n) if is_run else "." for n in range(len(manifests))]
    pairs = list(zip(names, manifests, strict=True))
    for name, manifest in pairs:
        check_places(StoreDirectory(target / name, manifest))
    wanted = [StoreDirectory(staging / name, manifest) for name, manifest in pairs]
    found = _taken_up(wanted)
    if found is not None and all(
        {f"checkpoints/{name}" for name in checkpoint_names(one)} <= {*source.steps}
        for one in found
    ):
        for one in found:
            (one.path / "current").unlink(missing_ok=True)
            for slot in SLOTS:
                one.unpublish(slot)
        return found
    _discard(staging, target, keeps=True)
    return wanted


def _taken_up(wanted: Sequence[StoreDirectory]) -> list[StoreDirectory] | None:
    """Returns what an interrupted call has begun; None if it is something else."""
    found = []
    for one in wanted:
        if not (one.path / "jaxinf.json").exists():
            return None
        found.append(StoreDirectory.open(one.path))
    runs = {d.manifest.member.run for d in found if d.manifest.member is not None}
    for one, new in zip(found, wanted, strict=True):
        member = new.manifest.member
        if member is not None and len(runs) == 1:
            member = Member(min(runs), member.number, member.count)
        expected = replace(new.manifest, store_id=one.manifest.store_id, member=member)
        if one.manifest != expected:
            return None
    return found


def _build(
    source: CopySource,
    manifests: Sequence[Manifest],
    staging: Path,
    target: Path,
    progress: ProgressCallback | None,
) -> list[CopiedFile]:
    """Makes the copy beside its place; a failed one is removed, unless it goes on."""
    goes_on = False
    try:
        parts = _parts(source, manifests, staging, target)
        goes_on = (parts[0].path / "jaxinf.json").exists()
        with translated("copy", source.where):
            files = list(copied_files(source, parts))
        check_free_space(
            room_needed(files), "the chunks to come need", "free some, or give others"
        )
        _make(source, parts, files, progress)
    except (JaxinfError, ValueError) as error:
        if not goes_on and not isinstance(error, ExchangeError):  # connections return
            _discard(staging, target)
        raise
    return files


def _make(
    source: CopySource,
    parts: Sequence[StoreDirectory],
    files: Sequence[CopiedFile],
    progress: ProgressCallback | None,
) -> None:
    """Makes the new stores whole and durable, not yet at their place."""
    ids = {place: f"{uuid.uuid4().hex}-0" for place in source.steps}
    for part in parts:
        with translated("copy", part.path):
            part.path.mkdir(exist_ok=True)
            part.manifest.write(part.path / "jaxinf.json")
            make_csds(part)
    records, beside = make_files(source, files, progress), source.beside()
    timestamp_ns = time.time_ns()
    for part in parts:
        with translated("copy", part.path):
            for place in (*records, "b"):
                create_documents(part.step_path(place), part.manifest, timestamp_ns)
                make_chunks(part, place)
            for name, content in beside.items():
                (part.path / name).parent.mkdir(exist_ok=True)
                write_bytes_atomically(part.path / name, content)
            for place, record in records.items():
                commit = ids[place] if part.manifest.member is not None else ""
                own = record.part(part.manifest, commit)
                own = replace(own, carried=source.read_carry(source.steps[place]))
                _complete(part, place, own)
    if parts[0].manifest.member is not None:
        root = parts[0].path.parent
        for place in (p for p in source.steps if p != "a"):
            name = place.removeprefix("checkpoints/")
            shutil.rmtree(root / place, ignore_errors=True)
            link_whole(root, parts, name)
    for part in parts:
        part.sync()
        part.flip("a")


def _complete(part: StoreDirectory, place: str, record: CommitRecord) -> None:
    """Adds the record, and what a checkpoint has beside it."""
    root = part.step_path(place)
    make_carry(root, part.manifest, record.carry)
    write_carry(root, record.carry, record.carried)
    if place == "a":
        documents = stock_documents(root, part.manifest)
        part.sync()
        part.write_record("a", replace(record, documents=documents))
    else:
        add_documents(part, root, record)


# --- its place -----------------------------------------------------------------------


def _publish(source: CopySource, staging: Path, target: Path) -> None:
    """Gives a complete copy its place; in place, removes what was there."""
    with translated("copy", target):
        fsync_directory(staging)
        if not source.held:
            staging.rename(target)
            fsync_directory(target.parent)
            return
        with contextlib.ExitStack() as locks:
            for one in source.held:
                locks.enter_context(lock_exclusively(one.publish_lock))
                check_unread(one)
                if one.lock is not None:
                    one.lock.check()
            _exchange(staging, target)
        fsync_directory(target.parent)
        _discard(staging, target)


def _exchange(first: Path, second: Path) -> None:
    """Exchanges two directories, at one instant.

    Raises:
      StoreIOError: the file system cannot; nothing was changed.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(first), os.fsencode(second)
    if call is None or call(_AT_CWD, names[0], _AT_CWD, names[1], _RENAME_EXCHANGE):
        reason = os.strerror(ctypes.get_errno())
        raise StoreIOError(
            f"{second}: expected a file system that exchanges two directories "
            f"(renameat2), found one that does not: {reason}; copy to another path, "
            "and rename that when it is complete"
        )


def _discard(staging: Path, target: Path, *, keeps: bool = False) -> None:
    """Removes a copy that is not completed, or what was exchanged for one.

    Files that are not a store's go to the target, which is in its place.

    Args:
      keeps: whether the empty directory stays, with its lock.
    """
    if not staging.exists():
        return
    with translated("removal", staging):
        for place in (*find_members(staging), staging):
            if (place / "jaxinf.json").exists():
                _give_up_csds(StoreDirectory.open(place))
        for entry in staging.iterdir():
            moved = target / entry.name
            is_own = _OWN.fullmatch(entry.name)
            if not is_own and target.is_dir() and not os.path.lexists(moved):
                entry.rename(moved)
            elif keeps and entry.name == "lock":
                continue
            elif entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        if not keeps:
            staging.rmdir()
            fsync_directory(staging.parent)


def _give_up_csds(directory: StoreDirectory) -> None:
    """Removes the directories of a store that is given up from its CSDs."""
    check_owners(directory, unmade=True)
    for csd in range(len(directory.manifest.csds)):
        for name in (*SLOTS, "checkpoints", "."):  # the note of the owner goes last
            shutil.rmtree(directory.csd_directory(csd) / name, ignore_errors=True)
