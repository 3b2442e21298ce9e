"""The params of a step: read ahead of programs, or in memory.

    drive ─► buffer, which the device reads in place         a device with the host's
    drive ─► registered buffer ─► device                     … with memory of its own
    drive ─► buffer ─► pinned_host ─► device                 … that registers none

Invariant: reads are of the store's last finished step. A buffer is read into only when
no program, no copy and no update can still read it.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from jaxinf import compat
from jaxinf.engine import Engine, StateReader, average_states, put_together
from jaxinf.streaming.move.work_queues import MoveCounts, Uploads, WorkQueues
from jaxinf.streaming.plan.memory import READER_BYTES
from jaxinf.streaming.plan.reads import Fetch, Reading
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.meshes import default_device
from jaxinf.streaming.program.units import Unit, UnitOf, piece_sharding
from jaxinf.transfer import PAGE_BYTES, Buffer, BufferPool, aligned, span
from jaxinf.typing import Array

Hold: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Keeps an error of its context until all processes agree."""

AT_ONCE = frozenset({0})
"""States that each step writes in any case: programs read params from the drives."""


class MemoryParams:
    """Params that are all in memory, where someone else updates them."""

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

    def take(self, unit: Unit) -> None: ...
    def free(self, unit: Unit) -> None: ...
    def done(self, number: int) -> None: ...
    def free_idle(self) -> None: ...
    def rest(self) -> None: ...
    def close(self) -> None: ...


class StoreReader:
    """Reads units of the store's current step.

    Until the first of them are read, the store prefetches no state for updates, since
    programs wait for params first.

    Args:
      average: Whether they are of the params' average.
    """

    def __init__(self, engine: Engine, *, average: bool = False) -> None:
        self._engine, self._average = engine, average
        self._num_left = 0  # of the first
        self._reader: StateReader | None = None

    @property
    def version(self) -> tuple[int, int]:
        """What it reads: how often the store's contents were replaced, and its step.

        A store that restarts has each step number again, with other params.
        """
        return self._engine.num_replaced, self._engine.opened.finished.step

    def begin(self, num_first: int) -> None:
        """Begins a step, with room for so many units; no commit before it ends."""
        self.close()
        opened = self._engine.opened
        self._reader = StateReader(opened, READER_BYTES)
        opened.mover.write_at_once(AT_ONCE)
        self._num_left = num_first
        opened.mover.hold_prefetches(num_first > 0)

    def read(self, unit: Unit, shards: Sequence[Array]) -> None:
        """Fills arrays with a unit's shards; blocks.

        Chunks that another process holds are zeros.
        """
        reader, opened = self._reader, self._engine.opened
        assert reader is not None, "a step has begun"
        states = average_states(opened, unit.leaf) if self._average else (0,)
        with span("fetch"):
            parts = shards if unit.is_divided else [np.zeros(unit.shape, unit.dtype)]
            for box, part in zip(unit.boxes, parts, strict=True):
                if unit.is_shared:
                    part[...] = 0
                place = unit.in_leaf(box)
                reader.read(unit.leaf, part.reshape(place.shape), place.start, *states)
            if not unit.is_divided:
                for box, shard in zip(unit.shards, shards, strict=True):
                    shard[...] = parts[0][box.slices]
        self._num_left -= 1
        if not self._num_left:
            opened.mover.hold_prefetches(False)

    def close(self) -> None:
        """Frees its memory."""
        self._engine.opened.mover.hold_prefetches(False)
        if self._reader is not None:
            self._reader.close()
            self._reader = None


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
    is_there: bool = False
    is_held: bool = False
    is_complete: bool = False
    is_over: bool = False
    has_room: bool = False

    @property
    def shards(self) -> tuple[Array, ...]:
        """The unit's shards in the host's memory."""
        assert self.memory is not None, "it was read"
        return self.fetch.unit.views(self.memory.array)


