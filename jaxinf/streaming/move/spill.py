"""Gradients that wait, in memory or in a file, as planned.

    put ─► memory, or file ─► read in order, ahead of who asks

Invariant: a gradient comes back with the same bits.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinf.streaming.move.scratch import Scratch, place_bytes
from jaxinf.streaming.program.graph import Piece
from jaxinf.transfer import aligned, page_ceil
from jaxinf.typing import Array


class Waiting(NamedTuple):
    """Gradients that wait for the last one of a step.

    Attributes:
      capacity_bytes: Memory for those that stay there.
      on_drive: The others, which go to a drive, and their bytes.
      num_reads: Number of times that each is read again.
    """

    capacity_bytes: int
    on_drive: Mapping[Piece, int]
    num_reads: int = 1


def waiting(
    sizes: Mapping[Piece, int], capacity_bytes: int, num_reads: int = 1
) -> Waiting:
    """Chooses the gradients that wait in memory: in their order, as there is room."""
    left_bytes, on_drive = capacity_bytes, dict[Piece, int]()
    for piece, num_bytes in sizes.items():
        if num_bytes > left_bytes:
            on_drive[piece] = num_bytes
        else:
            left_bytes -= num_bytes
    return Waiting(capacity_bytes, on_drive, num_reads)


def file_bytes(planned: Waiting) -> int:
    """Returns the bytes of all that go to the file, in whole pages."""
    return sum(map(page_ceil, planned.on_drive.values()))


class _OnDrive(NamedTuple):
    """The form of a gradient in the file."""

    shape: tuple[int, ...]
    dtype: Any


class Spill:
    """Holds gradients until they are dropped. Used from one thread at a time.

    An array that it returns stays valid for as long as someone refers to it.

    Args:
      scratch: Files for gradients that go to drives, closed with this.

    Attributes:
      kept_bytes: The most bytes in memory since `reset`.
      written_bytes: Bytes written to the file since then, in whole pages.
    """

    def __init__(self, scratch: Scratch, planned: Waiting) -> None:
        self._scratch, self.planned = scratch, planned
        own = planned.on_drive
        self._places = dict(zip(own, scratch.allocate(own.values()), strict=True))
        self._held: dict[Piece, jax.Array | Array | _OnDrive] = {}
        self.reset()

    def put(self, key: Piece, value: jax.Array | Array) -> None:
        """Takes a gradient; blocks while it is written.

        Raises:
          StoreSpaceError, StoreIOError: The drive is full, or failed.
        """
        assert key not in self._held, "a gradient leaves once"
        if key not in self._places:
            self._held[key] = value
            self._held_bytes += value.nbytes
            self.kept_bytes = max(self.kept_bytes, self._held_bytes)
            return
        parts, array = self._places[key], np.asarray(value, order="C")
        self._scratch.start_write(parts, array, key).result()
        self._held[key] = _OnDrive(array.shape, array.dtype)
        self.written_bytes += place_bytes(parts)

    def read(self, *, removes: bool = False) -> Iterator[tuple[Piece, Array]]:
        """Yields all gradients, in the order in which they came; reads ahead.

        Args:
          removes: Whether to drop each, so that it is read for the last time.
        """
        keys = [*self._held]
        to_read = deque(key for key in keys if key in self._places)
        sizes = {key: place_bytes(self._places[key]) for key in to_read}
        # One is read while another is used.
        room_bytes = 2 * max(sizes.values(), default=0)
        begun: deque[tuple[Array, Future[None]]] = deque()
        for key in keys:
            while to_read and sizes[to_read[0]] <= room_bytes:
                first = to_read.popleft()
                parts, memory = self._places[first], aligned(sizes[first])
                begun.append((memory, self._scratch.start_read(parts, memory, first)))
                room_bytes -= sizes[first]
            value = self._held.pop(key) if removes else self._held[key]
            if not isinstance(value, _OnDrive):
                self._held_bytes -= value.nbytes if removes else 0
                yield key, np.asarray(value)
                continue
            memory, is_read = begun.popleft()
            is_read.result()
            flat = np.frombuffer(memory, value.dtype, math.prod(value.shape))
            del memory
            yield key, flat.reshape(value.shape)
            del flat
            room_bytes += sizes[key]

    def reset(self) -> None:
        """Drops all gradients."""
        self._scratch.drop()
        self._held.clear()
        self._held_bytes = self.written_bytes = self.kept_bytes = 0

    def close(self) -> None:
        """Drops everything, and the file; idempotent."""
        self.reset()
        self._scratch.close()
