"""The files of a copy: which are linked, copied, recoded, or only have room.

Invariant: old files are only read. A file that an interrupted call has made is used
  again if it is the old one, or if its bytes have the wanted checksum.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from jaxinf.io import crc32c, crc32c_combine, opened_to_write
from jaxinf.io.failures import translated
from jaxinf.layout import CodedSlot, rounding_of_chunk
from jaxinf.store.chunk_writer import ChunkWriter, put
from jaxinf.store.commit import CommitRecord
from jaxinf.store.contents import StateRecord, dtype_of
from jaxinf.store.copy_source import CopySource
from jaxinf.store.directory import StoreDirectory
from jaxinf.store.formats import scalars_of
from jaxinf.store.links import link_or_copy
from jaxinf.store.manifest import LeafRecord
from jaxinf.store.names import MASTER_PARAMS
from jaxinf.store.reader import StepReader, file_checksum, over
from jaxinf.store.regridding import regrid
from jaxinf.typing import Array, ProgressCallback

_How: TypeAlias = Literal["link", "copy", "recode", "regrid", "room"]


@dataclass(frozen=True)
class CopiedFile:
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
    def target(self) -> Path:
        return self.part.chunk_file(self.place, self.leaf, self.chunk, self.state.name)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.part.state_bytes(self.leaf, self.chunk, self.state)

    @property
    def room_bytes(self) -> int:
        """Bytes that it takes on the drive, unless it is a link."""
        return self.state.stored_bytes(self.part.chunks[self.leaf][self.chunk])


def copied_files(
    source: CopySource, parts: Sequence[StoreDirectory]
) -> Iterator[CopiedFile]:
    """Yields the files of new stores; looks at old ones, and writes nothing."""
    device = cache(_device)
    steps = [(n, s.places, s.commit) for n, s in source.steps.items()]
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
                if commit is None and how != "link":
                    how = "room"
                expected = None
                if commit is not None and how == "copy":
                    expected = int(commit.checksums[name][chunk])
                yield CopiedFile(part, place, number, chunk, state, how, file, expected)


def _way(old: LeafRecord, new: LeafRecord, state: StateRecord) -> _How:
    if old.chunk_shape != new.chunk_shape:
        return "regrid"
    return "copy" if _arrays(old, state) == _arrays(new, state) else "recode"


def _arrays(leaf: LeafRecord, state: StateRecord) -> list[StateRecord]:
    return [one for one in leaf.states if one.slot == state.slot]


def _device(place: Path) -> int:
    while not place.exists():
        place = place.parent
    return place.stat().st_dev


def room_needed(files: Sequence[CopiedFile]) -> dict[Path, int]:
    """Returns bytes below each directory, without what an interrupted call has made."""
    needs: dict[Path, int] = defaultdict(int)
    for one in files:
        if one.how != "link":
            csd, file = one.part.manifest.leaves[one.leaf].csds[one.chunk], one.target
            there = file.stat().st_blocks * 512 if file.exists() else 0
            needs[one.part.csd_directory(csd)] += max(0, one.room_bytes - there)
    return dict(needs)


# --- making them ---------------------------------------------------------------------


def make_files(
    source: CopySource,
    files: Sequence[CopiedFile],
    progress: ProgressCallback | None,
) -> dict[str, CommitRecord]:
    """Makes the files of new stores' steps; blocks, and makes nothing durable.

    Args:
      progress: called with the bytes of elements done and in all.

    Returns:
      The records of all steps, by place, with the checksums of all chunks.

    Raises:
      StoreCorruptError: an old chunk is damaged.
      StoreError: a drive failed or is full, or the source cannot be read.
    """
    parts = list({id(one.part): one.part for one in files}.values())
    total_bytes, done_bytes = sum(one.num_bytes for one in files), 0
    records = {}
    for place in (*source.steps, "b"):
        own = [one for one in files if one.place == place]
        step = source.steps.get(place, source.steps["a"])
        sums = _sums(parts, step.commit)
        with source.open_reader(step) as reader:

            def make(
                one: CopiedFile,
                reader: StepReader = reader,
                step: int = step.commit.step,
                sums: dict[str, Array] = sums,
            ) -> None:
                _make(source.whole.leaves[one.leaf], one, reader, step, sums)

            for one, _ in over(own, make, source.num_threads):
                done_bytes += one.num_bytes
                if progress is not None:
                    progress(done_bytes, total_bytes)
            for number in sorted({n.leaf for n in own if n.how == "regrid"}):
                writers = [ChunkWriter(part, place) for part in parts]
                sums |= regrid(reader, number, source.whole.leaves[number], writers)
        if place != "b":
            scalars = step.commit.scalar_state
            if parts:
                scalars = scalars_of(step.commit, source.whole, parts[0].manifest)
            records[place] = replace(
                step.commit, checksums=sums, scalar_state=scalars, documents={}
            )
    return records


def _sums(parts: Sequence[StoreDirectory], held: CommitRecord) -> dict[str, Array]:
    """Returns the checksums of all chunks, right for those that stay."""
    sums = {}
    for leaf in parts[0].manifest.leaves if parts else ():
        for state in leaf.states:
            name, num_chunks = leaf.array_name(state.name), len(leaf.csds)
            found = held.checksums.get(name, np.zeros(0, np.uint32))
            is_fitting = len(found) == num_chunks
            sums[name] = found.copy() if is_fitting else np.zeros(num_chunks, np.uint32)
    return sums


def _make(
    old: LeafRecord,
    one: CopiedFile,
    reader: StepReader,
    step: int,
    sums: dict[str, Array],
) -> None:
    with translated("copy", one.target):
        if one.how == "link":
            assert one.source is not None
            _link(one.source, one.target)
        elif one.how == "regrid":
            _clear(one)
        elif one.how == "copy":
            if not _is_there(one):
                _clear(one)
                with opened_to_write(one.target) as fd:
                    for piece in reader.stored(old, one.state, one.chunk):
                        put(fd, piece.values, piece.start * one.state.itemsize)
        elif one.how == "recode" and not one.state.is_beside:
            _recode(one, old, reader, step, sums)


def _link(source: Path, target: Path) -> None:
    if os.path.lexists(target):
        if target.samefile(source):
            return
        target.unlink()
    target.parent.mkdir(parents=True, exist_ok=True)
    link_or_copy(source, target)


def _is_there(one: CopiedFile) -> bool:
    """Whether an interrupted call has made the file, and it is right."""
    file, layout = one.target, one.part.state_chunk(one.leaf, one.chunk, one.state)
    if not file.exists() or file.stat().st_nlink > 1:
        return False
    if file.stat().st_size != layout.stored_elements * one.state.itemsize:
        return False
    return file_checksum(file, one.num_bytes) == one.expected


def _clear(one: CopiedFile) -> None:
    """Makes a file anew, with room for its elements."""
    file, layout = one.target, one.part.state_chunk(one.leaf, one.chunk, one.state)
    file.unlink(missing_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    one.part.allocate(file, layout, one.state)


def _recode(
    one: CopiedFile,
    old: LeafRecord,
    reader: StepReader,
    step: int,
    sums: dict[str, Array],
) -> None:
    """Writes a state's array in its codec, and what is stored beside it."""
    leaf = one.part.manifest.leaves[one.leaf]
    first, *beside = states = _arrays(leaf, one.state)
    files = [replace(one, state=state) for state in states]
    for file in files:
        _clear(file)
    slots = [slot.name for slot in leaf.slots]
    rounding = rounding_of_chunk(one.leaf, one.chunk, step)
    key = rounding + slots.index(first.slot) & 0xFFFFFFFF
    held = [state for state in old.states if state.slot == first.slot]
    # An average begins as the master params.
    wanted = held[0] if held else old.state(MASTER_PARAMS)
    found: dict[str, list[tuple[int, int]]] = {state.name: [] for state in states}
    for piece in reader.pieces(old, wanted, [one.chunk]):
        rest = None
        if beside:
            size = beside[0].num_elements(piece.values.size)
            rest = np.empty(size, dtype_of(beside[0].dtype))
        codes = piece.values
        if first.codec:
            codes = np.empty(piece.values.size, dtype_of(first.dtype))
            CodedSlot.of(codes, rest, key, piece.start).encode(piece.values)
        for file, values in zip(files, (codes, rest), strict=False):
            assert values is not None
            data = np.ascontiguousarray(values)
            offset = file.state.num_elements(piece.start) * file.state.itemsize
            with opened_to_write(file.target) as fd:
                put(fd, data, offset)
            found[file.state.name].append((crc32c(data), data.nbytes))
    for state in states:
        sums[leaf.array_name(state.name)][one.chunk] = crc32c_combine(found[state.name])
