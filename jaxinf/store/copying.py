"""The one way to write a step: a copy in other formats, on other drives, among others.

      OLD ──links, copies, recoded chunks──► .NEW.copying ──sync, records──► NEW
      only read                              complete, durable     one rename at the end

Invariant: OLD is whole until NEW is, and NEW appears whole. A crash has nothing to
  undo: the same call begins again, or completes the exchange of NEW and OLD, if they
  are the same.
"""

import contextlib
import ctypes
import os
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

from jaxinf.errors import (
    JaxinfError,
    StoreFormatError,
    StoreIOError,
    StoreMismatchError,
)
from jaxinf.store.copy_chunks import CopiedChunk, copied_chunks, make_steps
from jaxinf.store.creation import (
    begin_store,
    check_free_space,
    make_place,
    remove_csds,
    required_bytes,
)
from jaxinf.store.directory import StoreDirectory
from jaxinf.store.formats import Formats, ShardsOf, coded_leaf, divided, lay_out
from jaxinf.store.lock import StoreLock, lock_exclusively
from jaxinf.store.manifest import Member
from jaxinf.store.members import CopySource, check_unread, find_members, member_name
from jaxinf.store.owners import check_places, claim_csds
from jaxinf.store.stock import write_carry
from jaxinf.transfer import fsync_directory, translated, write_bytes_atomically
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

    In CSD roots, which exist, ``{process}`` is a process's number. Without any a copy
    has none, and in place those that there are.
    """

    formats: Formats = field(default_factory=Formats)
    csd_roots: Sequence[str] = ()
    processes: int | None = None  # their number
    shards_of: ShardsOf | None = None  # by default those of devices in a line


@dataclass(frozen=True)
class Copied:
    """What came of a copy."""

    step: int
    num_bytes: int  # that it wrote; others are links
    dropped: tuple[str, ...] = ()  # checkpoints that some members lacked


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
      StoreMismatchError: chunks cannot be recoded on a new grid.
      StoreSpaceError: there is no room; nothing was written.
      StoreCorruptError: a chunk is damaged; there is no copy.
    """
    target = Path(os.path.realpath(target))
    staging = _staging(target)
    parts = _planned(source, layout, staging, target)
    _check_target(source, target)
    if staging.is_symlink():  # what is there would be removed
        raise StoreFormatError(
            f"{staging}: expected nothing, or what an interrupted copy has left, found "
            "a symlink; jaxinf made no such thing: find out who did, and remove it"
        )
    with translated("copy", staging):
        staging.mkdir(parents=True, exist_ok=True)
    lock = StoreLock(staging)
    try:
        _discard(staging, target, keeps=True)  # what an interrupted call has left
        try:
            num_bytes = _make(source, parts, progress)
            _publish(source, staging, target)
        except (JaxinfError, ValueError):
            _discard(staging, target)
            raise
        with translated("copy", target):
            fsync_directory(target.parent)  # before what was there goes
        _discard(staging, target)
    finally:
        lock.release()
    for place in find_members(target) or [target]:
        claim_csds(StoreDirectory.open(place))
    return Copied(source.step.commit.step, num_bytes, source.dropped)


def left_by_copy(path: Path) -> Path | None:
    """Returns the directory of a copy to a path that is not complete, if any."""
    staging = _staging(Path(os.path.realpath(path)))
    return staging if os.path.lexists(staging) else None


def _staging(target: Path) -> Path:
    return target.with_name(f".{target.name}.copying")


# --- what is to be -------------------------------------------------------------------


def _planned(
    source: CopySource, layout: CopyLayout, staging: Path, target: Path
) -> list[StoreDirectory]:
    """Returns the new members, or the one store, below `staging`; writes nothing."""
    count = len(source.parts) if layout.processes is None else layout.processes
    if not 1 <= count <= _MOST_PROCESSES:
        raise ValueError(f"processes={count}: expected from 1 to {_MOST_PROCESSES}")
    held, formats = source.step.manifest, layout.formats
    if formats.master and all(leaf.dtype != "bfloat16" for leaf in held.leaves):
        raise ValueError(
            f"{source.where}: master={formats.master!r}: expected params that are "
            "bfloat16 on the JAX device, found none; their master has one form: leave "
            "it out"
        )
    leaves = [coded_leaf(leaf, formats) for leaf in held.leaves]
    owners: Sequence[Sequence[int]] = [leaf.owners for leaf in source.parts[0].leaves]
    if count != len(source.parts) or layout.shards_of is not None:
        leaves, owners = divided(leaves, count, layout.shards_of, source.where)
    for old, new in zip(held.leaves, leaves, strict=True):
        if old.chunk_shape != new.chunk_shape and old.states != new.states:
            raise StoreMismatchError(
                f"{source.where}: leaf {new.name}: expected another grid or other "
                "formats, found both; make two copies, one after the other"
            )
    contents, run = structs.replace(held, leaves=tuple(leaves)), uuid.uuid4().hex
    parts = []
    for number in range(count):
        member = Member(run, number, count) if count > 1 else None
        place = member_name(number) if member else "."
        roots = _roots(source, layout, number)
        manifest = lay_out(contents, roots, member=member, owners=owners)
        check_places(StoreDirectory(target / place, manifest))
        parts.append(StoreDirectory(staging / place, manifest))
    return parts


