"""Spills values from the device to memory, and beyond its capacity to a file.

Invariant: a value comes back with the same bits. The file has no name, so it disappears
with the process, however that ends.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxinf.io import ByteMeters
from jaxinf.streaming.move.scratch import Place, Scratch, aligned, raw_bytes
from jaxinf.streaming.plan.forms import PART_BYTES
from jaxinf.streaming.program.graph import Piece
from jaxinf.typing import Array

__all__ = ["Spill"]


@dataclass(frozen=True)
class _OnFile:
    """A value in the file."""

    place: Place
    shape: tuple[int, ...]
    dtype: np.dtype


class Spill:
    """Holds values by key until they are taken. Used from one thread.

    Args:
      folder: A folder on a drive with room for values that do not fit into memory.
      capacity_bytes: Capacity in memory.
      meters: Counters of the bytes on the drive.

    Attributes:
      capacity_bytes: Capacity in memory.
      written_bytes: Bytes written to the file since `reset`, in whole pages.
      kept_bytes: Most bytes kept in memory since `reset`.
    """

    def __init__(
        self, folder: Path, capacity_bytes: int, meters: ByteMeters | None = None
    ) -> None:
        self._scratch = Scratch([folder], meters, content="gradients")
        self._bounce: Array | None = None
        self.capacity_bytes = capacity_bytes
        self._held: dict[Piece, jax.Array | Array | _OnFile] = {}
        self._places: dict[Piece, Place] = {}
        self._held_bytes = 0
        self.written_bytes = self.kept_bytes = 0

    def put(self, key: Piece, value: jax.Array | Array) -> None:
        """Takes a value; blocks while it is written.

        One that was taken since `reset` and comes again has its old place in the file.

        Raises:
          StoreSpaceError, StoreIOError: The drive is full, or failed.
        """
        assert key not in self._held, "a value leaves once"
        if self._held_bytes + value.nbytes <= self.capacity_bytes:
            self._held[key] = value
            self._held_bytes += value.nbytes
            self.kept_bytes = max(self.kept_bytes, self._held_bytes)
            return
        self._held[key] = self._write(key, np.asarray(value, order="C"))

    def __contains__(self, key: Piece) -> bool:
        return key in self._held

    def take(self, key: Piece) -> Array:
        """Returns and removes a value; blocks while it is read."""
        held = self._held.pop(key)
        if isinstance(held, _OnFile):
            return self._read(held)
        self._held_bytes -= held.nbytes
        return np.asarray(held)

    def look(self, key: Piece) -> Array:
        """Returns a value, which stays; blocks while it is read."""
        held = self._held[key]
        return self._read(held) if isinstance(held, _OnFile) else np.asarray(held)

    def pieces(self) -> list[Piece]:
        """Keys of the values, in the order of `put`."""
        return list(self._held)

    def reset(self) -> None:
        """Drops all values and reuses the file's space."""
        self._held.clear()
        self._places.clear()
        self._scratch.reset()
        self._held_bytes = self.written_bytes = self.kept_bytes = 0

    def close(self) -> None:
        """Drops everything, and the file; idempotent."""
        self.reset()
        self._bounce = None
        self._scratch.close()

    def _write(self, key: Piece, value: Array) -> _OnFile:
        if key not in self._places:
            self._places[key] = self._scratch.allocate(value.nbytes)
            self._scratch.reserve()
        place = self._places[key]
        if self._bounce is None:
            self._bounce = aligned(PART_BYTES)
        for part in place.parts:
            self._scratch.write(part, raw_bytes(value), self._bounce)
        self.written_bytes += place.num_bytes
        return _OnFile(place, value.shape, value.dtype)

    def _read(self, held: _OnFile) -> Array:
        memory = aligned(held.place.num_bytes)
        for part in held.place.parts:
            self._scratch.read(part, memory)
        num_bytes = held.dtype.itemsize * int(np.prod(held.shape, dtype=np.int64))
        return memory[:num_bytes].view(held.dtype).reshape(held.shape)
