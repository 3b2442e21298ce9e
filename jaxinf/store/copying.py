"""Copies the steps of a store: as they are, in other formats, or on other drives.

      OLD ──links, copies, recoded chunks──► .NEW.copying ──sync, records──► NEW
      only read                              complete, durable     staging.py

Invariant: OLD is whole until NEW is, and all of an old chunk is verified before a new
chunk made of it counts.
"""

import contextlib
import os
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, product
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec import structs

from jaxinf.errors import StoreMismatchError
from jaxinf.layout import rounding_of_chunk
from jaxinf.store.carried_arrays import write_carry
from jaxinf.store.claims import check_roots, check_roots_outside_store, claim_csds
from jaxinf.store.commit_record import CommitRecord
from jaxinf.store.copy_source import CopySource
from jaxinf.store.creation import begin_store, check_free_space, required_bytes
from jaxinf.store.directory import StoreDirectory, link_beneath
from jaxinf.store.division import ShardsOf, divide_leaves, place_chunks
from jaxinf.store.formats import Formats, apply_formats
from jaxinf.store.manifest import ChunkFile, LeafRecord, Manifest, Member, StateRecord
from jaxinf.store.members import find_members, member_name
from jaxinf.store.reader import PIECE_BYTES, StepReader, map_in_threads
from jaxinf.store.staging import staged, staging_path
from jaxinf.store.step_files import make_step_files
from jaxinf.store.steps import CommittedStep
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

_MAX_PROCESSES = 1 << 20


@dataclass(frozen=True)
class CopyLayout:
    """The form of a copied store; by default that of its source.

    CSD roots are existing directories; ``{process}`` in them is a process's number.
    Without CSD roots a copy in place keeps those it has, and another copy has none.
    """

    formats: Formats = field(default_factory=Formats)
    csd_roots: Sequence[str] = ()
    processes: int | None = None  # number of processes, each with a store
    shards_of: ShardsOf | None = None  # by default those of devices in a line


def copy_step(
    source: CopySource,
    target: Path,
    layout: CopyLayout,
    progress: ProgressCallback | None = None,
) -> int:
    """Makes a new store at `target` of the steps of `source`, in the form of `layout`.

    The step that `source` has at ``a`` is the new store's committed step, others are
    its checkpoints. The store, or run of several processes, appears at one instant,
    complete and durable; a crash before has nothing to undo. Blocks.

    A chunk whose bytes stay the same is a hard link to the old file if it can be, and
    otherwise a verified copy. Other chunks are recoded: float32 values do not change,
    and to fewer bits they are rounded as a step would.

    Args:
      source: The steps to copy, of `store_source` or an export.
      target: A missing path or an empty directory; or the path of the source's own
        stores if this process holds them, which the new ones then replace.
      progress: Called with the bytes of elements done and in all.

    Returns:
      The bytes that it wrote; links take none.

    Raises:
      ValueError: A number, a root or a format is wrong.
      StoreError: Something else is at the target, chunks cannot be recoded on a new
        grid, there is no room, or a chunk is damaged; then there is no copy.
    """
    target = Path(os.path.realpath(target))
    parts = _plan_parts(source, layout, target)
    with staged(target, source.held_stores):
        num_bytes = _make_stores(source, parts, progress)
    for path in find_members(target) or [target]:
        claim_csds(StoreDirectory.open(path))
    return num_bytes


# --- the new stores ------------------------------------------------------------------


