"""The chunks of a copy: which are linked, copied, recoded, or only have room.

     same bytes ──── link, or copy with its checksum ───┐
     other codec ─── decoded and encoded ───────────────┼──► a chunk of a new store
     other grid ──── boxes of the old chunks ───────────┘

Invariant: old files are only read, and all of a chunk is verified before it counts. A
  file that an interrupted call has made is used again if it is the old one, or if its
  bytes have the wanted checksum.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, product
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from jaxinf.layout import (
    CODE_BLOCK,
    Chunk,
    CodedSlot,
    box_runs,
    portions,
    rounding_of_chunk,
)
from jaxinf.store.commit import CommitRecord
from jaxinf.store.copy_source import CopySource
from jaxinf.store.creation import existing_parent
from jaxinf.store.directory import StoreDirectory
from jaxinf.store.formats import blocks_of, scalars_of
from jaxinf.store.links import link_file
from jaxinf.store.manifest import LeafRecord, StateRecord, dtype_of
from jaxinf.store.names import MASTER_PARAMS
from jaxinf.store.reader import (
    PIECE_BYTES,
    PieceRuns,
    StepReader,
    file_checksum,
    over,
)
from jaxinf.transfer import crc32c, crc32c_combine, opened_to_write, translated
from jaxinf.typing import Array, ProgressCallback

_How: TypeAlias = Literal["link", "copy", "recode", "regrid", "room"]
_Sums: TypeAlias = dict[str, Array]


@dataclass(frozen=True)
class CopiedChunk:
    """A chunk's file in a new store, and where its bytes come from.

    Attributes:
      part: the new store.
      place: slot ``a``, a checkpoint, or slot ``b``, which has room alone.
      how: ``"link"`` to `source`; ``"copy"`` of the same bytes, verified; ``"recode"``
        from the decoded values; ``"regrid"`` from chunks of another grid; ``"room"``.
      source: the file of the same bytes that is linked to.
      expected: the checksum of the same bytes.
    """

    part: StoreDirectory
    place: str
    leaf: int
    chunk: int
    state: StateRecord
    how: _How
    source: Path | None = None
    expected: int | None = None

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
        """Bytes that it takes on the drive, unless it is a link."""
        return self.state.stored_bytes(self.part.chunks[self.leaf][self.chunk])


def copied_chunks(
    source: CopySource, parts: Sequence[StoreDirectory]
) -> Iterator[CopiedChunk]:
    """Yields the chunks of new stores; looks at old files, and writes nothing."""
    device = cache(lambda place: existing_parent(place)[1])
    steps = [(name, s.places, s.commit) for name, s in source.steps.items()]
    for part in parts:
        for place, folders, commit in [*steps, ("b", source.spares, None)]:
            for number, leaf, state, chunk in part.held():
                old, name = source.whole.leaves[number], leaf.array_name(state.name)
                how, file = _way(old, leaf, state), None
                if how == "copy" and source.has_links and folders:
                    folder = folders[old.csds[chunk]]
                    file = folder / name / part.state_chunk(number, chunk, state).key
                    root = part.csd_directory(leaf.csds[chunk])
                    is_near = device(folder) == device(root)
                    if is_near and (commit is not None or file.exists()):
                        how = "link"
                expected = None
                if commit is None and how != "link":
                    how = "room"
                elif commit is not None and how == "copy":
                    expected = int(commit.checksums[name][chunk])
                yield CopiedChunk(
                    part, place, number, chunk, state, how, file, expected
                )


def _way(old: LeafRecord, new: LeafRecord, state: StateRecord) -> _How:
    if old.chunk_shape != new.chunk_shape:
        return "regrid"
    return "copy" if _arrays(old, state) == _arrays(new, state) else "recode"


def _arrays(leaf: LeafRecord, state: StateRecord) -> list[StateRecord]:
    return [one for one in leaf.states if one.slot == state.slot]


def room_needed(chunks: Sequence[CopiedChunk]) -> dict[Path, int]:
    """Returns bytes below each directory, without what an interrupted call has made."""
    needs: dict[Path, int] = defaultdict(int)
    for one in chunks:
        if one.how != "link":
            file, csd = one.target, one.record.csds[one.chunk]
            there = file.stat().st_blocks * 512 if file.exists() else 0
            needs[one.part.csd_directory(csd)] += max(0, one.room_bytes - there)
    return dict(needs)


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
        sums = _old_sums(new.leaves, step.commit)
        with source.open_reader(step) as reader:
            for one, made in over(
                own, lambda one, r=reader: _make(one, source, r), source.num_threads
            ):
                for name, checksum in made.items():
                    sums[name][one.chunk] = checksum
                done_bytes += one.num_bytes
                if progress is not None:
                    progress(done_bytes, total_bytes)
            others = [one for one in own if one.how == "regrid"]
            arrays = defaultdict[tuple[int, StateRecord], list[CopiedChunk]](list)
            for one in others:
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


def _old_sums(leaves: Sequence[LeafRecord], commit: CommitRecord) -> _Sums:
    """Returns a checksum for each chunk, the right one if its bytes stay."""
    sums = {}
    for leaf in leaves:
        for state in leaf.states:
            name, num_chunks = leaf.array_name(state.name), len(leaf.csds)
            held = commit.checksums.get(name, ())
            is_fitting = len(held) == num_chunks
            sums[name] = np.array(held if is_fitting else [0] * num_chunks, np.uint32)
    return sums


def _make(one: CopiedChunk, source: CopySource, reader: StepReader) -> dict[str, int]:
    """Makes a chunk's file; returns checksums of new bytes, by array."""
    old = source.whole.leaves[one.leaf]
    with translated("copy", one.target):
        if one.how == "link":
            _link(one)
        elif one.how == "regrid":
            _clear(one)  # its boxes come from several chunks
        elif one.how == "copy" and not _is_there(one):
            _clear(one)
            with opened_to_write(one.target) as fd:
                for piece in reader.stored(old, one.state, one.chunk):
                    _put(fd, piece.values, piece.start * one.state.itemsize)
        elif one.how == "recode" and not one.state.is_beside:
            step = source.steps[one.place].commit.step
            return _recode(one, old, reader, step)
    return {}