class StoreParams:
    """Params of a store, for programs and for updates.

    Units are read in the order in which calls need them, so those that a call waits for
    always get room.

    Args:
      reading: The reads of each run. Of a device with memory of its own, `host_bytes`
        are for buffers; what is pinned is taken beside it.
      hold: Keeps an error of its context, until the processes of the run agree.
      are_frozen: Whether what stays is the same after a step of the store.
    """

    def __init__(
        self,
        unit_of: UnitOf,
        reader: StoreReader,
        reading: Reading,
        hold: Hold = nullcontext,
        *,
        are_frozen: bool = True,
    ) -> None:
        self.counts = MoveCounts()
        self._unit_of, self._reader = unit_of, reader
        self._reading, self._hold = reading, hold
        self._are_frozen = are_frozen
        self._version: tuple[int, int] | None = None  # of what stays
        self._device = default_device()
        self._has_link = reading.host_bytes is not None
        registry = compat.memory_registry(self._device) if self._has_link else None
        num_bytes = reading.host_bytes if self._has_link else reading.room_bytes
        self._pool = BufferPool(max(num_bytes or 0, PAGE_BYTES), registry=registry)
        self._device_bytes = reading.room_bytes  # that are free, of one with its own
        self._jobs = WorkQueues("jaxinf-fetch")
        self._changed = self._jobs.changed
        pinned_bytes = reading.largest_bytes
        self._uploads = Uploads(
            self._jobs, pins=registry is None, pinned_bytes=pinned_bytes
        )
        self._reads: dict[Fetch, _Read] = {}
        # The reads of a unit, in order; those that end with a call; and for an update.
        self._of_unit: defaultdict[Unit, list[Fetch]] = defaultdict(list)
        self._ends: defaultdict[int, list[Fetch]] = defaultdict(list)
        self._updates: dict[Unit, Fetch] = {}
        for fetch in reading.fetches:
            self._of_unit[fetch.unit].append(fetch)
            if not fetch.stays:
                self._ends[fetch.last].append(fetch)
            if fetch.gradient is not None:
                self._updates[fetch.unit] = fetch

    # --- a step --------------------------------------------------------------------

    def begin(self) -> None:
        """Starts to read."""
        self.stop()
        num_replaced, step = self._reader.version
        version = num_replaced, 0 if self._are_frozen else step
        self._forget(staying=version != self._version)
        self._version = version
        new = [fetch for fetch in self._reading.fetches if not self._has_stayed(fetch)]
        if not new:
            return
        self._reader.begin(self._reading.num_first(new))
        with self._changed:
            for fetch in new:
                read = _Read(fetch, is_held=fetch.gradient is not None)
                self._reads[fetch] = read
                self._jobs.submit(partial(self._read, read))

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
        """Returns a part of the params for the call of that number; blocks."""
        unit = self._unit_of(piece)
        fetch = next(one for one in self._of_unit[unit] if one.last >= number)
        read = self._reads[fetch]
        with self._hold():
            return self._part(unit, piece, self._got(read))
        # Others wait for the programs, and put a unit together once.
        if not read.is_complete:
            read.value = unit.on_devices(unit.views(aligned(unit.page_bytes)))
            read.is_complete = True
        return self._part(unit, piece, read.value)

    def _got(self, read: _Read) -> jax.Array:
        """Returns a unit; blocks until it is on the device.

        Raises:
          StoreIOError: The drive failed.
        """
        unit, counts = read.fetch.unit, self.counts
        counts.num_got += 1
        counts.num_ready += read.is_there
        if not read.is_there:
            with span("wait"):
                counts.waited_s += self._jobs.wait_for(lambda: read.is_there)
        if read.value is None:
            read.value = unit.on_devices(read.shards)
        elif unit.is_shared and self._has_link and not read.is_complete:
            read.value = put_together(read.value, donates=True)
        read.is_complete = True
        return read.value

    def _part(self, unit: Unit, piece: Piece, array: jax.Array) -> jax.Array:
        part = unit.part(piece)
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
        """Notes that a call has run; frees what no later call needs."""
        with self._changed:
            for fetch in self._ends.get(number, ()):
                self._release(self._reads[fetch])

    def stop(self) -> None:
        """Ends a run; no program may be in flight. What is under way is waited for."""
        self._uploads.drop()
        with self._changed:
            for read in [*self._reads.values()]:
                if not (read.is_there and read.fetch.stays):
                    read.is_held &= read.is_there
                    self._release(read)
        self._reader.close()

    def _forget(self, *, staying: bool) -> None:
        """Frees units that updates of a step have left, and those that stay."""
        for unit in self._updates:
            self.free(unit)
        with self._changed:
            for read in [*self._reads.values()]:
                if staying and read.fetch.stays:
                    self._release(read)

    def take(self, unit: Unit) -> Sequence[Array] | None:
        """Returns a unit's shards for its update; None if it has to read them.

        They stay until `free`. Those of a unit that the store does not move by shards
        are never given.
        """
        with self._changed:
            read = self._to_update(unit)
            return read.shards if read and read.is_there else None

    def free(self, unit: Unit) -> None:
        """Notes that a unit is updated."""
        with self._changed:
            if (read := self._to_update(unit)) is not None:
                read.is_held = False
                self._settle(read)

    def _to_update(self, unit: Unit) -> _Read | None:
        fetch = self._updates.get(unit)
        read = fetch and self._reads.get(fetch)
        return read if read and read.is_held else None

    def free_idle(self) -> None:
        """Frees memory that holds no params, as after the last read of a step."""
        self._pool.free_idle()

    def rest(self) -> None:
        """Frees the memory for reading until the next run."""
        self._forget(staying=True)
        self._pool.free_idle()

    def close(self) -> None:
        """Stops, and frees the memory for reading; idempotent."""
        self.stop()
        self.rest()
        self._jobs.close()
        self._pool.close()

    # --- memory; the caller has the lock -------------------------------------------

    def _release(self, read: _Read) -> None:
        """Notes that no call of this step, or of the next, reads a unit any more."""
        read.value, read.is_over = None, True
        if read.has_room:
            read.has_room = False
            self._device_bytes += read.fetch.unit.num_bytes
        self._settle(read)

    def _settle(self, read: _Read) -> None:
        """Frees memory that neither a device nor an update will read."""
        is_copied = read.is_there and self._has_link
        is_used = not (read.is_over or is_copied)
        if read.memory is not None and not (read.is_held or is_used):
            read.memory.release()
            read.memory = None
        if read.is_over and not read.is_held:
            self._reads.pop(read.fetch, None)
        self._changed.notify_all()

    # --- reads, and copies to the device; each waits for its memory, on a thread -----

    def _read(self, read: _Read) -> None:
        unit = read.fetch.unit

        def has_memory() -> bool:
            read.memory = self._pool.try_acquire(unit.page_bytes)
            return read.memory is not None

        self._jobs.wait_for(has_memory)
        self._reader.read(unit, read.shards)
        with self._changed:
            self.counts.num_read_bytes += unit.num_bytes
            read.is_there = not self._has_link
            self._settle(read)
            if self._has_link:
                self._jobs.submit(partial(self._upload, read), "to the device")

    def _upload(self, read: _Read) -> None:
        unit = read.fetch.unit
        with self._changed:
            self._jobs.wait_for(lambda: unit.num_bytes <= self._device_bytes)
            self._device_bytes -= unit.num_bytes
            read.has_room = True
        pairs = unit.places(read.shards, SingleDeviceSharding(self._device))
        self._uploads.start(pairs, partial(self._copied, read))

    def _copied(self, read: _Read, copies: Sequence[jax.Array]) -> None:
        with self._changed:
            read.value, read.is_there = read.fetch.unit.of_parts(copies), True
            self._settle(read)


Params: TypeAlias = MemoryParams | StoreParams
"""Where the params of programs come from."""
