"""The chunks of a copy: which are linked, copied or recoded.

     same bytes ──── link, or copy with its checksum ───┐
     other codec ─── decoded and encoded ───────────────┼──► a chunk of a new store
     other grid ──── boxes of the old chunks ───────────┘

Invariant: old files are only read, and all of a chunk is verified before it counts.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from jaxinf.layout import CodedSlot, box_runs, rounding_of_chunk
from jaxinf.store.commit import CommitRecord
from jaxinf.store.creation import existing_parent
from jaxinf.store.directory import StoreDirectory, link_file
from jaxinf.store.manifest import ChunkFile, LeafRecord, StateRecord, dtype_of
from jaxinf.store.members import CopySource
from jaxinf.store.reader import PIECE_BYTES, CommittedStep, StepReader, over
from jaxinf.transfer import (
    allocate_file,
    check_holds,
    crc32c,
    crc32c_combine,
    opened_to_write,
    translated,
)
from jaxinf.typing import Array, ProgressCallback

_How: TypeAlias = Literal["link", "copy", "recode", "regrid"]


@dataclass(frozen=True)
class CopiedChunk:
    """A chunk's file in a new store, and where its bytes come from.

    It is a link to the old file, a verified copy of the same bytes, recoded from the
    decoded values, or made of chunks of another grid.
    """

    part: StoreDirectory
    place: str  # slot a, or a checkpoint
    one: ChunkFile
    how: _How

    @property
    def target(self) -> Path:
        return self.part.chunk_file(self.place, self.one)


def copied_chunks(
    source: CopySource, parts: Sequence[StoreDirectory]
) -> Iterator[CopiedChunk]:
    """Yields the chunks of new stores; looks at old files, and writes nothing."""
    device = cache(lambda place: existing_parent(place)[1])
    for part in parts:
        for place, step in source.steps.items():
            for one in part.manifest.held():
                old = step.manifest.leaves[one.number]
                how: _How = "copy"
                if old.chunk_shape != one.leaf.chunk_shape:
                    how = "regrid"
                elif _arrays(old, one.state) != _arrays(one.leaf, one.state):
                    how = "recode"
                elif source.has_links:
                    folder = step.places[old.csds[one.chunk]]
                    if device(folder) == device(part.csd_directories[one.csd]):
                        how = "link"
                yield CopiedChunk(part, place, one, how)


def _arrays(leaf: LeafRecord, state: StateRecord) -> list[StateRecord]:
    return [one for one in leaf.states if one.slot == state.slot]


def make_steps(
    source: CopySource,
    chunks: Sequence[CopiedChunk],
    progress: ProgressCallback | None,
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
        jobs = defaultdict[tuple[str, int], list[CopiedChunk]](list)
        for new in chunks:
            if new.place == place:  # chunks of another grid are made together
                number = -1 if new.how == "regrid" else new.one.chunk
                jobs[new.one.array, number].append(new)
        with step.reader() as reader:
            make = partial(_make, step, reader)
            for job, made in over(jobs.values(), make, source.num_threads):
                for (name, number), checksum in made.items():
                    sums[name][number] = checksum
                done_bytes += sum(new.one.num_bytes for new in job)
                if progress is not None:
                    progress(done_bytes, total_bytes)
        records[place] = step.commit.replace(checksums=sums)
    return records


def _make(
    step: CommittedStep, reader: StepReader, job: Sequence[CopiedChunk]
) -> dict[tuple[str, int], int]:
    """Makes the files of a chunk, or of an array; returns checksums by their places."""
    new = job[0]
    one, old = new.one, step.manifest.leaves[new.one.number]
    if new.how == "recode" and one.state.is_beside:
        return {}  # its state's codes come with it
    with translated("copy", new.target):
        if new.how == "recode":
            return _recode(new, old, reader, step.commit.step)
        if new.how == "regrid":
            return _regrid({chunk.one.chunk: chunk for chunk in job}, old, reader)
        if new.how == "link":
            folder = step.places[old.csds[one.chunk]]
            check_holds(folder, one.name, 0)  # no link leads there
            new.target.parent.mkdir(parents=True, exist_ok=True)
            link_file(folder / one.name, new.target)
        else:
            with _new_file(new) as fd:
                for piece in reader.stored(one._replace(leaf=old)):
                    _put(fd, piece.values, piece.start * one.state.itemsize)
    return {(one.array, one.chunk): step.commit.checksums[one.array][one.chunk]}


def _new_file(new: CopiedChunk) -> AbstractContextManager[int]:
    """Makes a chunk's file, with room for it; returns what opens it."""
    new.target.parent.mkdir(parents=True, exist_ok=True)
    allocate_file(new.target, new.one.file_bytes, new.one.num_bytes)
    return opened_to_write(new.target)


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


def _recode(
    new: CopiedChunk, old: LeafRecord, reader: StepReader, step: int
) -> dict[tuple[str, int], int]:
    """Writes a state's array in its codec, and what is stored beside it."""
    one, leaf = new.one, new.one.leaf
    first, *beside = states = _arrays(leaf, one.state)
    slots = [slot.name for slot in leaf.slots]
    rounding = rounding_of_chunk(one.number, one.chunk, step)
    key = rounding + slots.index(first.slot) & 0xFFFFFFFF
    files = [replace(new, one=one._replace(state=state)) for state in states]
    sums: list[list[tuple[int, int]]] = [[] for _ in files]
    with ExitStack() as stack:
        fds = [stack.enter_context(_new_file(file)) for file in files]
        was = one._replace(leaf=old, state=_arrays(old, first)[0])
        for piece in reader.pieces(was):
            arrays = [np.ascontiguousarray(piece.values)]
            if first.codec:
                size = piece.values.size
                arrays = [
                    np.empty(x.num_elements(size), dtype_of(x.dtype)) for x in states
                ]
                rest = arrays[1] if beside else None
                CodedSlot(arrays[0], rest, key, piece.start).encode(piece.values)
            for fd, state, data, own in zip(fds, states, arrays, sums, strict=True):
                _put(fd, data, state.num_elements(piece.start) * state.itemsize)
                own.append((crc32c(data), data.nbytes))
    pairs = zip(files, sums, strict=True)
    return {(file.one.array, one.chunk): crc32c_combine(own) for file, own in pairs}


def _regrid(
    new: Mapping[int, CopiedChunk], old: LeafRecord, reader: StepReader
) -> dict[tuple[str, int], int]:
    """Moves an array's elements as they are stored to chunks of another grid."""
    first = next(iter(new.values())).one
    grid, state, most = first.leaf.grid, first.state, PIECE_BYTES // 4
    for one in new.values():
        _new_file(one)
    for box, values in reader.boxes(old, state, most, decoded=False):
        bounds = zip(box.start, box.extent, grid.chunk_shape, strict=True)
        near = [range(a // size, -(-(a + n) // size)) for a, n, size in bounds]
        for index in product(*near):
            own = new[int(np.ravel_multi_index(index, grid.grid_shape))]
            chunk = own.one.layout
            begin = np.maximum(box.start, chunk.start)
            ends = np.add(box.start, box.extent), np.add(chunk.start, chunk.extent)
            part = tuple(map(slice, begin - box.start, np.minimum(*ends) - box.start))
            start = (begin - chunk.start).tolist()
            with opened_to_write(own.target) as fd:
                write_box(fd, grid.chunk_shape, start, values[part])
    sums = {}
    for number, own in new.items():
        root = own.part.data_paths(own.place)[own.one.csd]
        sums[first.array, number] = reader.checksum(root, own.one)
    return sums
