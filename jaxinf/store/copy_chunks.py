"""The chunks of a copy: which are linked, copied, recoded, or only have room.

     same bytes ──── link, or copy with its checksum ───┐
     other codec ─── decoded and encoded ───────────────┼──► a chunk of a new store
     other grid ──── boxes of the old chunks ───────────┘

Invariant: old files are only read, and all of a chunk is verified before it counts.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby, product
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from jaxinf.layout import Chunk, CodedSlot, box_runs, portions, rounding_of_chunk
from jaxinf.store.commit import CommitRecord
from jaxinf.store.copy_source import CopySource
from jaxinf.store.creation import existing_parent
from jaxinf.store.directory import StoreDirectory, link_file
from jaxinf.store.formats import scalars_of
from jaxinf.store.manifest import LeafRecord, StateRecord, dtype_of
from jaxinf.store.names import MASTER_PARAMS
from jaxinf.store.reader import (
    PIECE_BYTES,
    PieceRuns,
    StepReader,
    file_checksum,
    over,
)
from jaxinf.transfer import (
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
      how: ``"link"`` to `source`; ``"copy"`` of the same bytes, verified; ``"recode"``
        from the decoded values; ``"regrid"`` from chunks of another grid; ``"room"``.
      source: a directory, and below it the file of the same bytes that is linked to.
    """

    part: StoreDirectory
    place: str
    leaf: int
    chunk: int
    state: StateRecord
    how: _How
    source: tuple[Path, str] | None = None

    @property
    def record(self) -> LeafRecord:
        return self.part.manifest.leaves[self.leaf]

    @property
    def layout(self) -> Chunk:
        return self.part.state_chunk(self.leaf, self.chunk, self.state)

    @property
    def target(self) -> Path:
        return self.part.chunk_file(self.place, self.leaf, self.chunk, self.state.name)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.layout.num_elements * self.state.itemsize

    @property
    def room_bytes(self) -> int:
        """Bytes that it takes on the drive; none if it is a link."""
        if self.how == "link":
            return 0
        return self.state.stored_bytes(self.part.chunks[self.leaf][self.chunk])


def copied_chunks(
    source: CopySource, parts: Sequence[StoreDirectory]
) -> Iterator[CopiedChunk]:
    """Yields the chunks of new stores; looks at old files, and writes nothing."""
    device = cache(lambda place: existing_parent(place)[1])
    steps = [(name, step.places) for name, step in source.steps.items()]
    for part in parts:
        for place, folders in [*steps, ("b", source.spares)]:
            for number, leaf, state, chunk in part.held():
                old, is_spare = source.whole.leaves[number], place == "b"
                how, found = _way(old, leaf, state), None
                if how == "copy" and source.has_links and folders:
                    folder = folders[old.csds[chunk]]
                    key = part.state_chunk(number, chunk, state).key
                    found = folder, f"{leaf.array_name(state.name)}/{key}"
                    root = part.csd_directory(leaf.csds[chunk])
                    is_near = device(folder) == device(root)
                    if is_near and ((folder / found[1]).exists() or not is_spare):
                        how = "link"
                if is_spare and how != "link":
                    how = "room"
                yield CopiedChunk(part, place, number, chunk, state, how, found)


def _way(old: LeafRecord, new: LeafRecord, state: StateRecord) -> _How:
    if old.chunk_shape != new.chunk_shape:
        return "regrid"
    return "copy" if _arrays(old, state) == _arrays(new, state) else "recode"


def _arrays(leaf: LeafRecord, state: StateRecord) -> list[StateRecord]:
    return [one for one in leaf.states if one.slot == state.slot]


def room_needed(chunks: Sequence[CopiedChunk]) -> dict[Path, int]:
    """Returns bytes below each directory."""
    needs: dict[Path, int] = defaultdict(int)
    for one in chunks:
        needs[one.part.csd_directory(one.record.csds[one.chunk])] += one.room_bytes
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
    total_bytes, done_bytes, records = sum(one.num_bytes for one in chunks), 0, {}
    new = chunks[0].part.manifest if chunks else source.whole
    for place in (*source.steps, "b"):
        own = [one for one in chunks if one.place == place]
        step = source.steps.get(place, source.step)
        sums = dict[str, Array]()  # the right ones of chunks whose bytes stay
        for leaf in new.leaves:
            for name in (leaf.array_name(state.name) for state in leaf.states):
                held = step.commit.checksums.get(name, ())
                sums[name] = np.zeros(len(leaf.csds), np.uint32)
                if len(held) == len(leaf.csds):
                    sums[name][:] = held
        with source.open_reader(step) as reader:
            make = partial(_make, source.whole.leaves, reader, step.commit.step)
            for one, made in over(own, make, source.num_threads):
                for name, checksum in made.items():
                    sums[name][one.chunk] = checksum
                done_bytes += one.num_bytes
                if progress is not None:
                    progress(done_bytes, total_bytes)
            arrays = defaultdict[tuple[int, StateRecord], list[CopiedChunk]](list)
            for one in own:
                if one.how == "regrid":
                    arrays[one.leaf, one.state].append(one)
            for (leaf, state), group in arrays.items():
                _regrid(reader, source.whole.leaves[leaf], state, group)
                for one in group:
                    checksum = file_checksum(one.target, one.num_bytes)
                    sums[one.record.array_name(state.name)][one.chunk] = checksum
        if place != "b":
            scalars = scalars_of(step.commit, source.whole, new)
            records[place] = replace(step.commit, checksums=sums, scalar_state=scalars)
    return records


