"""The chunks of a copy: which are linked, copied, recoded, or only have room.

     same bytes ──── link, or copy with its checksum ───┐
     other codec ─── decoded and encoded ───────────────┼──► a chunk of a new store
     other grid ──── boxes of the old chunks ───────────┘

Invariant: old files are only read, and all of a chunk is verified before it counts.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from jaxinf.layout import CodedSlot, box_runs, rounding_of_chunk
from jaxinf.store.commit import CommitRecord
from jaxinf.store.copy_source import CopySource
from jaxinf.store.creation import existing_parent
from jaxinf.store.directory import StoreDirectory, allocate, link_file
from jaxinf.store.manifest import ChunkFile, LeafRecord, StateRecord, dtype_of
from jaxinf.store.reader import (
    PIECE_BYTES,
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

_How: TypeAlias = Literal["link", "copy", "recode", "regrid", "room"]


@dataclass(frozen=True)
class CopiedChunk:
    """A chunk's file in a new store, and where its bytes come from.

    Attributes:
      part: the new store.
      place: slot ``a``, a checkpoint, or slot ``b``, which has room alone.
      one: the chunk.
      how: ``"link"`` to `source`; ``"copy"`` of the same bytes, verified; ``"recode"``
        from the decoded values; ``"regrid"`` from chunks of another grid; ``"room"``.
      source: the directory below which the file of the same bytes is linked to.
    """

    part: StoreDirectory
    place: str
    one: ChunkFile
    how: _How
    source: Path | None = None

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
    steps = [(name, step.places) for name, step in source.steps.items()]
    for part in parts:
        for place, folders in [*steps, ("b", source.spares)]:
            for one in part.manifest.held():
                old, is_spare = source.whole.leaves[one.number], place == "b"
                how, folder = _way(old, one), None
                if how == "copy" and source.has_links and folders:
                    folder = folders[old.csds[one.chunk]]
                    is_near = device(folder) == device(part.csd_directory(one.csd))
                    if is_near and (not is_spare or (folder / one.name).exists()):
                        how = "link"
                if is_spare and how != "link":
                    how = "room"
                yield CopiedChunk(part, place, one, how, folder)


def _way(old: LeafRecord, one: ChunkFile) -> _How:
    if old.chunk_shape != one.leaf.chunk_shape:
        return "regrid"
    is_same = _arrays(old, one.state) == _arrays(one.leaf, one.state)
    return "copy" if is_same else "recode"


def _arrays(leaf: LeafRecord, state: StateRecord) -> list[StateRecord]:
    return [one for one in leaf.states if one.slot == state.slot]


def room_needed(chunks: Sequence[CopiedChunk]) -> dict[Path, int]:
    """Returns bytes below each directory."""
    needs: dict[Path, int] = defaultdict(int)
    for new in chunks:
        needs[new.part.csd_directory(new.one.csd)] += new.room_bytes
    return needs


# --- making them ---------------------------------------------------------------------


def make_steps(
    source: CopySource,
    chunks: Sequence[CopiedChunk],
    progress: ProgressCallback | None,
) -> dict[str, CommitRecord]:
    """Makes the chunks of new stores' steps; blocks, and makes nothing durable.

    Args:
      progress: called with the bytes of elements done and in all.

    Returns:
      The records of all steps, by place, with the checksums of all chunks.

    Raises:
      StoreCorruptError: an old chunk is damaged.
      StoreError: a drive failed or is full, or the source cannot be read.
    """
    total_bytes = sum(new.one.num_bytes for new in chunks)
    done_bytes, records, leaves = 0, dict[str, CommitRecord](), source.whole.leaves
    manifest = chunks[0].part.manifest if chunks else source.whole
    for place in (*source.steps, "b"):
        own = [new for new in chunks if new.place == place]
        step = source.steps.get(place, source.step)
        sums = dict[str, Array]()  # the right ones of chunks whose bytes stay
        for name, leaf, _ in manifest.arrays():
            held = step.commit.checksums.get(name, ())
            is_same = len(held) == len(leaf.csds)
            sums[name] = np.array(held if is_same else [0] * len(leaf.csds), np.uint32)
        with step.reader() as reader:
            make = partial(_make, leaves, reader, step.commit.step)
            for new, made in over(own, make, source.num_threads):
                for name, checksum in made.items():
                    sums[name][new.one.chunk] = checksum
                done_bytes += new.one.num_bytes
                if progress is not None:
                    progress(done_bytes, total_bytes)
            arrays = defaultdict[str, dict[int, CopiedChunk]](dict)
            for new in own:
                if new.how == "regrid":
                    arrays[new.one.array][new.one.chunk] = new
            for name, group in arrays.items():
                _regrid(reader, leaves[next(iter(group.values())).one.number], group)
                for number, new in group.items():
                    size, pool = new.one.num_bytes, BufferPool(PIECE_BYTES)
                    checksum = file_checksum(new.target, size, pool)
                    sums[name][number] = checksum
        if place != "b":
            records[place] = step.commit.replace(checksums=sums)
    return records


def _make(
    leaves: Sequence[LeafRecord], reader: StepReader, step: int, new: CopiedChunk
) -> dict[str, int]:
    """Makes a chunk's file; returns checksums of new bytes, by array."""
    one = new.one
    with translated("copy", new.target):
        if new.how == "link" and new.source is not None:
            check_holds(new.source, one.name, 0)  # no link leads there
            new.target.parent.mkdir(parents=True, exist_ok=True)
            link_file(new.source / one.name, new.target)
        elif new.how == "regrid":
            _allocate(new)  # its boxes come from several chunks
        elif new.how == "copy":
            _allocate(new)
            with opened_to_write(new.target) as fd:
                for piece in reader.stored(leaves[one.number], one.state, one.chunk):
                    _put(fd, piece.values, piece.start * one.state.itemsize)
        elif new.how == "recode" and not one.state.is_beside:
            return _recode(new, leaves[one.number], reader, step)
    return {}


def _allocate(new: CopiedChunk) -> None:
    new.target.parent.mkdir(parents=True, exist_ok=True)
    allocate(new.target, new.one)


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
        _allocate(file)
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


def _regrid(
    reader: StepReader, old: LeafRecord, new: Mapping[int, CopiedChunk]
) -> None:
    """Moves an array's elements as they are stored to chunks of another grid."""
    first = next(iter(new.values())).one
    grid, state = first.leaf.grid, first.state
    for box, values in reader.boxes(old, state, PIECE_BYTES // 4, decoded=False):
        bounds = zip(box.start, box.extent, grid.chunk_shape, strict=True)
        near = [range(a // size, -(-(a + n) // size)) for a, n, size in bounds]
        for index in product(*near):
            own = new[int(np.ravel_multi_index(index, grid.grid_shape))]
            with translated("write", own.target):
                _put_box(own, box.start, values)


def _put_box(new: CopiedChunk, start: Sequence[int], values: Array) -> None:
    """Writes the part of a leaf's box, which begins at an index, that a chunk has."""
    chunk = new.one.layout
    first = np.maximum(start, chunk.start)
    last = np.minimum(np.add(start, values.shape), np.add(chunk.start, chunk.extent))
    begin, extent = first - start, last - first
    part, inside = values[tuple(map(slice, begin, begin + extent))], first - chunk.start
    with opened_to_write(new.target) as fd:
        write_box(fd, new.one.leaf.chunk_shape, inside.tolist(), part)
