"""The one way to write a step: a copy in other formats, on other drives, among others.

      OLD ──links, copies, recoded chunks──► .NEW.copying ──sync, records──► NEW
      only read                              complete, durable     one rename at the end

Invariant: OLD is whole until NEW is, and NEW appears whole. A crash has nothing to
  undo: the same call begins again, or completes the exchange of NEW and OLD, if they
  are the same. All of an old chunk is verified before a new one made of it counts.
"""

import contextlib
import ctypes
import os
import re
import shutil
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec import structs

from jaxinf.errors import (
    JaxinfError,
    StoreFormatError,
    StoreIOError,
    StoreMismatchError,
)
from jaxinf.layout import CodedSlot, box_runs, rounding_of_chunk
from jaxinf.store.commit import CommitRecord
from jaxinf.store.directory import StoreDirectory, link_file
from jaxinf.store.files import (
    begin_store,
    check_free_space,
    existing_parent,
    make_place,
    remove_csds,
    required_bytes,
    write_carry,
)
from jaxinf.store.formats import Formats, ShardsOf, coded_leaf, divided, lay_out
from jaxinf.store.lock import StoreLock, lock_exclusively
from jaxinf.store.manifest import ChunkFile, LeafRecord, Member, StateRecord, dtype_of
from jaxinf.store.members import CopySource, check_unread, find_members, member_name
from jaxinf.store.owners import check_places, claim_csds
from jaxinf.store.reader import PIECE_BYTES, CommittedStep, StepReader, over
from jaxinf.transfer import (
    allocate_file,
    check_holds,
    crc32c,
    crc32c_combine,
    fsync_directory,
    opened_to_write,
    translated,
    write_bytes_atomically,
)
from jaxinf.typing import Array, ProgressCallback

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


# --- the chunks of a copy ------------------------------------------------------------
#
#     same bytes ──── link, or copy with its checksum ───┐
#     other codec ─── decoded and encoded ───────────────┼──► a chunk of a new store
#     other grid ──── boxes of the old chunks ───────────┘