def _make(
    leaves: Sequence[LeafRecord], reader: StepReader, step: int, one: CopiedChunk
) -> dict[str, int]:
    """Makes a chunk's file; returns checksums of new bytes, by array."""
    with translated("copy", one.target):
        if one.how == "link" and one.source is not None:
            root, name = one.source
            check_holds(root, name, 0)  # no link leads there
            one.target.parent.mkdir(parents=True, exist_ok=True)
            link_file(root / name, one.target)
        elif one.how == "regrid":
            _allocate(one)  # its boxes come from several chunks
        elif one.how == "copy":
            _allocate(one)
            with opened_to_write(one.target) as fd:
                for piece in reader.stored(leaves[one.leaf], one.state, one.chunk):
                    _put(fd, piece.values, piece.start * one.state.itemsize)
        elif one.how == "recode" and not one.state.is_beside:
            return _recode(one, leaves[one.leaf], reader, step)
    return {}


def _allocate(one: CopiedChunk) -> None:
    one.target.parent.mkdir(parents=True, exist_ok=True)
    one.part.allocate(one.target, one.layout, one.state)


def _put(fd: int, values: Array, offset_bytes: int) -> None:
    memory, done = values.reshape(-1).view(np.uint8).data, 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done:], offset_bytes + done)


def _recode(
    one: CopiedChunk, old: LeafRecord, reader: StepReader, step: int
) -> dict[str, int]:
    """Writes a state's array in its codec, and what is stored beside it."""
    leaf = one.record
    first, *beside = states = _arrays(leaf, one.state)
    files = [replace(one, state=state) for state in states]
    for file in files:
        _allocate(file)
    slots = [slot.name for slot in leaf.slots]
    rounding = rounding_of_chunk(one.leaf, one.chunk, step)
    key = rounding + slots.index(first.slot) & 0xFFFFFFFF
    held = _arrays(old, first)
    # An average begins as the master params.
    wanted = held[0] if held else old.state(MASTER_PARAMS)
    found: dict[str, list[tuple[int, int]]] = {state.name: [] for state in states}
    for piece in reader.pieces(old, wanted, [one.chunk]):
        arrays = [np.ascontiguousarray(piece.values)]
        if first.codec:
            arrays = [
                np.empty(state.num_elements(piece.values.size), dtype_of(state.dtype))
                for state in states
            ]
            rest = arrays[1] if beside else None
            CodedSlot.of(arrays[0], rest, key, piece.start).encode(piece.values)
        for file, data in zip(files, arrays, strict=True):
            offset = file.state.num_elements(piece.start) * file.state.itemsize
            with opened_to_write(file.target) as fd:
                _put(fd, data, offset)
            found[file.state.name].append((crc32c(data), data.nbytes))
    return {leaf.array_name(name): crc32c_combine(sums) for name, sums in found.items()}


def _regrid(
    reader: StepReader, old: LeafRecord, state: StateRecord, new: Sequence[CopiedChunk]
) -> None:
    """Moves an array's elements as they are stored to chunks of another grid."""
    grid, by_number = new[0].record.grid, {one.chunk: one for one in new}
    every = portions(old.grid, PIECE_BYTES // 4)
    for number, members in groupby(every, key=lambda portion: portion.chunk):
        runs = PieceRuns(reader.stored(old, state, number), dtype_of(state.dtype))
        for portion in members:
            values = runs.take(portion.num_elements).reshape(portion.extent)
            bounds = zip(portion.start, portion.extent, grid.chunk_shape, strict=True)
            near = [range(a // size, -(-(a + n) // size)) for a, n, size in bounds]
            for index in product(*near):
                one = by_number[int(np.ravel_multi_index(index, grid.grid_shape))]
                with translated("write", one.target):
                    _put_box(one, portion.start, values)


def _put_box(one: CopiedChunk, start: Sequence[int], values: Array) -> None:
    """Writes the part of a leaf's box, which begins at an index, that a chunk has."""
    chunk = one.layout
    first = np.maximum(start, chunk.start)
    last = np.minimum(np.add(start, values.shape), np.add(chunk.start, chunk.extent))
    begin, extent = first - start, last - first
    part = values[tuple(map(slice, begin, begin + extent))].reshape(-1)
    done, inside = 0, (first - chunk.start).tolist()
    with opened_to_write(one.target) as fd:
        for offset, length in box_runs(one.record.chunk_shape, inside, extent.tolist()):
            _put(fd, part[done : done + length], offset * part.itemsize)
            done += length