def _roots(source: CopySource, layout: CopyLayout, number: int) -> list[str]:
    """Returns a process's CSD roots; in place, without others, those that it has."""
    if source.held and not layout.csd_roots and number < len(source.parts):
        return list(source.parts[number].csds)
    roots = [root.replace("{process}", str(number)) for root in layout.csd_roots]
    for root in roots:
        if not os.path.isdir(root):
            raise ValueError(
                f"CSD root {root}: expected a directory on a mounted drive, found "
                "none; create or mount it"
            )
    if source.held and not roots and any(part.csds for part in source.parts):
        raise ValueError(
            f"expected CSD roots for process {number}, found none, and the others have "
            'some; name them with a template: --csd-root "/mnt/nvme{process}"'
        )
    if len(set(roots)) != len(roots):
        raise ValueError(f"the same CSD root is given twice: {roots}")
    return roots


def _check_target(source: CopySource, target: Path) -> None:
    """Refuses a target where a copy cannot appear."""
    found = ["a mount point"] if os.path.ismount(target) else []
    if not source.held and not found and os.path.lexists(target):
        found = sorted(os.listdir(target))[:3] if target.is_dir() else ["a file"]
    if found:
        raise StoreFormatError(
            f"{target}: expected nothing there, or an empty directory, or OLD itself, "
            f"and no mount point, found {', '.join(found)}; give another path"
        )


# --- making it -----------------------------------------------------------------------


def _make(
    source: CopySource,
    parts: Sequence[StoreDirectory],
    progress: ProgressCallback | None,
) -> int:
    """Makes the new stores whole and durable beside their place; returns their bytes.

    Links take none. In place the spare slots are links, too, since the old store's room
    becomes free at the end.
    """
    with translated("copy", source.where):
        chunks = list(copied_chunks(source, parts))
    num_bytes = _check_room(source, parts, chunks)
    is_run = len(parts) > 1
    ids = {place: f"{uuid.uuid4().hex}-0" if is_run else "" for place in source.steps}
    for part in parts:
        with translated("copy", part.path):
            begin_store(part)
    records = make_steps(source, chunks, progress)
    for part in parts:
        with translated("copy", part.path):
            for name, content in source.beside.items():
                (part.path / name).parent.mkdir(exist_ok=True)
                write_bytes_atomically(part.path / name, content)
            for place, record in records.items():
                root, carry = part.step_path(place), record.carry
                make_place(part, place, carry)
                write_carry(root, carry, source.steps[place].read_carry())
                if place == "a":
                    part.sync()
                else:
                    part.manifest.write(root / "jaxinf.json")
                own = record.part(part.manifest, ids[place])
                own.write(root / "commit.json")
            make_place(part, "b", source="a" if source.held else None)
    for part in parts:
        part.sync()
        part.flip("a")
    return num_bytes


def _check_room(
    source: CopySource, parts: Sequence[StoreDirectory], chunks: Sequence[CopiedChunk]
) -> int:
    """Refuses a copy for which there is no room; returns the bytes that it writes.

    In place the spare slots take room when the old slots have given theirs, but for
    chunks that are linked to.
    """
    needs, linked = Counter[Path](), Counter[Path]()
    for new in chunks:
        folder = new.part.csd_directories[new.one.csd]
        if new.how != "link":
            needs[folder] += new.one.drive_bytes
        elif new.place == "a":
            linked[folder] += new.one.drive_bytes
    num_bytes = needs.total()
    what = "the chunks to come need", "free some, or give others"
    if source.held:
        check_free_space(needs, *what)
        needs.update(linked)
        for old in source.held:
            needs.subtract(required_bytes(old, 2))
    for part in parts:
        needs.update(required_bytes(part, 1))
    check_free_space(needs, *what)
    return num_bytes


# --- its place -----------------------------------------------------------------------


def _publish(source: CopySource, staging: Path, target: Path) -> None:
    """Gives a complete copy its place, at one instant."""
    with translated("copy", target), contextlib.ExitStack() as locks:
        fsync_directory(staging)
        for one in source.held:
            locks.enter_context(lock_exclusively(one.publish_lock))
            check_unread(one)
            if one.lock is not None:
                one.lock.check()
        if not source.held:
            staging.rename(target)
            return
        call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        names = os.fsencode(staging), os.fsencode(target)
        if call is None or call(_AT_CWD, names[0], _AT_CWD, names[1], _RENAME_EXCHANGE):
            reason = os.strerror(ctypes.get_errno())
            raise StoreIOError(
                f"{target}: expected a file system that exchanges two directories "
                f"(renameat2), found one that does not: {reason}; copy to another "
                "path, and rename that when it is complete"
            )


def _discard(staging: Path, target: Path, *, keeps: bool = False) -> None:
    """Removes a copy that is not completed, or what was exchanged for one.

    Files that are not a store's go to the target, which is in its place. With `keeps`
    the empty directory stays, with its lock.
    """
    if not staging.exists():
        return
    with translated("removal", staging):
        for place in (*find_members(staging), staging):
            if (place / "jaxinf.json").exists():
                remove_csds(StoreDirectory.open(place))
        for entry in staging.iterdir():
            moved = target / entry.name
            is_own = _OWN.fullmatch(entry.name)
            if not is_own and target.is_dir() and not os.path.lexists(moved):
                entry.rename(moved)
            elif entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif not (keeps and entry.name == "lock"):
                entry.unlink()
        if not keeps:
            staging.rmdir()
            fsync_directory(staging.parent)
