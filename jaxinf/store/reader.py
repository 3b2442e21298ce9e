"""Reads the chunks of a step: verified, and decoded or as stored.

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

from jaxinf.errors import StoreCorruptError
from jaxinf.layout import (
    SCALES_ALIGNMENT_ELEMENTS,
    Chunk,
    ChunkBox,
    CodedSlot,
    cut_portions,
)
from jaxinf.store.manifest import ChunkFile, LeafRecord, StateRecord, dtype_of
from jaxinf.store.steps import CommittedStep
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

_MAX_THREADS = 4
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class ChunkRun:
    """A piece of a chunk: a run of its elements, as they are read."""

    chunk: Chunk
    start: int  # number of the run's first element in the chunk
    values: Array  # 1-D; valid until the next piece is requested


def corrupt_chunk(
    file: Path,
    chunk: ChunkFile,
    expected: int | None,
    found: int,
    when: str = "as written",
) -> StoreCorruptError:
    """Makes the error for a chunk whose CRC-32C is not the expected one.

    `when` says where the expected checksum comes from; None is for no checksum.
    """
    wanted = "none" if expected is None else f"{expected:08x}"
    return StoreCorruptError(
        f"{os.path.realpath(file)}: {chunk}: expected CRC-32C {wanted} {when}, found "
        f"{found:08x}; nothing was made of it. Check the drive (dmesg, smartctl), see "
        '"jaxinf verify" for all that is damaged, and restore a checkpoint or a backup'
    )


def map_in_threads(
    items: Iterable[_T], action: Callable[[_T], _R], num_threads: int
) -> Iterator[tuple[_T, _R]]:
    """Yields each item, in order, with the result of an action that threads perform.

    An error is raised when the actions under way have ended; no further one begins.
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

    Its approximate memory is enough for `num_threads` threads. Reads are counted by
    `meters`; `drives` are names of the CSDs' drives for spans, by default the folders.
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
        self.num_threads = max(1, min(_MAX_THREADS, memory_bytes // (2 * PIECE_BYTES)))
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

    def root_of(self, chunk: ChunkFile) -> Path:
        """Returns the directory, of a step on a CSD, that has a chunk."""
        roots = self._step.chunk_roots
        return roots[chunk.csd] if roots else self._step.path

    def decoded_pieces(self, chunk: ChunkFile) -> Iterator[ChunkRun]:
        """Yields a chunk's elements, decoded; blocks. Companions come as stored.

        Raises:
          StoreCorruptError: The chunk is damaged; raised before its last piece.
          StoreIOError: It is missing, too short, or the drive failed.
        """
        pieces = self.stored_pieces(chunk)
        if not chunk.state.codec or chunk.state.is_companion:
            yield from pieces
            return
        others = itertools.repeat(None)
        if companions := chunk.state.stored[1:]:  # to the last piece
            per_piece = companions[0].num_elements(self._piece_elements)
            others = self.stored_pieces(chunk._replace(state=companions[0]), per_piece)
        for piece, other in zip(pieces, others, strict=bool(companions)):
            coded = CodedSlot(piece.values, None if other is None else other.values)
            yield replace(piece, values=coded.decode())

    def stored_pieces(
        self,
        chunk: ChunkFile,
        piece_elements: int = 0,
        into: Callable[[Chunk], Array | None] = lambda _: None,
    ) -> Iterator[ChunkRun]:
        """Yields a chunk's elements as stored; blocks, and raises as `decoded_pieces`.

        Args:
          piece_elements: Elements of a piece; by default as many as fit into memory.
          into: Returns where the chunk's elements are wanted, of the stored dtype, 1-D
            and contiguous, or None. Pieces that fit there are read there, and are views
            of it; after an error it holds what was read.
        """
        step, position = self._step, chunk.leaf.positions[chunk.number]
        assert position >= 0, f"{chunk}: another member's"
        checksums = step.commit.checksums.get(chunk.array_name, ())
        expected = int(checksums[position]) if position < len(checksums) else None
        root, block = self.root_of(chunk), chunk.block
        itemsize = chunk.state.itemsize
        piece_bytes = (piece_elements or self._piece_elements) * itemsize
        if step.fetch is None:
            target = into(block)
            view = None if target is None else target.view(np.uint8)
            pieces = self._file_pieces(root, chunk, piece_bytes, view)
        else:
            content = np.frombuffer(step.fetch(chunk.name), np.uint8)
            content = content[: chunk.num_bytes]
            if content.size < chunk.num_bytes:
                raise corrupt_chunk(root / chunk.name, chunk, expected, 0)
            starts = range(0, content.size, piece_bytes)
            pieces = (content[start : start + piece_bytes] for start in starts)
        read, done = list[tuple[int, int]](), 0
        with closing(pieces):
            for raw in pieces:
                read.append((crc32c(raw), raw.size))
                is_last = done + raw.size == chunk.num_bytes
                if is_last and (found := crc32c_combine(read)) != expected:
                    raise corrupt_chunk(root / chunk.name, chunk, expected, found)
                start, done = done // itemsize, done + raw.size
                yield ChunkRun(block, start, raw.view(dtype_of(chunk.state.dtype)))

    def _file_pieces(
        self,
        root: Path,
        chunk: ChunkFile,
        piece_bytes: int,
        target: Array | None = None,
    ) -> Generator[Array, None, None]:
        """Yields a chunk's file below a root as uint8, piece by piece; blocks.

        If the target, as long as the chunk, starts on a page, pieces of whole pages are
        read there, and are views of it.
        """
        check_length(root, chunk.name, chunk.num_bytes)
        drive = self._drives[chunk.csd] if self._drives else str(root)
        if target is not None and target.ctypes.data % PAGE_BYTES:
            target = None
        with self._pool.acquire(min(piece_bytes, chunk.num_bytes)) as buffer:
            for offset in range(0, chunk.num_bytes, piece_bytes):
                length = min(piece_bytes, chunk.num_bytes - offset)
                array = buffer.array
                if target is not None and length % PAGE_BYTES == 0:
                    array = target[offset : offset + length]
                file, meters = root / chunk.name, self._meters
                with span("read", drive=drive):
                    read_into(file, array, offset, length, meters=meters)
                yield array[:length]

    def checksum(self, root: Path, chunk: ChunkFile) -> int:
        """Returns the CRC-32C of a chunk's file below any root; blocks."""
        pieces = self._file_pieces(root, chunk, PIECE_BYTES)
        return crc32c_combine([(crc32c(raw), raw.size) for raw in pieces])

    def boxes(
        self,
        leaf: LeafRecord,
        state: StateRecord,
        max_elements: int,
        *,
        decoded: bool = True,
    ) -> Iterator[tuple[ChunkBox, Array]]:
        """Yields a leaf's state in boxes of at most so many elements, chunk by chunk.

        Blocks, and raises as `decoded_pieces`, before a chunk's last box.
        """
        read = self.decoded_pieces if decoded else self.stored_pieces
        dtype = dtype_of((state.decoded() if decoded else state).dtype)
        all_boxes = cut_portions(leaf.grid, max_elements)
        for number, boxes in itertools.groupby(all_boxes, key=lambda box: box.chunk):
            pieces = read(ChunkFile(-1, leaf, state, number))
            rest = np.empty(0, dtype)
            for box in boxes:
                out, done = np.empty(box.num_elements, dtype), 0
                while done < out.size:
                    if not rest.size:
                        rest = next(pieces).values
                    part = rest[: out.size - done]
                    out[done : done + part.size] = part
                    rest, done = rest[part.size :], done + part.size
                yield box, out.reshape(box.extent)
