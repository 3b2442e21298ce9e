"""Gradients that wait for the last one of a step: in memory, and beyond it on drives.

Invariant: what waits comes back with its bits, in the order in which it came. What is
read ahead takes as much memory as the largest gradient.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxinf.streaming.move.scratch import (
    Scratch,
    ScratchRun,
    array_in,
    place_bytes,
)
from jaxinf.streaming.move.work_queues import WorkQueues
from jaxinf.streaming.program.graph import Piece
from jaxinf.transfer import allocate_pages, page_ceil
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


@dataclass(frozen=True)
class Spill:
    """Holds gradients until they are dropped. Used from one thread at a time.

    An array that it returns stays valid for as long as someone refers to it.

    Attributes:
      scratch: Files for gradients that go to drives.
      places: Where those are.
      held: What waits; of gradients on drives shapes and dtypes.
    """

    jobs: WorkQueues
    scratch: Scratch
    places: Mapping[Piece, Sequence[ScratchRun]]
    held: dict[Piece, Array | jax.ShapeDtypeStruct] = field(default_factory=dict)

    def put(self, key: Piece, value: Array) -> int:
        """Takes a gradient; blocks while it is written, and returns these bytes.

        Raises:
          StoreSpaceError, StoreIOError: The drive is full, or failed.
        """
        assert key not in self.held, "a gradient leaves once"
        parts = self.places.get(key)
        if parts is None:
            self.held[key] = value
            return 0
        array = np.asarray(value, order="C")
        self.scratch.start(self.jobs, self.scratch.write, parts, array)()
        self.held[key] = jax.ShapeDtypeStruct(array.shape, array.dtype)
        return place_bytes(parts)

    def read(self, *, removes: bool = False) -> Iterator[tuple[Piece, Array]]:
        """Yields all gradients, in the order in which they came.

        Args:
          removes: Whether to drop each, so that it is read for the last time.
        """
        keys, scratch = [*self.held], self.scratch
        to_read = deque(key for key in keys if key in self.places)
        sizes = {key: place_bytes(self.places[key]) for key in to_read}
        room_bytes = max(sizes.values(), default=0)
        begun: deque[tuple[Array, Callable[[], object]]] = deque()
        for key in keys:
            while to_read and sizes[to_read[0]] <= room_bytes:
                first = to_read.popleft()
                parts, memory = self.places[first], allocate_pages(sizes[first])
                wait = scratch.start(self.jobs, scratch.read, parts, memory)
                begun.append((memory, wait))
                room_bytes -= sizes[first]
            value = self.held.pop(key) if removes else self.held[key]
            if not isinstance(value, jax.ShapeDtypeStruct):
                yield key, np.asarray(value)
                continue
            memory, wait = begun.popleft()
            wait()
            yield key, array_in(memory, value)
            del memory
            room_bytes += sizes[key]