def _plan_parts(
    source: CopySource, layout: CopyLayout, target: Path
) -> list[StoreDirectory]:
    """Returns the new members, or the one store, in their staging; writes nothing."""
    count = len(source.parts) if layout.processes is None else layout.processes
    if not 1 <= count <= _MAX_PROCESSES:
        raise ValueError(f"processes={count}: expected from 1 to {_MAX_PROCESSES}")
    old, formats = source.step.manifest, layout.formats
    if formats.master and all(leaf.dtype != "bfloat16" for leaf in old.leaves):
        raise ValueError(
            f"{source.where}: master={formats.master!r}: expected params that are "
            "bfloat16 on the JAX device, found none; their master has one form: leave "
            "it out"
        )
    leaves = [apply_formats(leaf, formats) for leaf in old.leaves]
    owners: Sequence[Sequence[int]] = [leaf.owners for leaf in source.parts[0].leaves]
    if count != len(source.parts) or layout.shards_of is not None:
        leaves, owners = divide_leaves(leaves, count, layout.shards_of, source.where)
    for before, after in zip(old.leaves, leaves, strict=True):
        is_regridded = before.chunk_shape != after.chunk_shape
        if is_regridded and before.states != after.states:
            raise StoreMismatchError(
                f"{source.where}: leaf {after.name}: expected another grid or other "
                "formats, found both; make two copies, one after the other"
            )
    unplaced, run = structs.replace(old, leaves=tuple(leaves)), uuid.uuid4().hex
    parts = []
    for number in range(count):
        member = Member(run, number, count) if count > 1 else None
        name = member_name(number) if member else "."
        roots = _csd_roots(source, layout, number)
        manifest = place_chunks(unplaced, roots, member=member, owners=owners)
        check_roots_outside_store(StoreDirectory(target / name, manifest))
        parts.append(StoreDirectory(staging_path(target) / name, manifest))
    return parts


def _csd_roots(source: CopySource, layout: CopyLayout, number: int) -> list[str]:
    """Returns a process's CSD roots; a copy in place keeps them if none are given."""
    if source.held_stores and not layout.csd_roots and number < len(source.parts):
        return list(source.parts[number].csds)
    roots = [root.replace("{process}", str(number)) for root in layout.csd_roots]
    check_roots(roots)
    if source.held_stores and not roots and any(part.csds for part in source.parts):
        raise ValueError(
            f"expected CSD roots for process {number}, found none, and the others have "
            'some; name them with a template: --csd-root "/mnt/nvme{process}"'
        )
    return roots


def _make_stores(
    source: CopySource,
    parts: Sequence[StoreDirectory],
    progress: ProgressCallback | None,
) -> int:
    """Makes the new stores, complete and durable, in their staging.

    Returns the bytes that it wrote, without links.
    """
    with translated("copy", source.where):
        jobs = _plan_jobs(source, parts)
    num_bytes = _check_room(source, parts, jobs)
    is_run = len(parts) > 1
    ids = {place: f"{uuid.uuid4().hex}-0" if is_run else "" for place in source.steps}
    for part in parts:
        with translated("copy", part.path):
            begin_store(part)
    records = _make_chunks(source, parts[0].manifest, jobs, progress)
    for part in parts:
        with translated("copy", part.path):
            for name, content in source.files_beside.items():
                (part.path / name).parent.mkdir(exist_ok=True)
                write_bytes_atomically(part.path / name, content)
            for place, step in source.steps.items():
                record = records[place].for_member(part.manifest, ids[place])
                _complete_step(part, place, record, step.read_carry())
            # In place slot b begins as links: the old slots give their room at the end.
            make_step_files(part, "b", source="a" if source.held_stores else None)
    for part in parts:
        part.sync()
        part.flip("a")
    return num_bytes


def _complete_step(
    part: StoreDirectory, place: str, record: CommitRecord, carry: Sequence[bytes]
) -> None:
    """Writes all of a step but its chunks; the record is last."""
    root = part.step_path(place)
    make_step_files(part, place, record.carry)
    write_carry(root, record.carry, carry)
    if place == "a":
        part.sync()
    else:
        part.manifest.write(root / "jaxinf.json")
    record.write(root / "commit.json")


def _check_room(
    source: CopySource,
    parts: Sequence[StoreDirectory],
    jobs: Mapping[str, Sequence["_Job"]],
) -> int:
    """Refuses a copy for which there is no room; returns the bytes that it writes.

    Copying in place, the new spare slots use the room that the old slots free, which is
    not that of chunks that are linked to.
    """
    needs, linked = Counter[Path](), Counter[Path]()
    for job in chain(*jobs.values()):
        for file in job.files:
            folder = file.part.csd_directories[file.chunk.csd]
            if job.method != "link":
                needs[folder] += file.chunk.drive_bytes
            elif file.place == "a":
                linked[folder] += file.chunk.drive_bytes
    num_bytes = needs.total()
    message = "the chunks to come need", "free some, or give others"
    if source.held_stores:
        check_free_space(needs, *message)
        needs.update(linked)
        for old in source.held_stores:
            needs.subtract(required_bytes(old, 2))
    for part in parts:
        needs.update(required_bytes(part, 1))
    check_free_space(needs, *message)
    return num_bytes


