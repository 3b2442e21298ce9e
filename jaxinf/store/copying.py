"""Copies the steps of a store: as they are, in other formats, or on other drives.

      OLD ──links, copies, recoded chunks──► .NEW.copying ──sync, records──► NEW
      only read                              complete, durable     staging.py

Invariant: OLD is whole until NEW is, and all of an old chunk is verified before a new
one made of it counts.
"""

import contextlib
import os
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, product
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec import structs

from jaxinf.errors import StoreMismatchError
from jaxinf.layout import rounding_of_chunk
from jaxinf.store.commit import CommitRecord
from jaxinf.store.directory import StoreDirectory, link_beneath
from jaxinf.store.files import (
    begin_store,
    check_free_space,
    make_place,
    required_bytes,
    write_carry,
)
from jaxinf.store.formats import Formats, ShardsOf, coded_leaf, divided, lay_out
from jaxinf.store.manifest import ChunkFile, LeafRecord, Manifest, Member
from jaxinf.store.members import CopySource, find_members, member_name
from jaxinf.store.owners import check_places, check_roots, claim_csds
from jaxinf.store.reader import PIECE_BYTES, CommittedStep, StepReader, over
from jaxinf.store.staging import staged, staging_path
from jaxinf.transfer import (
    allocate_file,
    crc32c,
    crc32c_combine,
    existing_parent,
    opened_to_write,
    translated,
    write_at,
    write_box,
    write_bytes_atomically,
)
from jaxinf.typing import ProgressCallback

_MOST_PROCESSES = 1 << 20


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


def copy_step(
    source: CopySource,
    target: Path,
    layout: CopyLayout,
    progress: ProgressCallback | None = None,
) -> int:
    """Makes a store, or a run of several processes, of a source's steps; blocks.

    Chunks whose bytes stay are hard links where they can be, and else verified copies.
    Float32 values do not change; to fewer bits they are rounded as a step would.

    Args:
      source: the steps. If this process holds it, the target is its path.
      target: missing or an empty directory; in place the source itself.
      progress: called with the bytes of elements done and in all.

    Returns:
      The bytes that it wrote; others are links.

    Raises:
      ValueError: a number, a root or a format is wrong.
      StoreFormatError: something else is at the target.
      StoreMismatchError: chunks cannot be recoded on a new grid.
      StoreSpaceError: there is no room; nothing was written.
      StoreCorruptError: a chunk is damaged; there is no copy.
    """
    target = Path(os.path.realpath(target))
    parts = _plan_parts(source, layout, target)
    with staged(target, source.held):
        num_bytes = _make(source, parts, progress)
    for place in find_members(target) or [target]:
        claim_csds(StoreDirectory.open(place))
    return num_bytes


# --- what is to be -------------------------------------------------------------------


def _plan_parts(
    source: CopySource, layout: CopyLayout, target: Path
) -> list[StoreDirectory]:
    """Returns the new members, or the one store, in its staging; writes nothing."""
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
        parts.append(StoreDirectory(staging_path(target) / place, manifest))
    return parts


def _roots(source: CopySource, layout: CopyLayout, number: int) -> list[str]:
    """Returns a process's CSD roots; in place, without others, those that it has."""
    if source.held and not layout.csd_roots and number < len(source.parts):
        return list(source.parts[number].csds)
    roots = [root.replace("{process}", str(number)) for root in layout.csd_roots]
    check_roots(roots)
    if source.held and not roots and any(part.csds for part in source.parts):
        raise ValueError(
            f"expected CSD roots for process {number}, found none, and the others have "
            'some; name them with a template: --csd-root "/mnt/nvme{process}"'
        )
    return roots


# --- how the files of chunks are made -------------------------------------------------


@dataclass(frozen=True)
class _NewFile:
    """A chunk's file in a new store."""

    part: StoreDirectory
    place: str  # slot a, or a checkpoint
    one: ChunkFile

    @property
    def path(self) -> Path:
        return self.part.chunk_file(self.place, self.one)

    def make(self) -> Path:
        """Makes the file, with room for its chunk; returns its path."""
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        allocate_file(path, self.one.file_bytes, self.one.num_bytes)
        return path


@dataclass(frozen=True)
class _Job:
    """Files that are made together, of a leaf that was `old`.

    how        their bytes                                       files
    link       the same, by a hard link to the old file          one
    copy       the same, verified, as on another drive           one
    recode     decoded, and encoded with another codec           a chunk's
    regrid     boxes of chunks of another grid, as stored        an array's
    """

    how: Literal["link", "copy", "recode", "regrid"]
    old: LeafRecord
    files: Sequence[_NewFile]


def _plan_jobs(
    source: CopySource, parts: Sequence[StoreDirectory]
) -> dict[str, list[_Job]]:
    """Returns the jobs of each step, by place; looks at old files, writes nothing."""
    found = {place: list[_Job]() for place in source.steps}
    drive = cache(lambda folder: existing_parent(folder).stat().st_dev)
    leaves = zip(*(part.manifest.leaves for part in parts), strict=True)
    steps = source.steps.items()
    for (number, held), (place, step) in product(enumerate(leaves), steps):
        old, new, jobs = step.manifest.leaves[number], held[0], found[place]
        owners = new.owners or (0,) * len(new.csds)
        files = {
            state: [
                _NewFile(parts[own], place, ChunkFile(number, held[own], state, chunk))
                for chunk, own in enumerate(owners)
            ]
            for state in new.states
        }
        both = ([s for s in leaf.states if not s.is_beside] for leaf in (old, new))
        for was, state in zip(*both, strict=True):
            arrays = [files[stored] for stored in state.stored]
            if old.chunk_shape != new.chunk_shape:
                jobs += [_Job("regrid", old, array) for array in arrays if array]
            elif was != state:
                jobs += [_Job("recode", old, c) for c in zip(*arrays, strict=True)]
            else:
                for file in chain(*arrays):
                    how, one = "copy", file.one
                    if source.has_links:
                        there = step.places[old.csds[one.chunk]]
                        here = file.part.csd_directories[one.csd]
                        how = "link" if drive(there) == drive(here) else "copy"
                    jobs.append(_Job(how, old, [file]))
    return found


