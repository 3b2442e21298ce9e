"""Gradients that wait for the last one of a step: in memory, and beyond it on drives.

Invariant: gradients come back with their bits, in the order in which they came. Those
that are read ahead take no more memory than the largest.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxinf.streaming.move.scratch import (
    ScratchFiles,
    ScratchRun,
    array_in,
    padded_bytes,
)
from jaxinf.streaming.move.work_queues import WorkQueues
from jaxinf.streaming.program.graph import Piece
from jaxinf.transfer import allocate_pages, page_ceil
from jaxinf.typing import Array


def beyond_memory(
    sizes: Mapping[Piece, int], capacity_bytes: int
) -> Mapping[Piece, int]:
    """Returns the gradients that wait on drives, and their bytes.

    A gradient waits in memory if those before it have left room.
    """
    free_bytes, on_drives = capacity_bytes, dict[Piece, int]()
    for piece, num_bytes in sizes.items():
        if num_bytes > free_bytes:
            on_drives[piece] = num_bytes
        else:
            free_bytes -= num_bytes
    return on_drives


def file_bytes(on_drives: Mapping[Piece, int]) -> int:
    """Returns the bytes of gradients that wait on drives, in whole pages."""
    return sum(map(page_ceil, on_drives.values()))


@dataclass(frozen=True)
class Spill:
    """Holds gradients until they are dropped. Used from one thread at a time.

    An array that it returns stays valid for as long as someone refers to it.

    Attributes:
      places: The gradients that go to drives, and their runs there.
      held: Gradients in memory; shapes and dtypes of those on drives.
    """

    jobs: WorkQueues
    scratch: ScratchFiles
    places: Mapping[Piece, Sequence[ScratchRun]]
    held: dict[Piece, Array | jax.ShapeDtypeStruct] = field(default_factory=dict)

    def put(self, piece: Piece, gradient: Array) -> int:
        """Takes a gradient; blocks while it is written. Returns the bytes written."""
        assert piece not in self.held, "a gradient leaves once"
        runs = self.places.get(piece)
        if runs is None:
            self.held[piece] = gradient
            return 0
        array = np.asarray(gradient, order="C")
        self.scratch.start(self.jobs, self.scratch.write, runs, array)()
        self.held[piece] = jax.ShapeDtypeStruct(array.shape, array.dtype)
        return padded_bytes(runs)

    def read(self, *, removes: bool = False) -> Iterator[tuple[Piece, Array]]:
        """Yields all gradients in the order of their arrival; `removes` drops each."""
        pieces, scratch = [*self.held], self.scratch
        unread = deque(piece for piece in pieces if piece in self.places)
        sizes = {piece: padded_bytes(self.places[piece]) for piece in unread}
        free_bytes = max(sizes.values(), default=0)
        reads: deque[tuple[Array, Callable[[], object]]] = deque()
        for piece in pieces:
            while unread and sizes[unread[0]] <= free_bytes:
                ahead = unread.popleft()
                runs, memory = self.places[ahead], allocate_pages(sizes[ahead])
                wait = scratch.start(self.jobs, scratch.read, runs, memory)
                reads.append((memory, wait))
                free_bytes -= sizes[ahead]
            gradient = self.held.pop(piece) if removes else self.held[piece]
            if not isinstance(gradient, jax.ShapeDtypeStruct):
                yield piece, np.asarray(gradient)
                continue
            memory, wait = reads.popleft()
            wait()
            yield piece, array_in(memory, gradient)
            del memory
            free_bytes += sizes[piece]
