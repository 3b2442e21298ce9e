"""Gradients that wait, in memory or in a file, as planned.

    put ─► memory, or file ─► read in order, ahead of who asks ─► read, take

Invariant: a gradient comes back with the same bits. The file has no name, so it
disappears with the process, however that ends.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinf.streaming.move.scratch import Part, Scratch, place_bytes
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


class _Written(NamedTuple):
    """A gradient in the file."""

    parts: Sequence[Part]
    shape: tuple[int, ...]
    dtype: Any


class Spill:
    """Holds gradients by key until they are taken. Used from one thread at a time.

    An array that it returns stays valid for as long as someone refers to it.

    Args:
      scratch: Files for gradients that go to drives, closed with this.

    Attributes:
      kept_bytes: The most bytes in memory since `reset`.
      written_bytes: Bytes written to the file since then, in whole pages.
    """

    def __init__(self, scratch: Scratch, planned: Waiting) -> None:
        self._scratch, self.planned = scratch, planned
        self._held: dict[Piece, jax.Array | Array | _Written] = {}
        self._places: dict[Piece, Sequence[Part]] = {}
        self.reset()

    def put(self, key: Piece, value: jax.Array | Array) -> None:
        """Takes a gradient; blocks while it is written.

        One that was taken since `reset` and comes again has its old place in the file.

        Raises:
          StoreSpaceError, StoreIOError: The drive is full, or failed.
        """
        assert key not in self._held, "a gradient leaves once"
        if key not in self.planned.on_drive:
            self._held[key] = value
            self._held_bytes += value.nbytes
            self.kept_bytes = max(self.kept_bytes, self._held_bytes)
            return
        if key not in self._places:
            self._places[key] = self._scratch.allocate(value.nbytes)
            self._scratch.reserve()
        parts = self._places[key]
        array = np.asarray(value, order="C")
        _ended(self._scratch.start_write(parts, array, key))
        self._held[key] = _Written(parts, array.shape, array.dtype)
        self.written_bytes += place_bytes(parts)

    def __contains__(self, key: Piece) -> bool:
        return key in self._held

    def take(self, key: Piece) -> Array:
        """Returns and removes a gradient; blocks while it is read."""
        return next(self._read([key], removes=True))[1]

    def read(self, *, removes: bool = False) -> Iterator[tuple[Piece, Array]]:
        """Yields all gradients, in the order in which they came; reads ahead.

        Args:
          removes: Whether to drop each, so that it is read for the last time.
        """
        return self._read([*self._held], removes=removes)

    def _read(
        self, keys: Sequence[Piece], *, removes: bool
    ) -> Iterator[tuple[Piece, Array]]:
        held = [self._held[key] for key in keys]
        sizes = [place_bytes(x.parts) if isinstance(x, _Written) else 0 for x in held]
        # One is read while another is used.
        room_bytes, first = 2 * max(sizes, default=0), 0
        begun: deque[tuple[Array, list[Future[int]]]] = deque()
        for number, (key, value, num_bytes) in enumerate(
            zip(keys, held, sizes, strict=True)
        ):
            while first < len(keys) and sizes[first] <= room_bytes:
                if isinstance(one := held[first], _Written):
                    memory = aligned(sizes[first])
                    reads = self._scratch.start_read(one.parts, memory, keys[first])
                    begun.append((memory, reads))
                    room_bytes -= sizes[first]
                first += 1
            assert first > number, "there is room for the next one"
            if removes:
                del self._held[key]
            if not isinstance(value, _Written):
                self._held_bytes -= value.nbytes if removes else 0
                yield key, np.asarray(value)
                continue
            memory, reads = begun.popleft()
            _ended(reads)
            flat = np.frombuffer(memory, value.dtype, math.prod(value.shape))
            del memory
            yield key, flat.reshape(value.shape)
            del flat
            room_bytes += num_bytes

    def reset(self) -> None:
        """Drops all gradients and reuses the file's space."""
        self._scratch.drop()
        self._scratch.reset()
        self._held.clear()
        self._places.clear()
        self._held_bytes = self.written_bytes = self.kept_bytes = 0

    def close(self) -> None:
        """Drops everything, and the file; idempotent."""
        self.reset()
        self._scratch.close()


def _ended(moves: Sequence[Future[int]]) -> None:
    """Waits for all moves; raises the first error."""
    errors = [move.exception() for move in moves]
    for error in filter(None, errors):
        raise error
