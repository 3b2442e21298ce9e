"""Gradients that wait, in memory or in a file, as planned.

    put ─► memory, or evict ─► file ─► load, in order, ahead of who asks ─► read, take

Invariant: a gradient comes back with the same bits. The file has no name, so it
disappears with the process, however that ends.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from jaxinf.streaming.move.mover import Mover
from jaxinf.streaming.move.scratch import Place, Scratch
from jaxinf.streaming.move.tensors import Evicted
from jaxinf.streaming.program.graph import Piece
from jaxinf.transfer.pages import page_ceil
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


class Spill:
    """Holds gradients by key until they are taken. Used from one thread at a time.

    An array that it returns stays valid for as long as someone refers to it.

    Args:
      scratch: Files for gradients that go to drives, closed with this.

    Attributes:
      written_bytes: Bytes written to the file since `reset`, in whole pages.
    """

    def __init__(self, scratch: Scratch, planned: Waiting) -> None:
        self._scratch = scratch
        self._mover = Mover(
            [1] * scratch.num_drives,
            has_link=False,
            read_bytes=0,
            name="jaxinf-gradients",
            reuses=False,
        )
        self.planned = planned
        self._held: dict[Piece, jax.Array | Array | Evicted] = {}
        self._places: dict[Piece, Place] = {}
        self._held_bytes = 0
        self.written_bytes = self.kept_bytes = 0

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
        place = self._places[key]
        array = np.asarray(value, order="C")
        gradient = Evicted(key, value=array, scratch=self._scratch, place=place)
        self._mover.evict(gradient)
        self._mover.wait_evicted(key)
        self._mover.release(key)
        self._held[key] = gradient
        self.written_bytes += place.num_bytes

    def __contains__(self, key: Piece) -> bool:
        return key in self._held

    def take(self, key: Piece) -> Array:
        """Returns and removes a gradient; blocks while it is read."""
        self._load([key])
        return self._take(key, removes=True)

    def read(self, *, removes: bool = False) -> Iterator[tuple[Piece, Array]]:
        """Yields the gradients in the order of `put`; reads the next one meanwhile."""
        keys = list(self._held)
        self._load(keys)
        return ((key, self._take(key, removes=removes)) for key in keys)

    def reset(self) -> None:
        """Drops all gradients and reuses the file's space."""
        self._held.clear()
        self._places.clear()
        self._mover.reset()
        self._scratch.reset()
        self._held_bytes = self.written_bytes = self.kept_bytes = 0

    def close(self) -> None:
        """Drops everything, and the file; idempotent."""
        self.reset()
        self._mover.close()
        self._scratch.close()

    def _load(self, keys: list[Piece]) -> None:
        """Starts to read those that are in the file."""
        held = [self._held[key] for key in keys]
        evicted = [one for one in held if isinstance(one, Evicted)]
        # One is read while another is used.
        self._mover.read_ahead(2 * max((one.host_bytes for one in evicted), default=0))
        self._mover.load(evicted)

    def _take(self, key: Piece, *, removes: bool) -> Array:
        held = self._held.pop(key) if removes else self._held[key]
        if isinstance(held, Evicted):
            found = self._mover.get(key)
            self._mover.release(key)
            return found
        if removes:
            self._held_bytes -= held.nbytes
        return np.asarray(held)
