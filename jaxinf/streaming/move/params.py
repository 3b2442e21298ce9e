"""The params of a step: read ahead of the programs, or in memory.

    drive ─► buffer, which the device reads in place         a device with the host's
    drive ─► registered buffer ─► device                     … with memory of its own
    drive ─► buffer ─► pinned_host ─► device                 … that registers none

Invariant: reads are of the store's last finished step. A buffer is read into only when
no program, no copy and no update can still read it.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from jaxinf import compat
from jaxinf.engine import (
    Engine,
    ParamsReader,
    put_together,
)
from jaxinf.streaming.move.mover import Mover, MoverCounts
from jaxinf.streaming.move.tensors import Crossing, Moved
from jaxinf.streaming.plan.group_step import GroupStep
from jaxinf.streaming.plan.reads import Fetch, Reading
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.meshes import piece_sharding
from jaxinf.streaming.program.units import StoreUnits, Unit
from jaxinf.transfer import span
from jaxinf.transfer.pool import aligned
from jaxinf.typing import Array


class Params(ABC):
    """Where the params of programs come from."""

    counts: MoverCounts

    @abstractmethod
    def begin(self) -> None:
        """Gets ready for a run of programs."""

    @abstractmethod
    def get(self, number: int, piece: Piece) -> jax.Array:
        """Returns a part of the params for the call of that number; blocks."""

    @abstractmethod
    def stop(self) -> None:
        """Ends a run; no program may be in flight."""

    # What is all in memory has nothing to do for these, and updates it elsewhere.

    def take(self, unit: Unit) -> Sequence[Array] | None:
        """Returns a unit's shards for its update; None if it has to read them.

        They stay until `free`. Those of a unit that the store does not move by shards
        are never given.
        """
        return None

    def free(self, unit: Unit) -> None:
        """Notes that a unit is updated."""

    def done(self, number: int) -> None:
        """Notes that a call has run; frees what no later call needs."""

    def rest(self) -> None:
        """Frees the memory for reading until the next run."""

    def close(self) -> None:
        """Stops, and frees the memory for reading; idempotent."""


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


@dataclass(eq=False, kw_only=True)
class _Fetched(Moved):
    """A unit on its way to the device, or to one like it."""

    unit: Unit
    reader: StoreReader
    device: Any
    is_complete: bool = False

    def queue(self, part: int) -> int:
        return 0

    def read(self, part: int, out: Array) -> int:
        self.reader.read(self.unit, self.unit.views(out))
        return self.unit.num_bytes

    def in_place(self, raw: Array) -> jax.Array:
        return on_host_devices(self.unit, self.unit.views(raw))

    def crossing(self, source: Any) -> Crossing:
        own = SingleDeviceSharding(self.device)
        return self.unit.places(self.unit.views(source), own)

    def landed(self, arrays: Sequence[jax.Array]) -> jax.Array:
        return self.unit.of_parts(arrays)

    def completed(self, value: jax.Array) -> jax.Array:
        if self.unit.is_shared and self.device_bytes and not self.is_complete:
            value = put_together(value, donates=True)
        self.is_complete = True
        return value


def on_host_devices(unit: Unit, shards: Sequence[Array]) -> jax.Array:
    """Puts shards on devices that read them in place; see `Unit.put_together`."""
    if unit.is_shared:
        return unit.put_together(shards)
    return unit.on_devices(shards)


class StoreParams(Params):
    """Params of a store, for programs and for updates.

    Units are read in the order in which calls need them, so those that a call waits for
    always get room.

    Args:
      reading: The reads of each run. Of a device with memory of its own, its host's
        memory is for buffers: two of the largest unit, and room for the units that wait
        for their update. A third one is taken beside it, pinned.
      are_frozen: Whether what stays is the same after a step of the store.
    """

    def __init__(
        self,
        store_units: StoreUnits,
        reader: StoreReader,
        reading: Reading,
        device: Any,
        together: GroupStep | None = None,
        *,
        are_frozen: bool = True,
    ) -> None:
        self.counts = MoverCounts()
        self._reading, self._are_frozen = reading, are_frozen
        self._version: tuple[int, int] | None = None  # of what stays
        self._together = together or GroupStep()
        self._store_units, self._reader, self._device = store_units, reader, device
        room_bytes, host_bytes = reading.room_bytes, reading.host_bytes
        self._has_link = has_link = host_bytes is not None
        self._mover = Mover(
            [1],
            has_link=has_link,
            read_bytes=room_bytes if host_bytes is None else host_bytes,
            device_bytes=room_bytes,
            pinned_bytes=reading.largest_bytes,
            registry=compat.memory_registry(device) if has_link else None,
            name="jaxinf-fetch",
        )
        self._fetches = reading.fetches
        self._lasts: dict[Unit, list[int]] = {}  # of its fetches, in order
        self._ends: dict[int, list[tuple[Unit, int]]] = {}  # by their last call
        for fetch in self._fetches:
            self._lasts.setdefault(fetch.unit, []).append(fetch.last)
            if not fetch.stays:
                self._ends.setdefault(fetch.last, []).append((fetch.unit, fetch.last))
        self._updates = {
            one.unit: (one.unit, one.last)
            for one in self._fetches
            if one.gradient is not None
        }

    def begin(self) -> None:
        """Starts to read."""
        self._free_updates()
        self.stop()
        num_replaced, step = self._reader.version
        version = num_replaced, 0 if self._are_frozen else step
        if version != self._version:
            self._drop_staying()
            self._version = version
        new = [fetch for fetch in self._fetches if not self._has_stayed(fetch)]
        if new:
            self._reader.begin(self._reading.num_first(new))
            self._mover.load(map(self._fetched, new))

    def _has_stayed(self, fetch: Fetch) -> bool:
        """Whether a unit's first read is that of the step before."""
        first, last = self._lasts[fetch.unit][0], self._lasts[fetch.unit][-1]
        if fetch.last != first:
            return False
        keys = (fetch.unit, last), (fetch.unit, first)
        return self._mover.keep(*keys, stays=fetch.stays)

    def _drop_staying(self) -> None:
        for fetch in self._fetches:
            if fetch.stays:
                self._mover.drop((fetch.unit, fetch.last))

    def _fetched(self, fetch: Fetch) -> _Fetched:
        unit = fetch.unit
        return _Fetched(
            (unit, fetch.last),
            num_parts=1,
            host_bytes=unit.page_bytes,
            device_bytes=unit.num_bytes if self._has_link else 0,
            is_held=fetch.gradient is not None,
            stays=fetch.stays,
            unit=unit,
            reader=self._reader,
            device=self._device,
        )

    def get(self, number: int, piece: Piece) -> jax.Array:
        unit = self._store_units.unit(piece)
        lasts = self._lasts[unit]
        key = (unit, lasts[bisect_left(lasts, number)])
        with self._together.holding():
            return self._part(unit, piece, self._mover.get(key))
        # Others wait for the programs.
        array = on_host_devices(unit, unit.views(aligned(unit.held_bytes)))
        return self._part(unit, piece, array)

    def _part(self, unit: Unit, piece: Piece, array: jax.Array) -> jax.Array:
        part = self._store_units.part(unit, piece)
        if not part.index and not part.rows:
            return array
        if unit.sharding is None:
            return part.of(array)
        for number in part.index:
            array = lax.index_in_dim(array, number, keepdims=False)
        if part.rows is not None:
            array = lax.slice_in_dim(array, *part.rows)
        return jax.device_put(array, piece_sharding(unit.sharding, part))

    def done(self, number: int) -> None:
        for key in self._ends.get(number, ()):
            self._mover.release(key)

    def stop(self) -> None:
        self._mover.reset()
        self.counts.add(self._mover.take_counts())
        self._reader.close()

    def take(self, unit: Unit) -> Sequence[Array] | None:
        key = self._updates.get(unit)
        memory = None if key is None else self._mover.held(key)
        return None if memory is None else unit.views(memory)

    def free(self, unit: Unit) -> None:
        if unit in self._updates:
            self._mover.free(self._updates[unit])

    def _free_updates(self) -> None:
        """Frees units that updates of a step have left, which was given up."""
        for key in self._updates.values():
            self._mover.free(key)

    @property
    def held_bytes(self) -> int:
        """Memory of the host for reading that is held now."""
        return self._mover.held_bytes

    def rest(self) -> None:
        self._free_updates()
        self._drop_staying()
        self._mover.rest()

    def close(self) -> None:
        self.stop()
        self._free_updates()
        self._drop_staying()
        self._mover.close()


class MemoryParams(Params):
    """Params that are all in memory."""

    def __init__(self, leaves: Callable[[], Sequence[Any]]) -> None:
        self._leaves = leaves
        self._held: Sequence[Any] = ()
        self.counts = MoverCounts()

    def begin(self) -> None:
        self._held = self._leaves()

    def get(self, number: int, piece: Piece) -> jax.Array:
        leaf = self._held[piece.leaf]
        return piece.of(leaf) if piece.index or piece.rows else leaf

    def stop(self) -> None:
        self._held = ()
