"""Spills values from the device to memory, and beyond its capacity to a file.

Invariant: a value comes back with the same bits. The file has no name, so it disappears
with the process, however that ends.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxinf.io import ByteMeters
from jaxinf.io.failures import translated
from jaxinf.stream.graph import Piece
from jaxinf.typing import Array

__all__ = ["Spill"]

_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class _OnFile:
    """The place of a value in the file."""

    offset_bytes: int
    shape: tuple[int, ...]
    dtype: np.dtype


class Spill:
    """Holds values by key until they are taken. Used from one thread.

    Args:
      folder: A folder on a drive with room for values that do not fit into memory.
      capacity_bytes: Capacity in memory.
      meters: Counters of the bytes on the drive.

    Attributes:
      written_bytes: Bytes written to the file since `reset`.
      kept_bytes: Bytes kept in memory since `reset`.
    """

    def __init__(
        self, folder: Path, capacity_bytes: int, meters: ByteMeters | None = None
    ) -> None:
        self._folder = folder
        self._meters = ByteMeters() if meters is None else meters
        self._capacity_bytes = capacity_bytes
        self._held: dict[Piece, jax.Array | Array | _OnFile] = {}
        self._held_bytes = 0
        self._file: int | None = None
        self.written_bytes = self.kept_bytes = 0

    def put(self, key: Piece, value: jax.Array | Array) -> None:
        """Takes a value; blocks while it is written.

        Raises:
          StoreSpaceError, StoreIOError: The drive is full, or failed.
        """
        assert key not in self._held, "a value leaves once"
        if self._held_bytes + value.nbytes <= self._capacity_bytes:
            self._held[key] = value
            self._held_bytes += value.nbytes
            self.kept_bytes += value.nbytes
            return
        self._held[key] = self._write(np.asarray(value, order="C"))

    def take(self, key: Piece) -> Array:
        """Returns and removes a value; blocks while it is read."""
        held = self._held.pop(key)
        if isinstance(held, _OnFile):
            return self._read(held)
        self._held_bytes -= held.nbytes
        return np.asarray(held)

    def pieces(self) -> list[Piece]:
        """Keys of the values, in the order of `put`."""
        return list(self._held)

    def reset(self) -> None:
        """Drops all values and reuses the file's space."""
        self._held.clear()
        self._held_bytes = self.written_bytes = self.kept_bytes = 0

    def close(self) -> None:
        """Drops everything, and the file; idempotent."""
        self.reset()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, value: Array) -> _OnFile:
        place = _OnFile(self.written_bytes, value.shape, value.dtype)
        raw = value.reshape(-1).view(np.uint8)
        with translated("spilling a gradient", self._folder):
            if self._file is None:
                descriptor, name = tempfile.mkstemp(prefix="spill-", dir=self._folder)
                os.unlink(name)
                self._file = descriptor
            for start in range(0, raw.size, _PIECE_BYTES):
                piece = raw[start : start + _PIECE_BYTES].data
                while piece:
                    at = place.offset_bytes + start
                    count = os.pwrite(self._file, piece, at)
                    piece, start = piece[count:], start + count
        self.written_bytes += raw.size
        self._meters.add(drive_write_bytes=raw.size)
        return place

    def _read(self, place: _OnFile) -> Array:
        assert self._file is not None
        out = np.empty(place.shape, place.dtype)
        raw = out.reshape(-1).view(np.uint8)
        with translated("reading a spilled gradient", self._folder):
            done = 0
            while done < raw.size:
                piece = raw[done : done + _PIECE_BYTES]
                count = os.preadv(self._file, [piece.data], place.offset_bytes + done)
                if not count:
                    raise OSError("the file ends before the value does")
                done += count
        self._meters.add(drive_read_bytes=raw.size)
        return out