@dataclass(frozen=True)
class _NewChunk:
    """A chunk's file in a new store, and where its bytes come from.

    It is a link to the old file, a verified copy of the same bytes, recoded from the
    decoded values, or made of chunks of another grid.
    """

    part: StoreDirectory
    place: str  # slot a, or a checkpoint
    one: ChunkFile
    old: LeafRecord  # its leaf in the source
    how: Literal["link", "copy", "recode", "regrid"]

    @property
    def file(self) -> Path:
        return self.part.chunk_file(self.place, self.one)

    @property
    def job(self) -> tuple[object, ...]:
        """What chunks that are made together have in common."""
        one, is_coded = self.one, self.how == "recode"  # with what is beside
        name = one.state.slot if is_coded else one.state.name
        return one.number, name, -1 if self.how == "regrid" else one.chunk

    def make(self) -> None:
        """Makes its file, with room for it."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        allocate_file(self.file, self.one.file_bytes, self.one.num_bytes)


def _new_chunks(
    source: CopySource, parts: Sequence[StoreDirectory]
) -> Iterator[_NewChunk]:
    """Yields the chunks of new stores; looks at old files, and writes nothing."""
    device = cache(lambda folder: existing_parent(folder)[1])
    for part, (place, step) in product(parts, source.steps.items()):
        for one in part.manifest.held():
            old = step.manifest.leaves[one.number]
            if old.chunk_shape != one.leaf.chunk_shape:
                how = "regrid"
            elif _arrays(old, one.state) != _arrays(one.leaf, one.state):
                how = "recode"
            elif source.has_links:
                folders = (
                    step.places[old.csds[one.chunk]],
                    part.csd_directories[one.csd],
                )
                how = "link" if len({*map(device, folders)}) == 1 else "copy"
            else:
                how = "copy"
            yield _NewChunk(part, place, one, old, how)


def _arrays(leaf: LeafRecord, state: StateRecord) -> list[StateRecord]:
    return [one for one in leaf.states if one.slot == state.slot]


def _make_chunks(
    source: CopySource, chunks: Sequence[_NewChunk], progress: ProgressCallback | None
) -> dict[str, CommitRecord]:
    """Makes the chunks of new stores' steps; blocks, and makes nothing durable.

    Returns:
      The records of all steps, by place, with the checksums of all chunks.
    """
    total_bytes = sum(new.one.num_bytes for new in chunks)
    done_bytes, records = 0, dict[str, CommitRecord]()
    manifest = chunks[0].part.manifest if chunks else source.step.manifest
    for place, step in source.steps.items():
        sums = manifest.no_checksums()
        jobs = defaultdict[tuple[object, ...], list[_NewChunk]](list)
        for new in chunks:
            if new.place == place:
                jobs[new.job].append(new)
        with StepReader(step) as reader:
            make = partial(_make_job, step, reader)
            for job, made in over(jobs.values(), make, source.num_threads):
                for new, checksum in zip(job, made, strict=True):
                    sums[new.one.array][new.one.chunk] = checksum
                    done_bytes += new.one.num_bytes
                if progress is not None:
                    progress(done_bytes, total_bytes)
        records[place] = step.commit.replace(checksums=sums)
    return records


def _make_job(
    step: CommittedStep, reader: StepReader, job: Sequence[_NewChunk]
) -> Sequence[int]:
    """Makes the files of chunks that are made together; returns their checksums."""
    new = job[0]
    one, old = new.one, new.old
    with translated("copy", new.file):
        if new.how == "recode":
            return _recode(job, reader, step.commit.step)
        if new.how == "regrid":
            return _regrid(job, reader)
        if new.how == "link":
            folder = step.places[old.csds[one.chunk]]
            check_holds(folder, one.name, 0)  # no link leads there
            new.file.parent.mkdir(parents=True, exist_ok=True)
            link_file(folder / one.name, new.file)
        else:
            new.make()
            with opened_to_write(new.file) as fd:
                for piece in reader.stored(one._replace(leaf=old)):
                    _put(fd, piece.values, piece.start * one.state.itemsize)
    return [step.commit.checksums[one.array][one.chunk]]


def write_box(
    fd: int,
    shape: Sequence[int],
    start: Sequence[int],
    values: Array,
    offset_bytes: int = 0,
) -> None:
    """Writes a box of an array, which begins at `offset_bytes` of its file; blocks.

    The array has this shape, in C order, and the box's first element the index `start`.
    """
    flat, done = values.reshape(-1), 0
    for place, length in box_runs(shape, start, values.shape):
        part = flat[done : done + length]
        _put(fd, part, offset_bytes + place * flat.itemsize)
        done += length


def _put(fd: int, values: Array, offset_bytes: int) -> None:
    memory, done = values.reshape(-1).view(np.uint8).data, 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done:], offset_bytes + done)


def _recode(job: Sequence[_NewChunk], reader: StepReader, step: int) -> list[int]:
    """Writes a state's array in its codec, and what is stored beside it."""
    one, old, states = job[0].one, job[0].old, [new.one.state for new in job]
    slots = [slot.name for slot in one.leaf.slots]
    rounding = rounding_of_chunk(one.number, one.chunk, step)
    key = rounding + slots.index(one.state.slot) & 0xFFFFFFFF
    sums: list[list[tuple[int, int]]] = [[] for _ in job]
    with contextlib.ExitStack() as stack:
        fds = []
        for new in job:
            new.make()
            fds.append(stack.enter_context(opened_to_write(new.file)))
        was = one._replace(leaf=old, state=_arrays(old, one.state)[0])
        for piece in reader.pieces(was):
            arrays = [np.ascontiguousarray(piece.values)]
            if one.state.codec:
                size = piece.values.size
                arrays = [
                    np.empty(x.num_elements(size), dtype_of(x.dtype)) for x in states
                ]
                rest = arrays[1] if len(states) > 1 else None
                CodedSlot(arrays[0], rest, key, piece.start).encode(piece.values)
            for fd, state, data, own in zip(fds, states, arrays, sums, strict=True):
                _put(fd, data, state.num_elements(piece.start) * state.itemsize)
                own.append((crc32c(data), data.nbytes))
    return [crc32c_combine(own) for own in sums]


def _regrid(job: Sequence[_NewChunk], reader: StepReader) -> list[int]:
    """Moves an array's elements as they are stored to chunks of another grid."""
    first, by_number = job[0].one, {new.one.chunk: new for new in job}
    grid, most = first.leaf.grid, PIECE_BYTES // 4
    for new in job:
        new.make()
    for box, values in reader.boxes(job[0].old, first.state, most, decoded=False):
        bounds = zip(box.start, box.extent, grid.chunk_shape, strict=True)
        near = [range(a // size, -(-(a + n) // size)) for a, n, size in bounds]
        for index in product(*near):
            new = by_number[int(np.ravel_multi_index(index, grid.grid_shape))]
            chunk = new.one.layout
            begin = np.maximum(box.start, chunk.start)
            ends = np.add(box.start, box.extent), np.add(chunk.start, chunk.extent)
            part = tuple(map(slice, begin - box.start, np.minimum(*ends) - box.start))
            start = (begin - chunk.start).tolist()
            with opened_to_write(new.file) as fd:
                write_box(fd, grid.chunk_shape, start, values[part])
    roots = [new.part.data_paths(new.place)[new.one.csd] for new in job]
    return [reader.checksum(root, x.one) for root, x in zip(roots, job, strict=True)]


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
        chunks = list(_new_chunks(source, parts))
    num_bytes = _check_room(source, parts, chunks)
    is_run = len(parts) > 1
    ids = {place: f"{uuid.uuid4().hex}-0" if is_run else "" for place in source.steps}
    for part in parts:
        with translated("copy", part.path):
            begin_store(part)
    records = _make_chunks(source, chunks, progress)
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
    source: CopySource, parts: Sequence[StoreDirectory], chunks: Sequence[_NewChunk]
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
