"""The params of a step in a store: read ahead of programs, which wait for them.

    drive ─► buffer ─► a program, on the device ─► the update near storage

Invariant: reads are of the store's last finished step. A buffer is read into only when
no program, no copy and no update can still read it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from jaxinf.engine import Engine, StateReader, assemble_shards, average_states
from jaxinf.streaming.move.host_buffers import HostBuffers
from jaxinf.streaming.move.work_queues import Queue, WorkQueues
from jaxinf.streaming.plan.memory import READER_BYTES
from jaxinf.streaming.plan.reads import Fetch, ParamReads
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.units import ParamUnit, UnitOf, piece_sharding
from jaxinf.transfer import Buffer, allocate_pages, span
from jaxinf.typing import Array

KeepErrors: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Keeps an error of its context until all processes agree."""

AT_ONCE = frozenset({0})
"""States that each step writes in any case: programs read params from the drives."""

_READ, _COPY = Queue("params in"), Queue("params that wait for the device")

ReadUnit: TypeAlias = Callable[[ParamUnit, Sequence[Array]], None]
"""Fills arrays with a unit's shards; blocks."""


@contextmanager
def read_units(
    engine: Engine, num_first: int, *, average: bool = False
) -> Iterator[ReadUnit]:
    """Reads units of the store's current step; there is no commit before it ends.

    Until the first of them are read, the store prefetches no state for updates, since
    programs wait for params first. Chunks that another process holds are zeros.

    Args:
      num_first: Number of units that have room when a step begins.
      average: Whether they are of the params' average.
    """
    files, num_left = engine.files, num_first
    reader = StateReader(files, READER_BYTES)
    files.mover.write_through(AT_ONCE)
    files.mover.hold_prefetches(num_first > 0)

    def read(unit: ParamUnit, shards: Sequence[Array]) -> None:
        nonlocal num_left
        states = average_states(files, unit.leaf) if average else (0,)
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
        num_left -= 1
        if not num_left:
            files.mover.hold_prefetches(False)

    try:
        yield read
    finally:
        files.mover.hold_prefetches(False)
        reader.close()


@dataclass(eq=False)
class _Read:
    """A read of a unit, which may serve its update, and calls of the next step.

    Attributes:
      fetch: The calls that it serves.
      memory: Memory of the host, until the device or the update has the unit.
      value: The unit on the device.
      is_there: Whether it is on the device, or where the device reads it.
      is_complete: Whether other processes' parts are in `value`.
      has_room: Whether it has room in a device with memory of its own.
    """

    fetch: Fetch
    memory: Buffer | None = None
    value: jax.Array | None = None
    is_there: bool = False
    is_complete: bool = False
    has_room: bool = False

    @property
    def shards(self) -> tuple[Array, ...]:
        """The unit's shards in the host's memory."""
        assert self.memory is not None, "it was read"
        return self.fetch.unit.views(self.memory.array)


