"""The params of a step: read ahead of the programs, or in memory.

    drive ─► buffer, which the device reads in place         a device with the host's
    drive ─► registered buffer ─► device                     … with memory of its own
    drive ─► buffer ─► pinned_host ─► device                 … that registers none

Invariant: reads are of the store's last finished step. A buffer is read into only when
no program, no copy and no update can still read it.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import SingleDeviceSharding

from jaxinf import compat
from jaxinf.engine import put_together
from jaxinf.streaming.move.reader import StoreReader
from jaxinf.streaming.move.uploads import Uploads
from jaxinf.streaming.move.workers import Dropped, MoveCounts, Workers
from jaxinf.streaming.plan.group_step import GroupStep
from jaxinf.streaming.plan.reads import Fetch, Reading
from jaxinf.streaming.program.graph import Piece, piece_sharding
from jaxinf.streaming.program.units import StoreUnits, Unit
from jaxinf.transfer import PAGE_BYTES, Buffer, BufferPool, aligned, span
from jaxinf.typing import Array


class Params(ABC):
    """Where the params of programs come from."""

    counts: MoveCounts

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


@dataclass(eq=False)
class _Read:
    """A read of a unit, which may serve its update, and calls of the next step.

    Attributes:
      fetch: The calls that it serves.
      memory: Memory of the host, until the device or the update has the unit.
      value: The unit on the device.
      is_there: Whether it is on the device, or where the device reads it.
      is_held: Whether its update will take the memory.
      is_complete: Whether other processes' parts are in `value`.
      is_over: Whether no call reads it any more.
      has_room: Whether it has room in a device with memory of its own.
    """

    fetch: Fetch
    memory: Buffer | None = None
    value: jax.Array | None = None
    error: BaseException | None = None
    is_read: bool = False
    is_there: bool = False
    is_held: bool = False
    is_complete: bool = False
    is_over: bool = False
    has_room: bool = False

    @property
    def is_ready(self) -> bool:
        return self.is_there or self.error is not None


def _on_host_devices(unit: Unit, shards: Sequence[Array]) -> jax.Array:
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
        self.counts = MoveCounts()
        self._reading, self._are_frozen = reading, are_frozen
        self._version: tuple[int, int] | None = None  # of what stays
        self._together = together or GroupStep()
        self._store_units, self._reader, self._device = store_units, reader, device
        room_bytes, host_bytes = reading.room_bytes, reading.host_bytes
        self._has_link = host_bytes is not None
        self._device_bytes = room_bytes  # that are free, of a device with its own
        registry = compat.memory_registry(device) if self._has_link else None
        self._pool = BufferPool(
            max(room_bytes if host_bytes is None else host_bytes, PAGE_BYTES),
            registry=registry,
        )
        self._uploads = Uploads(
            is_registered=registry is not None, pinned_bytes=reading.largest_bytes
        )
        self._workers = Workers([1], "jaxinf-fetch")
        self._changed = self._workers.changed
        self._reads: dict[Fetch, _Read] = {}
        self._to_copy: deque[_Read] = deque()
        self._of_unit: dict[Unit, list[Fetch]] = {}  # in order
        self._ends: dict[int, list[Fetch]] = {}  # by their last call
        for fetch in reading.fetches:
            self._of_unit.setdefault(fetch.unit, []).append(fetch)
            if not fetch.stays:
                self._ends.setdefault(fetch.last, []).append(fetch)
        self._updates = {
            fetch.unit: fetch for fetch in reading.fetches if fetch.gradient is not None
        }

    # --- a step --------------------------------------------------------------------

    def begin(self) -> None:
        """Starts to read."""
        self._free_updates()
        self.stop()
        num_replaced, step = self._reader.version
        version = num_replaced, 0 if self._are_frozen else step
        if version != self._version:
            self._drop_staying()
            self._version = version
        new = [fetch for fetch in self._reading.fetches if not self._has_stayed(fetch)]
        if not new:
            return
        self._reader.begin(self._reading.num_first(new))
        reads = [_Read(one, is_held=one.gradient is not None) for one in new]
        self._reads.update((one.fetch, one) for one in reads)
        if self._has_link:
            self._to_copy.extend(reads)
        self._workers.submit(0, partial(self._read_all, reads))

    def _has_stayed(self, fetch: Fetch) -> bool:
        """Whether a unit's first read is that of the step before."""
        own = self._of_unit[fetch.unit]
        if fetch is not own[0] or own[-1] not in self._reads:
            return False
        read = self._reads.pop(own[-1])
        read.fetch = fetch
        self._reads[fetch] = read
        return True

    def get(self, number: int, piece: Piece) -> jax.Array:
        unit = self._store_units.unit(piece)
        fetch = next(one for one in self._of_unit[unit] if one.last >= number)
        with self._together.holding():
            return self._part(unit, piece, self._got(self._reads[fetch]))
        # Others wait for the programs.
        array = _on_host_devices(unit, unit.views(aligned(unit.held_bytes)))
        return self._part(unit, piece, array)

    def _got(self, read: _Read) -> jax.Array:
        """Returns a unit; blocks until it is on the device.

        Raises:
          StoreIOError: The drive failed. Other units still come.
        """
        unit, counts = read.fetch.unit, self.counts
        counts.num_got += 1
        counts.num_ready += read.is_ready
        began_s = time.perf_counter()
        with span("wait", "jaxinf-fetch"), self._changed:
            self._changed.wait_for(lambda: read.is_ready)
            counts.waited_s += time.perf_counter() - began_s
        if read.error is not None:
            raise read.error
        if read.value is None:
            read.value = _on_host_devices(unit, unit.views(_memory_of(read)))
        elif unit.is_shared and self._has_link and not read.is_complete:
            read.value = put_together(read.value, donates=True)
        read.is_complete = True
        return read.value

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
        with self._changed:
            for fetch in self._ends.get(number, ()):
                self._release(self._reads[fetch])

    def stop(self) -> None:
        self._workers.reset()
        self._to_copy.clear()
        self._uploads.drop()
        with self._changed:
            for read in [*self._reads.values()]:
                if not (read.is_there and read.fetch.stays):
                    read.is_held &= read.is_there
                    self._release(read)
        self._reader.close()

    def take(self, unit: Unit) -> Sequence[Array] | None:
        with self._changed:
            read = self._to_update(unit)
            is_there = read is not None and read.is_there
            return unit.views(_memory_of(read)) if read and is_there else None

    def free(self, unit: Unit) -> None:
        with self._changed:
            if (read := self._to_update(unit)) is not None:
                read.is_held = False
                self._settle(read)

    def _to_update(self, unit: Unit) -> _Read | None:
        fetch = self._updates.get(unit)
        read = None if fetch is None else self._reads.get(fetch)
        return read if read is not None and read.is_held else None

    @property
    def held_bytes(self) -> int:
        """Memory of the host for reading that is held now."""
        return self._pool.held_bytes

    def rest(self) -> None:
        self._free_updates()
        self._drop_staying()
        self._pool.free_idle()

    def close(self) -> None:
        self.stop()
        self.rest()
        self._workers.close()
        self._uploads.close()
        self._pool.close()

    # --- memory --------------------------------------------------------------------

    def _release(self, read: _Read) -> None:
        """Notes that no call of this step, or of the next, reads a unit any more."""
        read.value, read.is_over = None, True
        if read.has_room:
            read.has_room = False
            self._device_bytes += read.fetch.unit.num_bytes
            self._upload()
        self._settle(read)

    def _settle(self, read: _Read) -> None:
        """Frees memory that neither a device nor an update will read."""
        is_copied = read.is_there and self._has_link
        is_used = not (read.is_over or is_copied or read.error is not None)
        if read.memory is not None and not (read.is_held or is_used):
            read.memory.release()
            read.memory = None
        if read.is_over and not read.is_held:
            self._reads.pop(read.fetch, None)
        self._changed.notify_all()

    def _free_updates(self) -> None:
        """Frees units that updates of a step have left, which was given up."""
        for unit in self._updates:
            self.free(unit)

    def _drop_staying(self) -> None:
        with self._changed:
            for read in [*self._reads.values()]:
                if read.fetch.stays:
                    self._release(read)

    # --- on threads ----------------------------------------------------------------

    def _read_all(self, reads: Sequence[_Read]) -> None:
        for read in reads:
            unit = read.fetch.unit
            try:
                with self._changed:
                    self._workers.wait(partial(self._take_memory, read))
                self._reader.read(unit, unit.views(_memory_of(read)))
            except Dropped:
                return
            except BaseException as error:  # others still come
                read.error = error
            with self._changed:
                if read.error is None:
                    self.counts.num_read_bytes += unit.num_bytes
                    read.is_read, read.is_there = True, not self._has_link
                else:
                    read.is_held = False
                self._settle(read)
                self._upload()

    def _take_memory(self, read: _Read) -> bool:
        read.memory = self._pool.acquire(read.fetch.unit.page_bytes, block=False)
        return read.memory is not None

    def _upload(self) -> None:
        """Starts to copy units in order, as each is read and the device has room."""
        own = SingleDeviceSharding(self._device)
        while self._to_copy:
            read, unit = self._to_copy[0], self._to_copy[0].fetch.unit
            if read.error is None:
                if not read.is_read or unit.num_bytes > self._device_bytes:
                    return
                self._device_bytes -= unit.num_bytes
                read.has_room = True
                pairs = unit.places(unit.views(_memory_of(read)), own)
                self._uploads.start(pairs, partial(self._copied, read), unit.place)
            self._to_copy.popleft()

    def _copied(
        self, read: _Read, copies: Sequence[jax.Array], error: BaseException | None
    ) -> None:
        with self._changed:
            read.error, read.is_there = error, error is None
            if error is None:
                read.value = read.fetch.unit.of_parts(copies)
            else:
                read.is_held = False
            self._settle(read)


def _memory_of(read: _Read) -> Array:
    assert read.memory is not None, "it was read"
    return read.memory.array


class MemoryParams(Params):
    """Params that are all in memory."""

    def __init__(self, leaves: Callable[[], Sequence[Any]]) -> None:
        self._leaves = leaves
        self._held: Sequence[Any] = ()
        self.counts = MoveCounts()

    def begin(self) -> None:
        self._held = self._leaves()

    def get(self, number: int, piece: Piece) -> jax.Array:
        leaf = self._held[piece.leaf]
        return piece.of(leaf) if piece.index or piece.rows else leaf

    def stop(self) -> None:
        self._held = ()