# --- the files of chunks --------------------------------------------------------------


@dataclass(frozen=True)
class _NewFile:
    part: StoreDirectory
    place: str  # slot a, or a checkpoint
    chunk: ChunkFile

    @property
    def path(self) -> Path:
        return self.part.chunk_path(self.place, self.chunk)

    def allocate(self) -> Path:
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        allocate_file(path, self.chunk.file_bytes, self.chunk.num_bytes)
        return path


@dataclass(frozen=True)
class _Job:
    """Files that are made together, of the chunks of an old leaf.

    method     their bytes                                       files
    link       the same, by a hard link to the old file          one
    copy       the same, verified, as on another drive           one
    recode     decoded, and encoded with another codec           a chunk's
    regrid     boxes of chunks of another grid, as stored        an array's
    """

    method: Literal["link", "copy", "recode", "regrid"]
    old: LeafRecord
    files: Sequence[_NewFile]


def _plan_jobs(
    source: CopySource, parts: Sequence[StoreDirectory]
) -> dict[str, list[_Job]]:
    """Returns the jobs of each step, by place; looks at old files, writes nothing."""
    drive_of = cache(lambda folder: existing_parent(folder).stat().st_dev)

    def link_or_copy(step: CommittedStep, old: LeafRecord, file: _NewFile) -> _Job:
        csd = old.csds[file.chunk.number]
        folder = file.part.csd_directories[file.chunk.csd]
        is_link = source.has_links and (
            drive_of(step.chunk_roots[csd]) == drive_of(folder)
        )
        return _Job("link" if is_link else "copy", old, [file])

    jobs = {place: list[_Job]() for place in source.steps}
    for place, step in source.steps.items():
        files, leaves = _new_files(parts, place), enumerate(step.manifest.leaves)
        for (number, old), new in zip(leaves, parts[0].manifest.leaves, strict=True):
            arrays = {state: files[number, state] for state in new.states}
            keep_file = partial(link_or_copy, step, old)
            jobs[place] += _plan_leaf(old, new, arrays, keep_file)
    return jobs


def _new_files(
    parts: Sequence[StoreDirectory], place: str
) -> Mapping[tuple[int, StateRecord], list[_NewFile]]:
    """Returns a step's files by leaf and state, each array's in grid order."""
    files = defaultdict[tuple[int, StateRecord], list[_NewFile]](list)
    for part in parts:
        for chunk in part.manifest.held_chunks():
            files[chunk.leaf_number, chunk.state].append(_NewFile(part, place, chunk))
    for array in files.values():
        array.sort(key=lambda file: file.chunk.number)
    return files


def _plan_leaf(
    old: LeafRecord,
    new: LeafRecord,
    arrays: Mapping[StateRecord, Sequence[_NewFile]],
    keep_file: Callable[[_NewFile], _Job],
) -> Iterator[_Job]:
    """Yields the jobs of a leaf; a companion is made with the state it belongs to."""
    states = ([s for s in leaf.states if not s.is_companion] for leaf in (old, new))
    for before, after in zip(*states, strict=True):
        made = [arrays[stored] for stored in after.stored]
        if old.chunk_shape != new.chunk_shape:
            yield from (_Job("regrid", old, files) for files in made if files)
        elif before != after:
            yield from (_Job("recode", old, files) for files in zip(*made, strict=True))
        else:
            yield from map(keep_file, chain(*made))


