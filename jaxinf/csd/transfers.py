"""Many short transfers in one native call, which releases the GIL once for all.

Invariant: effects, errors and counted bytes are those of `DirectIO`. It moves the
transfers that the native call leaves, and all of them without a compiler.
"""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxinf.io import Buffer, ByteMeters, DirectIO, page_ceil
from jaxinf.native import transfers as native


class Piece(NamedTuple):
    """A part of a file and of a buffer.

    Attributes:
      file: absolute path.
      buffer: page-aligned.
      buffer_offset_bytes, file_offset_bytes: multiples of the page.
      num_bytes: length; its last page in the buffer belongs to it alone.
    """

    file: Path
    buffer: Buffer
    buffer_offset_bytes: int
    file_offset_bytes: int
    num_bytes: int


class Transfers:
    """Moves pieces of the files under one directory. Thread-safe."""

    def __init__(self, root: Path, meters: ByteMeters) -> None:
        self._io = DirectIO(root, meters)
        self._meters = meters
        native.function()  # compiles it now if it is not in the cache

    @property
    def direct(self) -> bool:
        """Whether the file system supports direct I/O."""
        return self._io.direct

    def read(self, pieces: Sequence[Piece]) -> None:
        """Files → buffers; blocks.

        Raises:
          StoreIOError: as `DirectIO.read`.
        """
        for piece in self._left(pieces, writes=False):
            self._io.read(*_request(piece))

    def write(self, pieces: Sequence[Piece]) -> None:
        """Buffers → files, zeros behind each piece in its last page; blocks.

        Raises:
          StoreIOError, StoreSpaceError: as `DirectIO.write`.
        """
        for piece in self._left(pieces, writes=True):
            self._io.write(*_request(piece))

    def _left(self, pieces: Sequence[Piece], *, writes: bool) -> Sequence[Piece]:
        """Moves pieces by the native call; returns the others."""
        if not self._io.direct:
            return pieces
        places = array("q")
        for _, buffer, buffer_offset, file_offset, num_bytes in pieces:
            places.extend((buffer.address + buffer_offset, file_offset, num_bytes))
        done = native.move([piece.file for piece in pieces], places, writes=writes)
        if done is None:
            return pieces
        left, moved = [], sum(done)
        if pieces and min(done) < 0:
            left = [piece for piece, n in zip(pieces, done, strict=True) if n < 0]
            moved = sum([n for n in done if n > 0])
        if writes:
            self._meters.add(drive_write_bytes=moved)
        else:
            self._meters.add(drive_read_bytes=moved)
        return left


def _request(piece: Piece) -> tuple[Any, ...]:
    first = piece.buffer_offset_bytes
    memory = piece.buffer.array[first : first + page_ceil(piece.num_bytes)]
    return piece.file, memory, piece.file_offset_bytes, piece.num_bytes