def _make_files(
    source: CopySource,
    contents: Manifest,
    jobs: Mapping[str, Sequence[_Job]],
    progress: ProgressCallback | None,
) -> dict[str, CommitRecord]:
    """Makes the chunks of new stores' steps; blocks, and makes nothing durable.

    Returns:
      The records of all steps, by place, with the checksums of all chunks.
    """
    every = [file.one for own in jobs.values() for job in own for file in job.files]
    total_bytes, done_bytes = sum(one.num_bytes for one in every), 0
    records = {}
    for place, step in source.steps.items():
        sums = contents.no_checksums()
        with StepReader(step) as reader:
            make = partial(_make_job, step, reader)
            for job, made in over(jobs[place], make, source.num_threads):
                for file, checksum in zip(job.files, made, strict=True):
                    sums[file.one.array][file.one.chunk] = checksum
                    done_bytes += file.one.num_bytes
                if progress is not None:
                    progress(done_bytes, total_bytes)
        records[place] = step.commit.replace(checksums=sums)
    return records


def _make_job(step: CommittedStep, reader: StepReader, job: _Job) -> Sequence[int]:
    """Makes files; returns the checksums of their chunks."""
    new = job.files[0]
    with translated("copy", new.path):
        if job.how == "link":
            one, folder = new.one, step.places[job.old.csds[new.one.chunk]]
            new.path.parent.mkdir(parents=True, exist_ok=True)
            link_beneath(folder, one.name, new.path)
            return [step.commit.checksums[one.array][one.chunk]]
        if job.how == "regrid":
            return _regrid(job, reader)
        return _rewrite(job, reader, step.commit.step)


def _rewrite(job: _Job, reader: StepReader, step: int) -> list[int]:
    """Writes verified pieces of an old chunk: as they are stored, or coded anew."""
    one, is_coded = job.files[0].one, job.how == "recode"
    was, key = one._replace(leaf=job.old), 0
    if is_coded:
        was = was._replace(state=job.old.state(one.state.name))
        names = [state.name for state in one.leaf.decoded_states]
        key = rounding_of_chunk(one.number, one.chunk, step)
        key = key + names.index(one.state.name) & 0xFFFFFFFF
    sums: list[list[tuple[int, int]]] = [[] for _ in job.files]
    with contextlib.ExitStack() as stack:
        fds = [stack.enter_context(opened_to_write(new.make())) for new in job.files]
        for piece in reader.pieces(was) if is_coded else reader.stored(was):
            arrays = [piece.values]
            if is_coded:
                arrays = one.state.encode(piece.values, key, piece.start)
            for fd, data, written in zip(fds, arrays, sums, strict=True):
                write_at(fd, data, sum(num_bytes for _, num_bytes in written))
                written.append((crc32c(data), data.nbytes))
    return [crc32c_combine(written) for written in sums]


def _regrid(job: _Job, reader: StepReader) -> list[int]:
    """Moves an array's elements as they are stored to chunks of another grid."""
    first, grid = job.files[0].one, job.files[0].one.leaf.grid
    for new in job.files:
        new.make()
    most = PIECE_BYTES // 4
    for box, values in reader.boxes(job.old, first.state, most, decoded=False):
        bounds = zip(box.start, box.extent, grid.chunk_shape, strict=True)
        near = [range(a // size, -(-(a + n) // size)) for a, n, size in bounds]
        for index in product(*near):
            new = job.files[int(np.ravel_multi_index(index, grid.grid_shape))]
            chunk = new.one.layout
            begin = np.maximum(box.start, chunk.start)
            ends = np.add(box.start, box.extent), np.add(chunk.start, chunk.extent)
            part = tuple(map(slice, begin - box.start, np.minimum(*ends) - box.start))
            start = (begin - chunk.start).tolist()
            with opened_to_write(new.path) as fd:
                write_box(fd, grid.chunk_shape, start, values[part])
    roots = [new.part.data_paths(new.place)[new.one.csd] for new in job.files]
    pairs = zip(roots, job.files, strict=True)
    return [reader.checksum(root, new.one) for root, new in pairs]


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
        jobs = _plan_jobs(source, parts)
    num_bytes = _check_room(source, parts, jobs)
    is_run = len(parts) > 1
    ids = {place: f"{uuid.uuid4().hex}-0" if is_run else "" for place in source.steps}
    for part in parts:
        with translated("copy", part.path):
            begin_store(part)
    records = _make_files(source, parts[0].manifest, jobs, progress)
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
    source: CopySource,
    parts: Sequence[StoreDirectory],
    jobs: Mapping[str, Sequence[_Job]],
) -> int:
    """Refuses a copy for which there is no room; returns the bytes that it writes.

    In place the spare slots take room when the old slots have given theirs, but for
    chunks that are linked to.
    """
    needs, linked = Counter[Path](), Counter[Path]()
    for job in chain(*jobs.values()):
        for new in job.files:
            folder = new.part.csd_directories[new.one.csd]
            if job.how != "link":
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