def _make_chunks(
    source: CopySource,
    manifest: Manifest,
    jobs: Mapping[str, Sequence[_Job]],
    progress: ProgressCallback | None,
) -> dict[str, CommitRecord]:
    """Makes the chunks of new stores' steps; blocks, and makes nothing durable.

    Returns the records of all steps, by place, with the checksums of all chunks.
    """
    files = [file for job in chain(*jobs.values()) for file in job.files]
    total_bytes, done_bytes = sum(file.chunk.num_bytes for file in files), 0
    records = {}
    for place, step in source.steps.items():
        checksums = manifest.no_checksums()
        with StepReader(step) as reader:
            run_job = partial(_run_job, step, reader)
            for job, sums in map_in_threads(jobs[place], run_job, source.num_threads):
                for file, checksum in zip(job.files, sums, strict=True):
                    checksums[file.chunk.array_name][file.chunk.number] = checksum
                    done_bytes += file.chunk.num_bytes
                if progress is not None:
                    progress(done_bytes, total_bytes)
        records[place] = step.commit.replace(checksums=checksums)
    return records


def _run_job(step: CommittedStep, reader: StepReader, job: _Job) -> Sequence[int]:
    new = job.files[0]
    with translated("copy", new.path):
        if job.method == "link":
            chunk, root = new.chunk, step.chunk_roots[job.old.csds[new.chunk.number]]
            new.path.parent.mkdir(parents=True, exist_ok=True)
            link_beneath(root, chunk.name, new.path)
            return [step.commit.checksums[chunk.array_name][chunk.number]]
        if job.method == "regrid":
            return _regrid(job, reader)
        return _rewrite(job, reader, step.commit.step)


def _rewrite(job: _Job, reader: StepReader, step: int) -> list[int]:
    """Writes verified pieces of an old chunk, as they are stored or coded anew."""
    chunk, is_recoded = job.files[0].chunk, job.method == "recode"
    old, key = chunk._replace(leaf=job.old), 0
    if is_recoded:
        old = old._replace(state=job.old.state(chunk.state.name))
        names = [state.name for state in chunk.leaf.decoded_states]
        key = rounding_of_chunk(chunk.leaf_number, chunk.number, step)
        # As in a step: states of a chunk are rounded independently of each other.
        key = key + names.index(chunk.state.name) & 0xFFFFFFFF
    written: list[list[tuple[int, int]]] = [[] for _ in job.files]
    with contextlib.ExitStack() as stack:
        opened = (opened_to_write(new.allocate()) for new in job.files)
        fds = [stack.enter_context(file) for file in opened]
        pieces = reader.decoded_pieces(old) if is_recoded else reader.stored_pieces(old)
        for piece in pieces:
            arrays = [piece.values]
            if is_recoded:
                arrays = chunk.state.encode(piece.values, key, piece.start)
            for fd, data, parts in zip(fds, arrays, written, strict=True):
                write_at(fd, data, sum(num_bytes for _, num_bytes in parts))
                parts.append((crc32c(data), data.nbytes))
    return [crc32c_combine(parts) for parts in written]


def _regrid(job: _Job, reader: StepReader) -> list[int]:
    """Moves an array's elements, as they are stored, to chunks of another grid."""
    state, grid = job.files[0].chunk.state, job.files[0].chunk.leaf.grid
    for new in job.files:
        new.allocate()
    max_elements = PIECE_BYTES // 4
    for box, values in reader.boxes(job.old, state, max_elements, decoded=False):
        dims = zip(box.start, box.extent, grid.chunk_shape, strict=True)
        overlapping = [range(a // size, -(-(a + n) // size)) for a, n, size in dims]
        for index in product(*overlapping):
            new = job.files[int(np.ravel_multi_index(index, grid.grid_shape))]
            block = new.chunk.block
            begin = np.maximum(box.start, block.start)
            ends = np.add(box.start, box.extent), np.add(block.start, block.extent)
            part = tuple(map(slice, begin - box.start, np.minimum(*ends) - box.start))
            start = (begin - block.start).tolist()
            with opened_to_write(new.path) as fd:
                write_box(fd, grid.chunk_shape, start, values[part])
    roots = [new.part.chunk_roots(new.place)[new.chunk.csd] for new in job.files]
    pairs = zip(roots, job.files, strict=True)
    return [reader.checksum(root, new.chunk) for root, new in pairs]
