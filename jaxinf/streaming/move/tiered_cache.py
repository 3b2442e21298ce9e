"""Values that leave a device with memory of its own for the host, and some for drives.

    device ─► pinned host memory ─► gone         memory of the device is free from here
                │  └─► drive ─► buffer            … read ahead as far as there is room …
                └───────────────┴─► back ─► take  … to `bring`; release ends it

Each way has a queue: the copies out, those back, and one for each drive. What is next
in which queue follows from the states of the values, under one lock.

Invariant: the host's memory stays within what the caller gives, however fast the
drives are. A value comes back with the bits that it left with, but for the low ones if
it was coded.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxinf.io import BufferPool
from jaxinf.io.buffers import Buffer
from jaxinf.io.pages import PAGE_BYTES
from jaxinf.streaming.move.cache import THREADS_PER_DRIVE, CacheCounts
from jaxinf.streaming.move.scratch import Part, Place, Scratch, aligned, raw_bytes
from jaxinf.streaming.move.workers import Job, Workers
from jaxinf.streaming.plan.forms import PART_BYTES
from jaxinf.streaming.plan.tiers import NUM_COPIES
from jaxinf.typing import Array

__all__ = ["TieredCache"]

_PINNED = "pinned_host"


@dataclass(eq=False)
class _Entry:
    """A value that is leaving, away, or on its way back.

    Attributes:
      place: Its place on drives; None if it stays on the host.
      aval: Its shape and dtype.
      sharding: Its place on the device.
      value: The value on the device, until it is copied to the host.
      host: Its copy on the host, until that is written or copied back.
      written: Its parts, as they were written.
      num_parts: Number of its parts that are still to be moved.
      buffer: Memory into which it is read.
      is_due: Whether the device has memory for it again.
      is_forwarded: Whether it comes back from the host, although it goes to a drive.
      is_returning: Whether its copy back has been submitted.
      is_back: Whether that has ended.
      on_device: The value, until it is taken.
      error: What prevented it from being read.
    """

    place: Place | None
    aval: Any
    sharding: Any
    value: Any = None
    host: Any = None
    written: list[Part] = field(default_factory=list)
    num_parts: int = 0
    buffer: Buffer | None = None
    is_due: bool = False
    is_forwarded: bool = False
    is_returning: bool = False
    is_back: bool = False
    on_device: Any = None
    error: BaseException | None = None

    @property
    def is_written(self) -> bool:
        """Whether all of it is on drives."""
        return self.place is not None and len(self.written) == len(self.place.parts)

    @property
    def leaving_bytes(self) -> int:
        """Memory of the host on its way to drives."""
        return 0 if self.place is None else NUM_COPIES * self.place.memory_bytes


class TieredCache:
    """Moves values to the host, to drives and back. Used from one thread.

    Args:
      scratch: The files.
      avals: Shapes and dtypes of the values that may leave.
      places: Places of those of them that go on to drives, in the order in which they
        are needed again. The others stay on the host, and the caller counts them.
      leaving_bytes: Memory of the host for values on their way to drives, `NUM_COPIES`
        times that of each.
      buffer_bytes: The most memory for those that are read ahead; see `advance`.
    """

    def __init__(
        self,
        scratch: Scratch,
        avals: Mapping[Any, Any],
        places: Mapping[Any, Place],
        leaving_bytes: int,
        buffer_bytes: int,
    ) -> None:
        self._scratch = scratch
        self._avals = avals
        self._places = places
        self._leaving_bytes = self._leaving_room = leaving_bytes
        self._pool = BufferPool(max(buffer_bytes, PAGE_BYTES))
        self._read_room = 0
        drives = [THREADS_PER_DRIVE] * scratch.num_drives
        self._out, self._back = len(drives), len(drives) + 1
        self._workers = Workers([*drives, 1, 1], ("write", "read", "out", "back"))
        self._changed = self._workers.changed
        self._entries: dict[Any, _Entry] = {}
        self._leaving: deque[_Entry] = deque()
        self._ahead = deque(places)
        self._error: BaseException | None = None
        self.counts = CacheCounts()

    def leave(self, key: Any, value: jax.Array) -> None:
        """Starts copying a value, which may still be computed; does not block.

        The caller drops its own reference by `gone`. The value must not change until
        then.
        """
        place = self._places.get(key)
        entry = _Entry(place, self._avals[key], value.sharding, value)
        with self._changed:
            self._entries[key] = entry
            self._leaving.append(entry)
            self._advance()

    def gone(self, key: Any) -> None:
        """Blocks until a value is on the host, and nothing here holds it on the device.

        Raises:
          StoreSpaceError, StoreIOError: A drive is full, or failed.
        """
        entry = self._entries[key]
        self._await(lambda: entry.value is None)

    def advance(self, room_bytes: int) -> None:
        """Sets the memory for values that are read ahead; does not block.

        Args:
          room_bytes: At least the largest of them; never less than before in a step.
        """
        with self._changed:
            self._read_room = room_bytes
            self._advance()

    def bring(self, key: Any) -> None:
        """Starts copying a value that is gone back to the device; does not block.

        What is still on the host is copied from there.
        """
        entry = self._entries[key]
        with self._changed:
            entry.is_due = True
            entry.is_forwarded = entry.place is not None and entry.host is not None
            self.counts.num_forwarded += entry.is_forwarded
            self._return(entry)
            self._advance()

    def take(self, key: Any) -> jax.Array:
        """Returns a value on the device; blocks until it is there.

        Raises:
          StoreIOError: The drive failed. Other values can still be taken.
        """
        entry = self._entries[key]
        self._await(lambda: entry.is_back or entry.error is not None)
        if entry.error is not None:
            raise entry.error
        value, entry.on_device = entry.on_device, None
        return value

    def look(self, key: Any) -> jax.Array:
        """Returns a value that is gone, also before `bring`; blocks.

        It takes memory of its own if it has to be copied or read.

        Raises:
          KeyError: The value is not here.
          StoreIOError: The drive failed.
        """
        entry = self._entries[key]
        with self._changed:
            host, parts = entry.host, list(entry.written)
        if host is not None:
            return jax.device_put(host, entry.sharding)
        assert entry.place is not None, "what stays on the host is there"
        raw, bounce = aligned(entry.place.memory_bytes), aligned(PART_BYTES)
        for part in parts:
            self._scratch.read(part, raw, bounce)
        return self._on_device(entry, raw)

    def release(self, key: Any) -> None:
        """Forgets a value that nothing reads any more.

        Blocks while a drive still writes it, or reads what is of no use.

        Raises:
          StoreSpaceError, StoreIOError: A drive is full, or failed.
        """
        entry = self._entries[key]
        self._await(lambda: entry.host is None and entry.buffer is None)
        del self._entries[key]

    def reset(self) -> None:
        """Drops all values; blocks until no transfer is under way."""
        self._workers.reset()
        for entry in self._entries.values():
            if entry.buffer is not None:
                entry.buffer.release()
        self._entries.clear()
        self._leaving.clear()
        self._ahead = deque(self._places)
        self._leaving_room, self._read_room = self._leaving_bytes, 0
        self._error = None
        self._pool.free_idle()  # goes back to the system between steps

    def close(self) -> None:
        """Drops everything and ends the threads; idempotent."""
        self.reset()
        self._workers.close()
        self._pool.close()

    def take_counts(self) -> CacheCounts:
        """Returns the counts since the last call."""
        counts, self.counts = self.counts, CacheCounts()
        counts.write_s = self._workers.take_s("write")
        counts.read_s = self._workers.take_s("read")
        counts.out_s = self._workers.take_s("out")
        counts.back_s = self._workers.take_s("back")
        return counts

    def _await(self, is_done: Callable[[], bool]) -> None:
        began_s = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: is_done() or self._error is not None)
            self.counts.waited_s += time.perf_counter() - began_s
            if self._error is not None:
                raise self._error

    # --- what is next, under the lock ----------------------------------------------

    def _advance(self) -> None:
        """Submits the copies and reads that have room now, in order."""
        while self._leaving and self._leaving[0].leaving_bytes <= self._leaving_room:
            entry = self._leaving.popleft()
            self._leaving_room -= entry.leaving_bytes
            copy = partial(self._copy_out, entry)
            self._workers.submit(self._out, Job(copy, partial(self._copied_out, entry)))
        while self._ahead and self._may_pass(self._entries.get(self._ahead[0])):
            self._ahead.popleft()

    def _may_pass(self, entry: _Entry | None) -> bool:
        """Reads a value ahead if it has left and there is room; else returns False."""
        if entry is None or entry.place is None:
            return False
        if entry.is_forwarded:
            return True
        num_bytes = entry.place.memory_bytes
        room = self._read_room - self._pool.used_bytes
        if not entry.is_written or num_bytes > room:
            return False
        entry.buffer = self._pool.acquire(num_bytes, block=False)
        assert entry.buffer is not None, "the pool has the most room of all calls"
        entry.num_parts = len(entry.written)
        for part in entry.written:
            move = partial(self._read, entry.buffer.array, part)
            self._workers.submit(part.drive, Job(move, partial(self._was_read, entry)))
        return True

    def _return(self, entry: _Entry) -> None:
        """Copies a value back if it is due and there."""
        is_read = entry.buffer is not None and not entry.num_parts
        is_here = entry.host is not None or (is_read and entry.error is None)
        if entry.is_due and is_here and not entry.is_returning:
            entry.is_returning = True
            copy = partial(self._copy_back, entry)
            self._workers.submit(
                self._back, Job(copy, partial(self._copied_back, entry))
            )

    def _copied_out(
        self, entry: _Entry, host: jax.Array | None, error: BaseException | None
    ) -> None:
        if error is not None:
            self._error = self._error or error
            return
        entry.value, entry.host = None, host
        self.counts.num_out_bytes += entry.aval.size * entry.aval.dtype.itemsize
        if entry.place is not None:
            for part in entry.place.parts:
                move = partial(self._write, entry, part)
                ended = partial(self._was_written, entry)
                self._workers.submit(part.drive, Job(move, ended))

    def _was_written(
        self, entry: _Entry, part: Part | None, error: BaseException | None
    ) -> None:
        if part is None:
            self._error = self._error or error
            return
        entry.written.append(part)
        self.counts.num_written_bytes += part.num_bytes
        self._free_host(entry)
        self._advance()

    def _was_read(
        self, entry: _Entry, part: Part | None, error: BaseException | None
    ) -> None:
        entry.num_parts -= 1
        if part is None:  # it may be computed again
            entry.error = entry.error or error
        else:
            self.counts.num_read_bytes += part.num_bytes
        if entry.error is not None and not entry.num_parts:
            self._free_buffer(entry)
            self._advance()
        self._return(entry)

    def _copied_back(
        self, entry: _Entry, value: jax.Array | None, error: BaseException | None
    ) -> None:
        if error is not None:
            self._error = self._error or error
            return
        entry.on_device, entry.is_back = value, True
        self.counts.num_back_bytes += entry.aval.size * entry.aval.dtype.itemsize
        self._free_buffer(entry)
        self._free_host(entry)
        self._advance()

    def _free_buffer(self, entry: _Entry) -> None:
        if entry.buffer is not None:
            entry.buffer.release()
            entry.buffer = None

    def _free_host(self, entry: _Entry) -> None:
        """Frees a copy on the host when neither a drive nor the device reads it."""
        is_left = entry.place is None or entry.is_written
        is_wanted = entry.place is None or entry.is_forwarded
        if entry.host is not None and is_left and (entry.is_back or not is_wanted):
            entry.host = None
            self._leaving_room += entry.leaving_bytes

    # --- threads -------------------------------------------------------------------

    def _copy_out(self, entry: _Entry, bounce: Array) -> jax.Array:
        value = jax.block_until_ready(entry.value)
        with self._workers.timed("out"):
            pinned = entry.sharding.with_memory_kind(_PINNED)
            return jax.block_until_ready(jax.device_put(value, pinned))

    def _write(self, entry: _Entry, part: Part, bounce: Array) -> Part:
        raw = raw_bytes(np.asarray(entry.host))
        with self._workers.timed("write"):
            return self._scratch.write(part, raw, bounce)

    def _read(self, out: Array, part: Part, bounce: Array) -> Part:
        with self._workers.timed("read"):
            self._scratch.read(part, out, bounce)
        return part

    def _copy_back(self, entry: _Entry, bounce: Array) -> jax.Array:
        with self._workers.timed("back"):
            if entry.host is not None:
                return jax.block_until_ready(jax.device_put(entry.host, entry.sharding))
            assert entry.buffer is not None
            return self._on_device(entry, entry.buffer.array)

    def _on_device(self, entry: _Entry, raw: Array) -> jax.Array:
        """Copies bytes to the device by way of pinned memory."""
        aval = entry.aval
        num_bytes = aval.size * aval.dtype.itemsize
        array = raw[:num_bytes].view(aval.dtype).reshape(aval.shape)
        pinned = jax.device_put(array, entry.sharding.with_memory_kind(_PINNED))
        # The pinned array may be `raw` itself, as on a CPU.
        return jax.block_until_ready(jax.device_put(pinned, entry.sharding))
