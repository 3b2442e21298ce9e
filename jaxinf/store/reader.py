"""A committed step, and the one reader of its chunks: it verifies and decodes them.

      file ──► pieces ──► checksum ──► decoded ──► the caller
                             └─ of the whole chunk, before its last piece is returned

Invariant: files are only read, through a few buffers of one piece each, or into the
caller's array. No caller gets all of a damaged chunk: it gets an error instead.
"""

import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from jaxinf.documents import first_few
from jaxinf.errors import StoreCorruptError
from jaxinf.layout import (
    SCALES_ALIGNMENT_ELEMENTS,
    Chunk,
    ChunkBox,
    CodedSlot,
    portions,
)
from jaxinf.store.commit import CommitRecord
from jaxinf.store.files import read_carry
from jaxinf.store.manifest import ChunkFile, LeafRecord, Manifest, StateRecord, dtype_of
from jaxinf.transfer import (
    PAGE_BYTES,
    BufferPool,
    ByteMeters,
    check_length,
    crc32c,
    crc32c_combine,
    read_into,
    span,
)
from jaxinf.typing import Array

PIECE_BYTES = 4 << 20
"""Most bytes of a file that are in memory at a time."""

_MOST_THREADS = 4
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class CommittedStep:
    """A committed step with its chunks, which does not change while it is read.

    That of a run has the manifest of a store of one process, whose CSDs are `places`,
    and the checksums of all members. If chunks are no files, `fetch` returns the bytes
    of one by its name, perhaps with more behind them.
    """

    path: Path  # of a slot's layout; of a run the first member's
    manifest: Manifest  # as it was when the step was pinned
    commit: CommitRecord
    places: tuple[Path, ...]  # directories of chunks, in a slot's layout
    warning: str = ""  # why chunks may change nevertheless
    fetch: Callable[[str], bytes] | None = None

    def check(self) -> None:
        """Raises StoreFormatError if the record is not of the store's arrays."""
        self.commit.check_fits(self.path / "commit.json", self.manifest)

    def read_carry(self) -> Sequence[bytes]:
        """Returns the arrays that it carries; raises as `jaxinf.store.read_carry`."""
        return read_carry(self.path, self.commit.carry, self.fetch)


@dataclass(frozen=True)
class ChunkRun:
    """A run of a chunk's elements."""

    chunk: Chunk
    start: int  # number of the run's first element in the chunk
    values: Array  # one-dimensional; valid until the next piece is requested


def corrupt_chunk(
    file: Path,
    one: ChunkFile,
    expected: int | None,
    found: int,
    when: str = "as written",
) -> StoreCorruptError:
    """Makes the error for a chunk of another CRC-32C than is expected, if one is.

    The origin of the expected one is `when`.
    """
    wanted = "none" if expected is None else f"{expected:08x}"
    return StoreCorruptError(
        f"{os.path.realpath(file)}: {one}: expected CRC-32C {wanted} {when}, found "
        f"{found:08x}; nothing was made of it. Check the drive (dmesg, smartctl), see "
        '"jaxinf verify" for all that is damaged, and restore a checkpoint or a backup'
    )


def over(
    items: Iterable[_T], action: Callable[[_T], _R], num_threads: int
) -> Iterator[tuple[_T, _R]]:
    """Yields each item with the action's result, from several threads, in order.

    Every walk of a step's chunks is one of these. After an error no further action
    begins, and it is raised when those under way have ended.
    """
    items = list(items)
    if num_threads < 2 or len(items) < 2:
        yield from ((item, action(item)) for item in items)
        return
    threads = ThreadPoolExecutor(num_threads)
    try:
        yield from zip(items, threads.map(action, items), strict=True)
    finally:
        threads.shutdown(cancel_futures=True)