class ParamReader:
    """Reads the params of a store, for programs and for updates.

    Units are read in the order in which calls need them, so those that a call waits for
    always get room.

    Args:
      unit_of: The units that are read; None if none is, of params in memory.
      reads: Begins to read for a step, with room for so many units at first.
      reading: The reads of each run. Of a device with memory of its own, `host_bytes`
        are for buffers; what is pinned is taken beside it.
      jobs: Read and copy params; when a step is given up, they are reset before this
        is stopped.
      keep_errors: Keeps an error of its context, until the processes of the run agree.
      version: Says of which contents of the store units are that stay.

    Attributes:
      buffers: Memory of the host for params.
      num_read_bytes: Bytes that this run has read.
      used: Numbers of its calls, with the units that each has used.
      num_got, num_ready: Number of parts that calls got, and of those that were there.
      waited_s: Time that calls waited for the others.
    """

    def __init__(
        self,
        unit_of: UnitOf | None,
        reads: Callable[[int], AbstractContextManager[ReadUnit]],
        reading: ParamReads,
        jobs: WorkQueues,
        keep_errors: KeepErrors = nullcontext,
        version: Callable[[], Any] = lambda: 0,
    ) -> None:
        self.num_read_bytes = self.num_got = self.num_ready = 0
        self.waited_s, self.used = 0.0, set[tuple[int, ParamUnit]]()
        self._unit_of, self._begin_reads = unit_of, reads
        self._reading, self._keep_errors = reading, keep_errors
        self._version, self._staying = version, None  # the version of what stays
        self._step = ExitStack()
        self._jobs, self._changed = jobs, jobs.changed
        self._has_link = reading.host_bytes is not None
        self.buffers = HostBuffers(
            jobs,
            "params",
            reading.room_bytes if reading.host_bytes is None else reading.host_bytes,
            has_link=self._has_link,
            pinned_bytes=reading.largest_bytes,
        )
        self._device_bytes = reading.room_bytes  # that are free, of one with its own
        self._reads: dict[Fetch, _Read] = {}  # which calls use
        self._held: dict[ParamUnit, _Read] = {}  # whose memory updates will take
        # The reads of a unit, in order; and those that end with a call.
        self._of_unit: defaultdict[ParamUnit, list[Fetch]] = defaultdict(list)
        self._ends: defaultdict[int, list[Fetch]] = defaultdict(list)
        for fetch in reading.fetches:
            self._of_unit[fetch.unit].append(fetch)
            if not fetch.stays:
                self._ends[fetch.last].append(fetch)

    # --- a step --------------------------------------------------------------------

    def begin(self) -> None:
        """Starts to read; the run before was stopped."""
        self.num_read_bytes = self.num_got = self.num_ready = 0
        self.used.clear()
        self.waited_s, version = 0.0, self._version()
        self._forget(staying=version != self._staying)
        self._staying = version
        new = [fetch for fetch in self._reading.fetches if not self._has_stayed(fetch)]
        if not new:
            return
        begun = self._begin_reads(self._reading.num_first(new))
        read_unit = self._step.enter_context(begun)
        with self._changed:
            for fetch in new:
                read = self._reads[fetch] = _Read(fetch)
                if fetch.gradient is not None:
                    self._held[fetch.unit] = read
                self._jobs.submit(partial(self._read, read, read_unit), _READ)

    def _has_stayed(self, fetch: Fetch) -> bool:
        """Whether a unit's first read is that of the step before."""
        own = self._of_unit[fetch.unit]
        if fetch is not own[0] or own[-1] not in self._reads:
            return False
        read = self._reads.pop(own[-1])
        read.fetch = fetch
        self._reads[fetch] = read
        return True

    @property
    def found_bytes(self) -> int:
        """Bytes that calls found in memory, since one before had used them."""
        used_bytes = sum(unit.num_bytes for _, unit in self.used)
        return max(0, used_bytes - self.num_read_bytes)

    @property
    def hit_rate(self) -> float:
        """Share of the parts that were there when calls got them."""
        return self.num_ready / self.num_got if self.num_got else 1.0

    def get(self, number: int, piece: Piece) -> jax.Array:
        """Returns a part of the params for the call of that number; blocks."""
        assert self._unit_of is not None, "params are not in memory"
        unit = self._unit_of(piece)
        self.used.add((number, unit))
        fetch = next(one for one in self._of_unit[unit] if one.last >= number)
        read = self._reads[fetch]
        with self._keep_errors():
            self._await(read)
        # Others wait for the programs, and put a unit together once.
        if not read.is_complete:
            read.value = unit.on_devices(unit.views(allocate_pages(unit.page_bytes)))
            read.is_complete = True
        assert read.value is not None
        return self._part(unit, piece, read.value)

    def _await(self, read: _Read) -> None:
        """Blocks until a unit is on the device, with the parts of all processes.

        Raises:
          StoreIOError: The drive failed.
        """
        unit = read.fetch.unit
        self.num_got += 1
        self.num_ready += read.is_there
        if not read.is_there:
            with span("wait"):
                self.waited_s += self._jobs.wait_for(lambda: read.is_there)
        if read.value is None:
            read.value = unit.on_devices(read.shards)
        elif unit.is_shared and self._has_link and not read.is_complete:
            read.value = assemble_shards(read.value, donates=True)
        read.is_complete = True

    def _part(self, unit: ParamUnit, piece: Piece, array: jax.Array) -> jax.Array:
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
        """Ends a run; no program and no job of params may be under way."""
        with self._changed:
            for read in [*self._reads.values()]:
                unit = read.fetch.unit
                if not read.is_there and self._held.get(unit) is read:
                    del self._held[unit]
                if not (read.is_there and read.fetch.stays):
                    self._release(read)
        self._step.close()

    def _forget(self, *, staying: bool) -> None:
        """Frees units that updates of a step have left, and those that stay."""
        with self._changed:
            for unit in [*self._held]:
                self.free(unit)
            for read in [*self._reads.values()] if staying else ():
                self._release(read)

    def take(self, unit: ParamUnit) -> Sequence[Array] | None:
        """Returns a unit's shards for its update; None if it has to read them.

        They stay until `free`. Those of a unit that the store does not move by shards
        are never given.
        """
        with self._changed:
            read = self._held.get(unit)
            return read.shards if read and read.is_there else None

    def free(self, unit: ParamUnit) -> None:
        """Notes that a unit is updated."""
        with self._changed:
            if (read := self._held.pop(unit, None)) is not None:
                self._settle(read)

    def free_memory(self) -> None:
        """Frees the memory for reading until the next run."""
        self._forget(staying=True)
        self.buffers.free_idle()

    def close(self) -> None:
        """Stops, and frees the memory for reading; idempotent."""
        self.stop()
        self.free_memory()
        self.buffers.close()

    # --- memory; the caller has the lock -------------------------------------------

    def _release(self, read: _Read) -> None:
        """Notes that no call of this step, or of the next, reads a unit any more."""
        read.value = None
        self._reads.pop(read.fetch, None)
        if read.has_room:
            read.has_room = False
            self._device_bytes += read.fetch.unit.num_bytes
        self._settle(read)

    def _settle(self, read: _Read) -> None:
        """Frees memory that neither a device nor an update will read."""
        fetch, is_copied = read.fetch, read.is_there and self._has_link
        is_used = self._reads.get(fetch) is read and not is_copied
        is_held = self._held.get(fetch.unit) is read
        if read.memory is not None and not (is_held or is_used):
            read.memory.release()
            read.memory = None
        self._changed.notify_all()

    # --- reads, and copies to the device; each waits for its memory, on a thread -----

    def _read(self, read: _Read, read_unit: ReadUnit) -> None:
        unit = read.fetch.unit

        def has_memory() -> bool:
            read.memory = self.buffers.try_acquire(unit.page_bytes)
            return read.memory is not None

        self._jobs.wait_for(has_memory)
        read_unit(unit, read.shards)
        with self._changed:
            self.num_read_bytes += unit.num_bytes
            read.is_there = not self._has_link
            self._settle(read)
            if self._has_link:
                self._jobs.submit(partial(self._upload, read), _COPY)

    def _upload(self, read: _Read) -> None:
        unit = read.fetch.unit
        with self._changed:
            self._jobs.wait_for(lambda: unit.num_bytes <= self._device_bytes)
            self._device_bytes -= unit.num_bytes
            read.has_room = True
        pairs = unit.places(read.shards, SingleDeviceSharding(self.buffers.device))
        self.buffers.start_copy(pairs, partial(self._copied, read))

    def _copied(self, read: _Read, copies: Sequence[jax.Array]) -> None:
        with self._changed:
            read.value, read.is_there = read.fetch.unit.of_parts(copies), True
            self._settle(read)
