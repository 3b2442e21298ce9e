"""The files of a copy: which are linked, copied, recoded, or only have room.

Invariant: old files are only read. A file that an interrupted call has made is used
  again if it is the old one, or if its bytes have the wanted checksum.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from jaxinf.io import crc32c, crc32c_combine, opened_to_write
from jaxinf.io.failures import translated
from jaxinf.layout import CodedSlot, rounding_of_chunk
from jaxinf.store.chunk_writer import ChunkWriter
from jaxinf.store.commit import CommitRecord
from jaxinf.store.contents import StateRecord, dtype_of
from jaxinf.store.copy_source import CopySource
from jaxinf.store.directory import StoreDirectory
from jaxinf.store.formats import scalars_of
from jaxinf.store.links import link_or_copy
from jaxinf.store.manifest import LeafRecord
from jaxinf.store.names import MASTER_PARAMS
from jaxinf.store.reader import Piece, StepReader, file_checksum
from jaxinf.store.regridding import regrid
from jaxinf.store.space import stored_bytes
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
      target: the file.
      num_bytes: of its elements.
      room_bytes: what it takes on the drive, unless it is a link.
      source: the file of the same bytes, if there is one that may be linked to.
      expected: the checksum of the same bytes.
    """

    part: StoreDirectory
    place: str
    leaf: int
    chunk: int
    state: StateRecord
    how: _How
    target: Path
    num_bytes: int
    room_bytes: int
    source: Path | None
    expected: int | None


def copied_files(
    source: CopySource, parts: Sequence[StoreDirectory]
) -> Iterator[CopiedFile]:
    """Yields the files of new stores; looks at old ones, and writes nothing.

    A file that several steps share is copied to another file system once: `source` of
    the others is the copy, which comes before them.
    """
    device = cache(_device)
    made: dict[tuple[int, int, int], Path] = {}
    for part in parts:
        places = [(n, s.places, s.commit) for n, s in source.steps.items()]
        for place, folders, commit in [*places, ("b", source.spares, None)]:
            for number, leaf, state, chunk in part.held():
                old, name = source.whole.leaves[number], leaf.array_name(state.name)
                how, expected, file = _way(old, leaf, state), None, None
                if commit is None:
                    how = "room" if how != "copy" or not folders else how
                elif how == "copy":
                    expected = int(commit.checksums[name][chunk])
                target = part.chunk_file(place, number, chunk, state.name)
                if how == "copy" and source.has_links:
                    root = device(part.csd_directory(leaf.csds[chunk]))
                    key = part.state_chunk(number, chunk, state).key
                    file = folders[old.csds[chunk]] / name / key
                    if commit is None and not file.exists():
                        file = None
                    elif device(folders[old.csds[chunk]]) != root:
                        status = file.stat()
                        inode = status.st_dev, status.st_ino, root
                        file = made.get(inode)
                        if commit is not None:
                            made.setdefault(inode, target)
                    how = "link" if file is not None else how
                    how = "room" if how == "copy" and commit is None else how
                yield CopiedFile(
                    part,
                    place,
                    number,
                    chunk,
                    state,
                    how,
                    target,
                    part.state_bytes(number, chunk, state),
                    stored_bytes(part.chunks[number][chunk], state),
                    file,
                    expected,
                )


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
            csd = one.part.manifest.leaves[one.leaf].csds[one.chunk]
            root = one.part.csd_directory(csd)
            there = one.target.stat().st_blocks * 512 if one.target.exists() else 0
            needs[root] += max(0, one.room_bytes - there)
    return dict(needs)


# --- making them ---------------------------------------------------------------------


def make_files(
    source: CopySource,
    files: Sequence[CopiedFile],
    progress: ProgressCallback | None,
) -> dict[str, CommitRecord]:
    """Makes the files of new stores; blocks, and makes nothing durable.

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
                _make(source, one, reader, step, sums)

            # Links to copies on another file system come after these.
            for later in (False, True):
                now = [one for one in own if (one.how == "link") == later]
                with ThreadPoolExecutor(source.num_threads) as threads:
                    try:
                        for one, _ in zip(now, threads.map(make, now), strict=True):
                            done_bytes += one.num_bytes
                            if progress is not None:
                                progress(done_bytes, total_bytes)
                    finally:
                        threads.shutdown(cancel_futures=True)
            if place != "b":
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
    source: CopySource,
    one: CopiedFile,
    reader: StepReader,
    step: int,
    sums: dict[str, Array],
) -> None:
    old = source.whole.leaves[one.leaf]
    with translated("copy", one.target):
        if one.how == "link":
            assert one.source is not None
            _link(one.source, one.target)
        elif one.how in ("regrid", "room"):
            _clear(one, keeps=one.how == "room")
        elif one.how == "copy":
            if not _is_there(one):
                _write(one, reader.stored(old, one.state, one.chunk))
        elif not one.state.is_beside:
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
    if not one.target.exists() or one.target.stat().st_nlink > 1:
        return False
    layout = one.part.state_chunk(one.leaf, one.chunk, one.state)
    if one.target.stat().st_size != layout.stored_elements * one.state.itemsize:
        return False
    return file_checksum(one.target, one.num_bytes) == one.expected


def _clear(one: CopiedFile, *, keeps: bool = False) -> None:
    """Makes a file anew, with room for its elements.

    Args:
      keeps: whether one that is there, and no link, may stay.
    """
    layout = one.part.state_chunk(one.leaf, one.chunk, one.state)
    if os.path.lexists(one.target):
        status, length = one.target.stat(), layout.stored_elements * one.state.itemsize
        if keeps and status.st_nlink == 1 and status.st_size == length:
            return
        one.target.unlink()
    one.target.parent.mkdir(parents=True, exist_ok=True)
    one.part.allocate(one.target, layout, one.state)


def _write(one: CopiedFile, pieces: Iterator[Piece]) -> None:
    _clear(one)
    with opened_to_write(one.target) as fd:
        for piece in pieces:
            _put(fd, piece.values, piece.start * one.state.itemsize)


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
    files = [
        replace(
            one,
            state=state,
            target=one.part.chunk_file(one.place, one.leaf, one.chunk, state.name),
        )
        for state in states
    ]
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
                _put(fd, data, offset)
            found[file.state.name].append((crc32c(data), data.nbytes))
    for state in states:
        sums[leaf.array_name(state.name)][one.chunk] = crc32c_combine(found[state.name])


def _put(fd: int, values: Array, offset_bytes: int) -> None:
    memory, done = values.reshape(-1).view(np.uint8).data, 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done:], offset_bytes + done)
