"""The chunks of a copy: which are linked, copied or recoded.

     same bytes ──── link, or copy with its checksum ───┐
     other codec ─── decoded and encoded ───────────────┼──► a chunk of a new store
     other grid ──── boxes of the old chunks ───────────┘

Invariant: old files are only read, and all of a chunk is verified before it counts.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from jaxinf.layout import Chunk, CodedSlot, box_runs, rounding_of_chunk
from jaxinf.store.commit import CommitRecord
from jaxinf.store.copy_source import CopySource
from jaxinf.store.creation import existing_parent
from jaxinf.store.directory import StoreDirectory, allocate, link_file
from jaxinf.store.manifest import ChunkFile, LeafRecord, StateRecord, dtype_of
from jaxinf.store.reader import (
    PIECE_BYTES,
    CommittedStep,
    StepReader,
    file_checksum,
    over,
)
from jaxinf.transfer import (
    BufferPool,
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

    Attributes:
      part: the new store.
      place: slot ``a``, or a checkpoint.
      one: the chunk.
      how: ``"link"`` to the file below `source`; ``"copy"`` of the same bytes,
        verified; ``"recode"`` from the decoded values; ``"regrid"`` from chunks of
        another grid.
    """

    part: StoreDirectory
    place: str
    one: ChunkFile
    how: _How
    source: Path

    @property
    def target(self) -> Path:
        return self.part.file_of(self.place, self.one)

    @property
    def room_bytes(self) -> int:
        """Bytes that it takes on the drive; none if it is a link."""
        return 0 if self.how == "link" else self.one.drive_bytes


def copied_chunks(
    source: CopySource, parts: Sequence[StoreDirectory]
) -> Iterator[CopiedChunk]:
    """Yields the chunks of new stores; looks at old files, and writes nothing."""
    device = cache(lambda place: existing_parent(place)[1])
    for part in parts:
        for place, step in source.steps.items():
            for one in part.manifest.held():
                old = source.whole.leaves[one.number]
                how, folder = _way(old, one), step.path
                if how == "copy" and source.has_links:
                    folder = step.places[old.csds[one.chunk]]
                    if device(folder) == device(part.csd_directory(one.csd)):
                        how = "link"
                yield CopiedChunk(part, place, one, how, folder)


def _way(old: LeafRecord, one: ChunkFile) -> _How:
    if old.chunk_shape != one.leaf.chunk_shape:
        return "regrid"
    is_same = _arrays(old, one.state) == _arrays(one.leaf, one.state)
    return "copy" if is_same else "recode"


def _arrays(leaf: LeafRecord, state: StateRecord) -> list[StateRecord]:
    return [one for one in leaf.states if one.slot == state.slot]


# --- making them ---------------------------------------------------------------------


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
    manifest = chunks[0].part.manifest if chunks else source.whole
    for place, step in source.steps.items():
        sums = {
            name: np.zeros(len(leaf.csds), np.uint32)
            for name, leaf, _ in manifest.arrays()
        }
        with step.reader() as reader:
            make = partial(_make, step, reader)
            own = [new for new in chunks if new.place == place]
            for new, made in over(own, make, source.num_threads):
                for name, checksum in made.items():
                    sums[name][new.one.chunk] = checksum
                done_bytes += new.one.num_bytes
                if progress is not None:
                    progress(done_bytes, total_bytes)
        records[place] = step.commit.replace(checksums=sums)
    return records


def _make(step: CommittedStep, reader: StepReader, new: CopiedChunk) -> dict[str, int]:
    """Makes a chunk's file; returns its checksum, by array."""
    one, old = new.one, step.manifest.leaves[new.one.number]
    if new.how == "recode" and one.state.is_beside:
        return {}  # its state's codes come with it
    with translated("copy", new.target):
        new.target.parent.mkdir(parents=True, exist_ok=True)
        if new.how == "recode":
            return _recode(new, old, reader, step.commit.step)
        if new.how == "link":
            check_holds(new.source, one.name, 0)  # no link leads there
            link_file(new.source / one.name, new.target)
        else:
            allocate(new.target, one)
            with opened_to_write(new.target) as fd:
                if new.how == "regrid":
                    return {one.array: _regrid(fd, new, old, reader)}
                for piece in reader.stored(old, one.state, one.chunk):
                    _put(fd, piece.values, piece.start * one.state.itemsize)
    return {one.array: step.commit.checksums[one.array][one.chunk]}


def write_box(
    fd: int,
    shape: Sequence[int],
    start: Sequence[int],
    values: Array,
    offset_bytes: int = 0,
) -> None:
    """Writes a box of an array into its file, where it lies in C order; blocks.

    Args:
      shape: of the array, which begins at `offset_bytes`.
      start: index of the box's first element.
      values: the box.
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
) -> dict[str, int]:
    """Writes a state's array in its codec, and what is stored beside it."""
    one, leaf = new.one, new.one.leaf
    first, *beside = states = _arrays(leaf, one.state)
    files = [replace(new, one=one._replace(state=state)) for state in states]
    for file in files:
        file.target.parent.mkdir(parents=True, exist_ok=True)
        allocate(file.target, file.one)
    slots = [slot.name for slot in leaf.slots]
    rounding = rounding_of_chunk(one.number, one.chunk, step)
    key = rounding + slots.index(first.slot) & 0xFFFFFFFF
    found: dict[str, list[tuple[int, int]]] = {file.one.array: [] for file in files}
    for piece in reader.pieces(old, _arrays(old, first)[0], one.chunk):
        arrays = [np.ascontiguousarray(piece.values)]
        if first.codec:
            arrays = [
                np.empty(state.num_elements(piece.values.size), dtype_of(state.dtype))
                for state in states
            ]
            rest = arrays[1] if beside else None
            CodedSlot(arrays[0], rest, key, piece.start).encode(piece.values)
        for file, data in zip(files, arrays, strict=True):
            state = file.one.state
            with opened_to_write(file.target) as fd:
                _put(fd, data, state.num_elements(piece.start) * state.itemsize)
            found[file.one.array].append((crc32c(data), data.nbytes))
    return {name: crc32c_combine(sums) for name, sums in found.items()}


def _regrid(fd: int, new: CopiedChunk, old: LeafRecord, reader: StepReader) -> int:
    """Writes the elements, as they are stored, of chunks of another grid."""
    one, chunk = new.one, new.one.layout
    pairs = enumerate(old.grid.chunks())
    near = {n for n, at in pairs if np.less(*_common(at.start, at.extent, chunk)).all()}
    most, options = PIECE_BYTES // 4, {"decoded": False, "chunks": near}
    for box, values in reader.boxes(old, one.state, most, **options):
        first, last = _common(box.start, box.extent, chunk)
        if np.less(first, last).all():
            inside = tuple(map(slice, first - box.start, last - box.start))
            start = np.subtract(first, chunk.start).tolist()
            write_box(fd, one.leaf.chunk_shape, start, values[inside])
    with closing(BufferPool(PIECE_BYTES)) as pool:
        return file_checksum(new.target, one.num_bytes, pool)


def _common(
    start: Sequence[int], extent: Sequence[int], chunk: Chunk
) -> tuple[Array, Array]:
    """Returns where what a box and a chunk have in common begins and ends."""
    ends = np.add(start, extent), np.add(chunk.start, chunk.extent)
    return np.maximum(start, chunk.start), np.minimum(*ends)