class StepReader(AbstractContextManager["StepReader"]):
    """Reads the arrays of one committed step. Thread-safe; a context manager.

    Attributes:
      num_threads: number of threads that its memory is for.

    Args:
      step: the step, which does not change meanwhile.
      memory_bytes: approximate memory for the pieces read at a time.
      meters: counts the bytes read.
      drives: names of the CSDs' drives for the reads' spans; by default the folders.
    """

    def __init__(
        self,
        step: CommittedStep,
        *,
        memory_bytes: int = 8 * PIECE_BYTES,
        meters: ByteMeters | None = None,
        drives: Sequence[str] = (),
    ) -> None:
        self._step, self._meters, self._drives = step, meters, drives
        self.num_threads = max(1, min(_MOST_THREADS, memory_bytes // (2 * PIECE_BYTES)))
        fitting = min(PIECE_BYTES // 4, memory_bytes // self.num_threads // 8)
        # A piece has whole blocks of codes, and whole pages of their scales.
        num_units = max(1, fitting // SCALES_ALIGNMENT_ELEMENTS)
        self._piece_elements = num_units * SCALES_ALIGNMENT_ELEMENTS
        # An element has 8 bytes at most; its scale or remainder may add as much.
        self._pool = BufferPool(16 * self.num_threads * self._piece_elements)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def place_of(self, one: ChunkFile) -> Path:
        """Returns the directory, in a slot's layout, that has a chunk."""
        return self._step.places[one.csd] if self._step.places else self._step.path

    def pieces(self, one: ChunkFile) -> Iterator[ChunkRun]:
        """Yields a chunk's elements, decoded; scales and remainders as stored; blocks.

        Raises:
          StoreCorruptError: the chunk is damaged; raised before its last piece.
          StoreIOError: it is missing, too short, or the drive failed.
        """
        found = self.stored(one)
        if not one.state.codec or one.state.is_beside:
            yield from found
            return
        others = itertools.repeat(None)
        if beside := one.state.stored[1:]:  # to the last piece
            per_piece = beside[0].num_elements(self._piece_elements)
            others = self.stored(one._replace(state=beside[0]), per_piece)
        for piece, rest in zip(found, others, strict=bool(beside)):
            coded = CodedSlot(piece.values, None if rest is None else rest.values)
            yield replace(piece, values=coded.decode())

    def stored(
        self,
        one: ChunkFile,
        per_piece: int = 0,
        into: Callable[[Chunk], Array | None] = lambda _: None,
    ) -> Iterator[ChunkRun]:
        """Yields a chunk's elements as stored; blocks, and raises as `pieces`.

        Args:
          per_piece: elements of a piece; by default as many as fit into memory.
          into: returns where the chunk's elements are wanted, of the stored dtype, 1-D
            and contiguous, or None; pieces that fit there are read there, and are
            views of it. After an error it holds what was read.
        """
        step, chunk, place = self._step, one.layout, one.leaf.places[one.chunk]
        assert place >= 0, f"{one}: another member's"
        sums = step.commit.checksums.get(one.array, ())
        expected = int(sums[place]) if place < len(sums) else None
        root = self.place_of(one)
        piece_bytes = (per_piece or self._piece_elements) * one.state.itemsize
        if step.fetch is None:
            target = into(chunk)
            view = None if target is None else target.view(np.uint8)
            pieces = self._file_pieces(root, one, piece_bytes, view)
        else:
            content = np.frombuffer(step.fetch(one.name), np.uint8)[: one.num_bytes]
            if content.size < one.num_bytes:
                raise corrupt_chunk(root / one.name, one, expected, 0)
            starts = range(0, content.size, piece_bytes)
            pieces = (content[start : start + piece_bytes] for start in starts)
        read, done = list[tuple[int, int]](), 0
        with closing(pieces):
            for raw in pieces:
                read.append((crc32c(raw), raw.size))
                is_last = done + raw.size == one.num_bytes
                if is_last and (found := crc32c_combine(read)) != expected:
                    raise corrupt_chunk(root / one.name, one, expected, found)
                start, done = done // one.state.itemsize, done + raw.size
                yield ChunkRun(chunk, start, raw.view(dtype_of(one.state.dtype)))

    def _file_pieces(
        self, root: Path, one: ChunkFile, piece_bytes: int, target: Array | None = None
    ) -> Generator[Array, None, None]:
        """Yields a chunk's file below a root as uint8, piece by piece; blocks.

        Args:
          piece_bytes: length of a piece, a multiple of the page.
          target: uint8, of all these bytes, of which pieces are views that can be read
            there: where it starts on a page, all of whole pages.
        """
        check_length(root, one.name, one.num_bytes)
        drive = self._drives[one.csd] if self._drives else str(root)
        if target is not None and target.ctypes.data % PAGE_BYTES:
            target = None
        with self._pool.acquire(min(piece_bytes, one.num_bytes)) as buffer:
            for offset in range(0, one.num_bytes, piece_bytes):
                length, array = min(piece_bytes, one.num_bytes - offset), buffer.array
                if target is not None and length % PAGE_BYTES == 0:
                    array = target[offset : offset + length]
                file, meters = root / one.name, self._meters
                with span("read", drive=drive):
                    read_into(file, array, offset, length, meters=meters)
                yield array[:length]

    def checksum(self, root: Path, one: ChunkFile) -> int:
        """Returns the CRC-32C of a chunk's file below any root; blocks."""
        pieces = self._file_pieces(root, one, PIECE_BYTES)
        return crc32c_combine([(crc32c(raw), raw.size) for raw in pieces])

    def boxes(
        self,
        leaf: LeafRecord,
        state: StateRecord,
        most_elements: int,
        *,
        decoded: bool = True,
    ) -> Iterator[tuple[ChunkBox, Array]]:
        """Yields a leaf's state in boxes of so many elements, chunk by chunk.

        It blocks, and raises as `pieces`, before a chunk's last box.
        """
        read = self.pieces if decoded else self.stored
        dtype = dtype_of((state.decoded() if decoded else state).dtype)
        every = portions(leaf.grid, most_elements)
        for number, boxes in itertools.groupby(every, key=lambda box: box.chunk):
            one = ChunkFile(-1, leaf, state, number)
            pieces, rest = read(one), np.empty(0, dtype)
            for box in boxes:
                out, done = np.empty(box.num_elements, dtype), 0
                while done < out.size:
                    if not rest.size:
                        rest = next(pieces).values
                    part = rest[: out.size - done]
                    out[done : done + part.size] = part
                    rest, done = rest[part.size :], done + part.size
                yield box, out.reshape(box.extent)


def find_leaf(manifest: Manifest, state: str, leaf: str) -> LeafRecord:
    """Returns the record of a leaf by its name as `jaxinf inspect` prints it.

    Raises:
      ValueError: there is no such leaf or state; lists the existing ones.
    """
    records = {record.name: record for record in manifest.leaves}
    if (record := records.get(leaf.strip("/"))) is None:
        raise ValueError(
            f"no leaf {leaf!r} in the store; there are {first_few(records, most=8)}"
        )
    if state not in (states := [one.name for one in record.states]):
        listed = ", ".join(states)
        raise ValueError(f"leaf {leaf}: no state {state!r}; there are {listed}")
    return record
