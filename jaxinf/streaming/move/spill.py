"""Gradients that wait for the last one of a step: in memory, and beyond it on drives.

Invariant: what waits comes back with its bits, in the order in which it came. What is
read ahead takes as much memory as the largest gradient.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Set

import jax
import numpy as np

from jaxinf.streaming.move.scratch import (
    Scratch,
    ScratchRun,
    array_in,
    place_bytes,
)
from jaxinf.streaming.program.graph import Piece
from jaxinf.transfer import aligned, page_ceil
from jaxinf.typing import Array


def beyond_memory(
    sizes: Mapping[Piece, int], capacity_bytes: int
) -> Mapping[Piece, int]:
    """Returns the gradients that wait on drives, and their bytes.

    The others wait in memory: in their order, as there is room.
    """
    left_bytes, on_drives = capacity_bytes, dict[Piece, int]()
    for piece, num_bytes in sizes.items():
        if num_bytes > left_bytes:
            on_drives[piece] = num_bytes
        else:
            left_bytes -= num_bytes
    return on_drives


def file_bytes(on_drives: Mapping[Piece, int]) -> int:
    """Returns the bytes of all that wait on drives, in whole pages."""
    return sum(map(page_ceil, on_drives.values()))


class Spill:
    """Holds gradients until they are dropped. Used from one thread at a time.

    An array that it returns stays valid for as long as someone refers to it.

    Args:
      scratch: Files for gradients that go to drives, closed with this.
      on_drives: These, and their bytes.

    Attributes:
      kept_bytes: The most bytes in memory since `reset`.
      written_bytes: Bytes written to the file since then, in whole pages.
    """

    def __init__(self, scratch: Scratch, on_drives: Mapping[Piece, int]) -> None:
        self._scratch, self._places = scratch, scratch.allocate(on_drives)
        # Arrays; of those on a drive shapes and dtypes.
        self._held: dict[Piece, jax.Array | Array | jax.ShapeDtypeStruct] = {}
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
        left = self._scratch.start(self._scratch.write, parts, array)
        self._scratch.jobs.wait_for(lambda: not left)
        self._held[key] = jax.ShapeDtypeStruct(array.shape, array.dtype)
        self.written_bytes += place_bytes(parts)

    def read(self, *, removes: bool = False) -> Iterator[tuple[Piece, Array]]:
        """Yields all gradients, in the order in which they came.

        Args:
          removes: Whether to drop each, so that it is read for the last time.
        """
        keys = [*self._held]
        to_read = deque(key for key in keys if key in self._places)
        sizes = {key: place_bytes(self._places[key]) for key in to_read}
        room_bytes = max(sizes.values(), default=0)
        begun: deque[tuple[Array, Set[ScratchRun]]] = deque()
        for key in keys:
            while to_read and sizes[to_read[0]] <= room_bytes:
                first = to_read.popleft()
                parts, memory = self._places[first], aligned(sizes[first])
                begun.append(
                    (memory, self._scratch.start(self._scratch.read, parts, memory))
                )
                room_bytes -= sizes[first]
            value = self._held.pop(key) if removes else self._held[key]
            if not isinstance(value, jax.ShapeDtypeStruct):
                self._held_bytes -= value.nbytes if removes else 0
                yield key, np.asarray(value)
                continue
            memory, left = begun.popleft()
            self._scratch.jobs.wait_for(lambda left=left: not left)
            yield key, array_in(memory, value)
            del memory
            room_bytes += sizes[key]

    def reset(self) -> None:
        """Drops all gradients."""
        self._scratch.jobs.reset()
        self._held.clear()
        self._held_bytes = self.written_bytes = self.kept_bytes = 0

    def close(self) -> None:
        """Drops everything, and the file; idempotent."""
        self.reset()
        self._scratch.close()