def _link(one: CopiedChunk) -> None:
    assert one.source is not None
    if os.path.lexists(one.target):
        if one.target.samefile(one.source):
            return
        one.target.unlink()
    one.target.parent.mkdir(parents=True, exist_ok=True)
    link_file(one.source, one.target)


def _is_there(one: CopiedChunk) -> bool:
    """Whether an interrupted call has made the file, and it is right."""
    file, file_bytes = one.target, one.layout.stored_elements * one.state.itemsize
    if not file.exists() or file.stat().st_nlink > 1:
        return False
    if file.stat().st_size != file_bytes:
        return False
    return file_checksum(file, one.num_bytes) == one.expected


def _clear(one: CopiedChunk) -> None:
    """Makes a file anew, with room for its elements."""
    one.target.unlink(missing_ok=True)
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
        _clear(file)
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
            coded = CodedSlot.of(
                arrays[0], arrays[1] if beside else None, key, piece.start
            )
            coded.encode(piece.values)
        for file, data in zip(files, arrays, strict=True):
            offset = file.state.num_elements(piece.start) * file.state.itemsize
            with opened_to_write(file.target) as fd:
                _put(fd, data, offset)
            found[file.state.name].append((crc32c(data), data.nbytes))
    return {leaf.array_name(name): crc32c_combine(sums) for name, sums in found.items()}


# --- another grid --------------------------------------------------------------------


def _regrid(
    reader: StepReader, old: LeafRecord, state: StateRecord, new: Sequence[CopiedChunk]
) -> None:
    """Moves an array's elements as they are stored, and scales with their blocks."""
    if state.codec == "scale":
        _regrid_scales(reader, old, state, new)
        return
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
    """Writes the part of a leaf's box that a chunk has.

    Args:
      start: the first index of the box.
    """
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


def _regrid_scales(
    reader: StepReader, old: LeafRecord, state: StateRecord, new: Sequence[CopiedChunk]
) -> None:
    whole = np.empty(-(-old.grid.num_elements // CODE_BLOCK), dtype_of(state.dtype))
    for number, chunk in enumerate(old.grid.chunks()):
        blocks = blocks_of(old.grid, chunk)
        assert blocks is not None, "`divided_leaves` has seen that"
        for piece in reader.stored(old, state, number):
            whole[blocks[piece.start : piece.start + piece.values.size]] = piece.values
    for one in new:
        blocks = blocks_of(one.record.grid, one.part.chunks[one.leaf][one.chunk])
        with translated("write", one.target), opened_to_write(one.target) as fd:
            _put(fd, whole[blocks], 0)
