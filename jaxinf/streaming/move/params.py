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
from jaxinf.streaming.plan.reads import Fetch, ReadPlan
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.units import ParamUnit, UnitOf, piece_sharding
from jaxinf.transfer import Buffer, allocate_pages, span
from jaxinf.typing import Array

WRITTEN_THROUGH = frozenset({0})
"""States that each step writes in any case: programs read params from the drives."""

_READ, _COPY = Queue("params in"), Queue("params that wait for the device")

ReadUnit: TypeAlias = Callable[[ParamUnit, Sequence[Array]], None]
"""Fills arrays with a unit's shards; blocks."""


@contextmanager
def read_units(
    engine: Engine, num_first: int, *, average: bool = False
) -> Iterator[ReadUnit]:
    """Reads units of the store's current step; there is no commit before it ends.

    The store prefetches no state for updates until the first `num_first` units are
    read, since programs wait for params first. Chunks that another process holds are
    zeros.
    """
    files, num_left = engine.files, num_first
    reader = StateReader(files, READER_BYTES)
    files.mover.write_through(WRITTEN_THROUGH)
    files.mover.hold_prefetches(num_first > 0)

    def read(unit: ParamUnit, shards: Sequence[Array]) -> None:
        nonlocal num_left
        states = average_states(files, unit.leaf) if average else (0,)
        with span("fetch"):
            whole = [] if unit.moves_by_shard else [np.zeros(unit.shape, unit.dtype)]
            for box, array in zip(unit.stored_boxes, whole or shards, strict=True):
                if unit.needs_assembly:
                    array[...] = 0
                place = unit.in_leaf(box)
                reader.read(unit.leaf, array.reshape(place.shape), place.start, *states)
            for array in whole:
                for box, shard in zip(unit.shards, shards, strict=True):
                    shard[...] = array[box.slices]
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

    The device's memory    read from the drive    on the device             first `get`
    the host's             memory, is_ready                                 value
    its own                memory                 copied, is_ready          value

    Attributes:
      memory: Memory of the host, until the device or the update has the unit.
      copied: This process's shards, on a device with memory of its own.
      value: The unit on the device, with the shards of all processes.
      is_ready: Whether the unit is where the device reads it.
      device_bytes: Room of a device with memory of its own, from the copy on.
    """

    fetch: Fetch
    memory: Buffer | None = None
    copied: jax.Array | None = None
    value: jax.Array | None = None
    is_ready: bool = False
    device_bytes: int = 0

    @property
    def shards(self) -> tuple[Array, ...]:
        assert self.memory is not None, "it was read"
        return self.fetch.unit.shard_views(self.memory.array)


class ParamReader:
    """Reads the params of a store, for programs and for updates.

    Units are read in the order in which calls need them, so a unit that a call waits
    for always gets room.

    Args:
      unit_of: The units that are read; None for params in memory.
      begin_reads: Begins the reads of a step, of which so many have room at first.
      planned: The reads of each run. On the host of a device with memory of its own,
        `host_bytes` are for buffers; pinned memory is taken beside them.
      keep_errors: Keeps an error of its context, until the processes of the run agree.
      version: Returns a version of the store's contents; units kept under another are
        dropped.

    Attributes:
      used: The units that each call of this run has used.
      num_gets, num_hits: Number of `get` calls, and of those that did not wait.
    """

    def __init__(
        self,
        unit_of: UnitOf | None,
        begin_reads: Callable[[int], AbstractContextManager[ReadUnit]],
        planned: ReadPlan,
        jobs: WorkQueues,
        keep_errors: Callable[[], AbstractContextManager[None]] = nullcontext,
        version: Callable[[], Any] = lambda: 0,
    ) -> None:
        self.read_bytes = self.num_gets = self.num_hits = 0
        self.waited_s, self.used = 0.0, set[tuple[int, ParamUnit]]()
        self._unit_of, self._begin_reads = unit_of, begin_reads
        self._planned, self._keep_errors = planned, keep_errors
        self._version, self._staying_version = version, None
        self._step = ExitStack()
        self._jobs, self._changed = jobs, jobs.changed
        self._has_link = planned.host_bytes is not None
        self.buffers = HostBuffers(
            jobs,
            "params",
            planned.room_bytes if planned.host_bytes is None else planned.host_bytes,
            has_link=self._has_link,
            pinned_bytes=planned.largest_bytes,
        )
        self._free_device_bytes = planned.room_bytes  # if it has memory of its own
        self._reads: dict[Fetch, _Read] = {}  # for calls
        self._for_updates: dict[ParamUnit, _Read] = {}
        self._fetches_of: defaultdict[ParamUnit, list[Fetch]] = defaultdict(list)
        self._ending: defaultdict[int, list[Fetch]] = defaultdict(list)  # by call
        for fetch in planned.fetches:
            self._fetches_of[fetch.unit].append(fetch)
            if not fetch.spans_steps:
                self._ending[fetch.last].append(fetch)

    # --- a step --------------------------------------------------------------------

    def begin(self) -> None:
        """Starts to read; the run before was stopped."""
        self.read_bytes = self.num_gets = self.num_hits = 0
        self.used.clear()
        self.waited_s, version = 0.0, self._version()
        self._drop_units(including_staying=version != self._staying_version)
        self._staying_version = version
        unread = [x for x in self._planned.fetches if not self._reuse_staying(x)]
        if not unread:
            return
        begun = self._begin_reads(self._planned.num_first(unread))
        read_unit = self._step.enter_context(begun)
        with self._changed:
            for fetch in unread:
                read = self._reads[fetch] = _Read(fetch)
                if fetch.gradient is not None:
                    self._for_updates[fetch.unit] = read
                self._jobs.submit(partial(self._read, read, read_unit), _READ)

    def _reuse_staying(self, fetch: Fetch) -> bool:
        """Reuses the previous step's last read of the unit, if it stayed in memory."""
        fetches = self._fetches_of[fetch.unit]
        if fetch is not fetches[0] or fetches[-1] not in self._reads:
            return False
        read = self._reads.pop(fetches[-1])
        read.fetch = fetch
        self._reads[fetch] = read
        return True

    @property
    def reused_bytes(self) -> int:
        """Bytes that calls found in memory, because an earlier call had used them."""
        used_bytes = sum(unit.num_bytes for _, unit in self.used)
        return max(0, used_bytes - self.read_bytes)

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_gets if self.num_gets else 1.0

    def get(self, number: int, piece: Piece) -> jax.Array:
        """Returns a piece of the params for the call of that number; blocks."""
        assert self._unit_of is not None, "params are not in memory"
        unit = self._unit_of(piece)
        self.used.add((number, unit))
        fetch = next(x for x in self._fetches_of[unit] if x.last >= number)
        read = self._reads[fetch]
        with self._keep_errors():
            self._await(read)
        if read.value is None:
            # The read failed, and the error is kept. The others wait for this process
            # in collectives, to assemble the unit and in programs; these run on zeros.
            zeros = unit.shard_views(allocate_pages(unit.page_bytes))
            read.value = unit.on_devices(zeros)
        return self._piece_of(unit, piece, read.value)

    def _await(self, read: _Read) -> None:
        """Blocks until a unit is on the device, with the shards of all processes."""
        unit = read.fetch.unit
        self.num_gets += 1
        self.num_hits += read.is_ready
        if not read.is_ready:
            with span("wait"):
                self.waited_s += self._jobs.wait_for(lambda: read.is_ready)
        copied, read.copied = read.copied, None
        if read.value is not None:
            return
        if copied is None:
            read.value = unit.on_devices(read.shards)
        else:
            is_part = unit.needs_assembly
            read.value = assemble_shards(copied, donates=True) if is_part else copied

    def _piece_of(self, unit: ParamUnit, piece: Piece, array: jax.Array) -> jax.Array:
        piece = unit.piece_within(piece)
        if not piece.index and not piece.rows:
            return array
        if unit.sharding is None:
            return piece.of(array)
        for number in piece.index:
            array = lax.index_in_dim(array, number, keepdims=False)
        if piece.rows is not None:
            array = lax.slice_in_dim(array, *piece.rows)
        return jax.device_put(array, piece_sharding(unit.sharding, piece))

    def after_call(self, number: int) -> None:
        """Frees what no call after this one needs."""
        with self._changed:
            for fetch in self._ending.get(number, ()):
                self._end_read(self._reads[fetch])

    def stop(self) -> None:
        """Ends a run; no program and no job of params may be under way."""
        with self._changed:
            for read in [*self._reads.values()]:
                unit = read.fetch.unit
                if not read.is_ready and self._for_updates.get(unit) is read:
                    del self._for_updates[unit]
                if not (read.is_ready and read.fetch.spans_steps):
                    self._end_read(read)
        self._step.close()

    def _drop_units(self, *, including_staying: bool) -> None:
        with self._changed:
            for unit in [*self._for_updates]:
                self.end_update(unit)
            for read in [*self._reads.values()] if including_staying else ():
                self._end_read(read)

    def shards_for_update(self, unit: ParamUnit) -> Sequence[Array] | None:
        """Returns a unit's shards until `end_update`; None if the update reads them."""
        with self._changed:
            read = self._for_updates.get(unit)
            return read.shards if read and read.is_ready else None

    def end_update(self, unit: ParamUnit) -> None:
        with self._changed:
            if (read := self._for_updates.pop(unit, None)) is not None:
                self._free_unused_memory(read)

    def free_memory(self) -> None:
        """Frees the memory for reading until the next run."""
        self._drop_units(including_staying=True)
        self.buffers.free_idle()

    def close(self) -> None:
        self.stop()
        self.free_memory()
        self.buffers.close()

    # --- memory; the caller has the lock -------------------------------------------

    def _end_read(self, read: _Read) -> None:
        """Drops a unit that no call of this step, or of the next, reads any more."""
        read.copied = read.value = None
        self._reads.pop(read.fetch, None)
        self._free_device_bytes += read.device_bytes
        read.device_bytes = 0
        self._free_unused_memory(read)

    def _free_unused_memory(self, read: _Read) -> None:
        """Frees the host's memory of a unit if no device and no update will read it."""
        fetch, is_copied = read.fetch, read.is_ready and self._has_link
        is_for_calls = self._reads.get(fetch) is read and not is_copied
        is_for_update = self._for_updates.get(fetch.unit) is read
        if read.memory is not None and not (is_for_update or is_for_calls):
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
            self.read_bytes += unit.num_bytes
            read.is_ready = not self._has_link
            self._free_unused_memory(read)
            if self._has_link:
                self._jobs.submit(partial(self._copy_to_device, read), _COPY)

    def _copy_to_device(self, read: _Read) -> None:
        unit = read.fetch.unit
        with self._changed:
            self._jobs.wait_for(lambda: unit.num_bytes <= self._free_device_bytes)
            self._free_device_bytes -= unit.num_bytes
            read.device_bytes = unit.num_bytes
        sharding = SingleDeviceSharding(self.buffers.device)
        transfers = unit.placements(read.shards, sharding)
        self.buffers.start_copy(transfers, partial(self._note_copied, read))

    def _note_copied(self, read: _Read, copies: Sequence[jax.Array]) -> None:
        with self._changed:
            read.copied, read.is_ready = read.fetch.unit.from_copies(copies), True
            self._free_unused_memory(read)
