"""Reads of params from a store, a unit at a time.

Invariant: they are of the store's last finished step.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from jaxinf.engine import Engine, ParamsReader
from jaxinf.streaming.program.units import Unit
from jaxinf.transfer import span
from jaxinf.typing import Array


class StoreReader:
    """Reads units of the store's current step.

    Until the first of them are read, the store prefetches no state for updates, since
    programs wait for params first.

    Args:
      memory_bytes: Memory for reads, beside the units.
    """

    def __init__(
        self, engine: Engine, memory_bytes: int, *, average: bool = False
    ) -> None:
        self._engine = engine
        self._open = partial(ParamsReader, memory_bytes=memory_bytes, average=average)
        self._num_first = self._num_read = 0
        self._reader: ParamsReader | None = None

    @property
    def version(self) -> tuple[int, int]:
        """What it reads: how often the store's contents were replaced, and its step.

        A store that restarts has each step number again, with other params.
        """
        return self._engine.num_replaced, self._engine.opened.finished.step

    def begin(self, num_first: int) -> None:
        """Begins a step; there is no commit before it ends.

        Args:
          num_first: Number of units that have room when it begins.
        """
        self.close()
        self._reader = self._open(self._engine.opened)
        self._num_first, self._num_read = num_first, 0
        self._engine.opened.mover.hold_prefetches(num_first > 0)

    def read(self, unit: Unit, shards: Sequence[Array]) -> None:
        """Fills arrays with a unit's shards; blocks."""
        assert self._reader is not None
        opened = self._engine.opened
        name = opened.directory.manifest.leaves[unit.leaf].name
        with span("fetch", (name, *unit.place[1:]), num_bytes=unit.num_bytes):
            _read(self._reader, unit, shards)
        self._num_read += 1
        if self._num_read == self._num_first:
            opened.mover.hold_prefetches(False)

    def close(self) -> None:
        """Frees its memory."""
        self._engine.opened.mover.hold_prefetches(False)
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _read(reader: ParamsReader, unit: Unit, shards: Sequence[Array]) -> None:
    """Reads a unit; chunks that another process holds are zeros."""
    parts = shards if unit.is_divided else [np.zeros(unit.shape, unit.dtype)]
    for box, part in zip(unit.boxes, parts, strict=True):
        if unit.is_shared:
            part[...] = 0
        reader.read(unit.leaf, part.reshape(unit.extent_of(box)), unit.origin_of(box))
    if not unit.is_divided:
        for box, shard in zip(unit.shards, shards, strict=True):
            shard[...] = parts[0][box.slices]
