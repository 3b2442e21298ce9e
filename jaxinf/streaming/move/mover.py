"""Moves values out of the device's memory and back, before they are needed again.

    evict ─► device ─► pinned host memory ─► evicted    memory is free from here
                         │  └─► drive ─► buffer         … read ahead if there is room …
    get ◄─ device ◄──────┴────────────────┘             … to `prefetch`; release ends it

Each hop has a queue: the copies out, those back, and one for each drive. What is next
follows from the states of the values, under one lock. Where the device's memory is the
host's, the hop between them is left out.

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
from jaxinf.streaming.move.scratch import Part, Place, Scratch, aligned, raw_bytes
from jaxinf.streaming.move.workers import THREADS_PER_DRIVE, Job, Workers
from jaxinf.streaming.plan.forms import PART_BYTES
from jaxinf.streaming.plan.tiers import NUM_COPIES
from jaxinf.typing import Array

__all__ = ["Mover", "MoverCounts"]

_PINNED = "pinned_host"


@dataclass
class MoverCounts:
    """Traffic and times since the previous counts.

    Attributes:
      num_written_bytes, num_read_bytes: Bytes moved to drives, and from them.
      write_s, read_s: Times in which some drive wrote, or read.
      waited_s: Time that the caller waited for any move.
      num_forwarded: Number of values that came back before a drive had them.
      num_out_bytes, num_back_bytes: Bytes copied from a device with memory of its own
        to the host, and back.
      out_s, back_s: Times of these copies.
    """

    num_written_bytes: int = 0
    num_read_bytes: int = 0
    write_s: float = 0.0
    read_s: float = 0.0
    waited_s: float = 0.0
    num_forwarded: int = 0
    num_out_bytes: int = 0
    num_back_bytes: int = 0
    out_s: float = 0.0
    back_s: float = 0.0


@dataclass(eq=False)
class _Entry:
    """A value that is leaving, away, or on its way back.

    Attributes:
      place: Its place on drives, without parts if it stays on the host.
      aval: Its shape and dtype.
      sharding: Its place on the device.
      value: The value on the device, until it is on the host and when it is back.
      leaving_bytes: Memory of the host that it takes on its way to drives.
      host: The value on the host, until it is written, and back if it is kept.
      written: Its parts, as they were written.
      buffer: Memory into which it is read.
      num_moves: Number of its moves that have not ended.
      is_forwarded: Whether it comes back from `host`, although a drive will have it.
      is_due: Whether the device has memory for it, and its way back has not begun.
      is_back: Whether it is on the device again.
      error: What prevented it from being read.
    """

    place: Place
    aval: Any
    sharding: Any
    value: Any
    leaving_bytes: int
    host: Any = None
    written: list[Part] = field(default_factory=list)
    buffer: Buffer | None = None
    num_moves: int = 0
    is_forwarded: bool = False
    is_due: bool = False
    is_back: bool = False
    error: BaseException | None = None

    @property
    def is_written(self) -> bool:
        """Whether all of it that goes to drives is there."""
        return len(self.written) == len(self.place.parts)

    def free_buffer(self) -> None:
        """Frees the memory into which it was read, if there is any."""
        if self.buffer is not None:
            self.buffer.release()
            self.buffer = None


class Mover:
    """Moves values to the host, to drives and back. Used from one thread.

    Args:
      scratch: The files.
      places: Places of the values that go to drives, in the order in which they are
        needed again. Others stay on the host, and the caller counts them.
      buffer_bytes: The most memory for values that have been read.
      leaving_bytes: Memory of the host for values on their way to drives, `NUM_COPIES`
        times that of each; None if the device's memory is the host's.
    """

    def __init__(
        self,
        scratch: Scratch,
        places: Mapping[Any, Place],
        buffer_bytes: int,
        leaving_bytes: int | None = None,
    ) -> None:
        self._scratch = scratch
        self._places = places
        self._has_link = leaving_bytes is not None
        self._leaving_bytes = self._leaving_room = leaving_bytes or 0
        self._pool = BufferPool(max(buffer_bytes, PAGE_BYTES))
        self._read_room = 0
        threads = [THREADS_PER_DRIVE] * scratch.num_drives + [1, 1] * self._has_link
        self._out, self._back = scratch.num_drives, scratch.num_drives + 1
        self._workers = Workers(threads, ("write", "read", "out", "back"))
        self._changed = self._workers.changed
        self._entries: dict[Any, _Entry] = {}
        self._leaving: deque[_Entry] = deque()
        self._in_order = tuple(places) if self._has_link else ()
        self._ahead = deque(self._in_order)
        self._error: BaseException | None = None
        self.counts = MoverCounts()

    def evict(self, key: Any, value: jax.Array) -> None:
        """Starts moving a value out, which may still be computed; does not block.

        The caller drops its own reference by `wait_evicted`. The value must not change
        until then.
        """
        place = self._places.get(key, Place(()))
        room = NUM_COPIES * place.memory_bytes if self._has_link else 0
        entry = _Entry(place, jax.typeof(value), value.sharding, value, room)
        with self._changed:
            self._entries[key] = entry
            self._leaving.append(entry)
            self._advance()

    def wait_evicted(self, key: Any) -> None:
        """Blocks until nothing here holds a value in the device's memory.

        Raises:
          StoreSpaceError, StoreIOError: A drive is full, or failed.
        """
        entry = self._entries[key]
        self._await(lambda: (entry.value if self._has_link else entry.host) is None)

    def read_ahead(self, room_bytes: int) -> None:
        """Sets the host's memory for values read before `prefetch`; does not block.

        Args:
          room_bytes: At least the largest of them; never less than before in a step.
            Not used where the device's memory is the host's.
        """
        with self._changed:
            self._read_room = room_bytes
            self._advance()

    def prefetch(self, key: Any) -> None:
        """Starts moving a value back, for which the device has memory; does not block.

        What is still on the host comes from there.
        """
        entry = self._entries[key]
        with self._changed:
            entry.is_due = True
            entry.is_forwarded = entry.host is not None and bool(entry.place.parts)
            self.counts.num_forwarded += entry.is_forwarded
            if entry.host is None and not self._has_link:
                self._read(entry)
            self._proceed(entry)

    def get(self, key: Any) -> jax.Array:
        """Returns a value, valid until `release`; blocks until it is on the device.

        Raises:
          StoreIOError: The drive failed. Other values still come back.
        """
        entry = self._entries[key]
        self._await(lambda: entry.is_back or entry.error is not None)
        if entry.error is not None:
            raise entry.error
        if entry.value is None:
            assert entry.buffer is not None, "it has been read"
            entry.value = self._on_device(entry, entry.buffer.array)
        return entry.value

    def look(self, key: Any) -> jax.Array:
        """Returns a value that is evicted, also before `prefetch`; blocks.

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
        raw, bounce = aligned(entry.place.memory_bytes), aligned(PART_BYTES)
        for part in parts:
            self._scratch.read(part, raw, bounce)
        return self._on_device(entry, raw)

    def release(self, key: Any) -> None:
        """Frees the memory of a value that nothing reads any more.

        Blocks while a drive still writes it, or reads what is of no use.

        Raises:
          StoreSpaceError, StoreIOError: A drive is full, or failed.
        """
        entry = self._entries[key]
        self._await(lambda: not entry.num_moves)
        entry.free_buffer()
        del self._entries[key]

    def reset(self) -> None:
        """Drops all values; blocks until no move is under way."""
        self._workers.reset()
        for entry in self._entries.values():
            entry.free_buffer()
        self._entries.clear()
        self._leaving.clear()
        self._ahead = deque(self._in_order)
        self._leaving_room, self._read_room = self._leaving_bytes, 0
        self._error = None
        self._pool.free_idle()  # goes back to the system between steps

    def close(self) -> None:
        """Drops everything and ends the threads; idempotent."""
        self.reset()
        self._workers.close()
        self._pool.close()

    def take_counts(self) -> MoverCounts:
        """Returns the counts since the last call."""
        with self._changed:
            counts, self.counts = self.counts, MoverCounts()
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
        """Lets values leave, and reads others ahead, that have room now, in order."""
        while self._leaving and self._leaving[0].leaving_bytes <= self._leaving_room:
            entry = self._leaving.popleft()
            self._leaving_room -= entry.leaving_bytes
            if self._has_link:
                copy = partial(self._copy_out, entry)
                self._submit(entry, self._out, copy, self._is_out)
            else:
                self._is_out(entry, entry.value)
        while self._ahead and (entry := self._entries.get(self._ahead[0])):
            if not entry.is_forwarded:
                room = self._read_room - self._pool.used_bytes
                if not entry.is_written or entry.place.memory_bytes > room:
                    break
                self._read(entry)
            self._ahead.popleft()

    def _read(self, entry: _Entry) -> None:
        """Starts reading a value, for which there is room."""
        entry.buffer = self._pool.acquire(entry.place.memory_bytes, block=False)
        assert entry.buffer is not None, "the plan has room for what comes back"
        for part in entry.written:
            read = partial(self._read_part, entry.buffer.array, part)
            self._submit(entry, part.drive, read, self._is_read, is_own=True)

    def _submit(
        self,
        entry: _Entry,
        queue: int,
        move: Callable[[Array], Any],
        ended: Callable[[_Entry, Any], None],
        is_own: bool = False,
    ) -> None:
        """Adds a move to a queue; if `is_own`, its errors are not those of others."""

        def moved(found: Any, error: BaseException | None) -> None:
            entry.num_moves -= 1
            if error is None:
                ended(entry, found)
            elif is_own:  # the value may be computed again
                entry.error = entry.error or error
            else:
                self._error = self._error or error
            self._proceed(entry)

        entry.num_moves += 1
        self._workers.submit(queue, Job(move, moved))

    def _proceed(self, entry: _Entry) -> None:
        """Frees memory of a value that has moved; lets it come back if it is due."""
        is_source = entry.is_forwarded or not entry.place.parts
        is_used = not entry.is_written or (is_source and not entry.is_back)
        if entry.host is not None and not is_used:
            entry.host = None
            self._leaving_room += entry.leaving_bytes
        is_copied = entry.is_back and self._has_link
        if not entry.num_moves and (is_copied or entry.error is not None):
            entry.free_buffer()
        is_read = entry.buffer is not None and not entry.num_moves
        if entry.is_due and (is_read or entry.host is not None):
            entry.is_due = False
            if self._has_link:
                copy = partial(self._copy_back, entry)
                self._submit(entry, self._back, copy, self._is_back)
            else:
                entry.value, entry.is_back = entry.host, True
        self._advance()

    def _is_out(self, entry: _Entry, host: jax.Array) -> None:
        entry.value, entry.host = None, host
        self.counts.num_out_bytes += host.nbytes if self._has_link else 0
        for part in entry.place.parts:
            write = partial(self._write_part, entry, part)
            self._submit(entry, part.drive, write, self._is_written)

    def _is_written(self, entry: _Entry, part: Part) -> None:
        entry.written.append(part)
        self.counts.num_written_bytes += part.num_bytes

    def _is_read(self, entry: _Entry, part: Part) -> None:
        self.counts.num_read_bytes += part.num_bytes

    def _is_back(self, entry: _Entry, value: jax.Array) -> None:
        entry.value, entry.is_back = value, True
        self.counts.num_back_bytes += value.nbytes

    # --- threads -------------------------------------------------------------------

    def _copy_out(self, entry: _Entry, bounce: Array) -> jax.Array:
        value = jax.block_until_ready(entry.value)
        with self._workers.timed("out"):
            pinned = entry.sharding.with_memory_kind(_PINNED)
            return jax.block_until_ready(jax.device_put(value, pinned))

    def _write_part(self, entry: _Entry, part: Part, bounce: Array) -> Part:
        raw = raw_bytes(np.asarray(entry.host))  # this waits until it is computed
        with self._workers.timed("write"):
            return self._scratch.write(part, raw, bounce)

    def _read_part(self, out: Array, part: Part, bounce: Array) -> Part:
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
        """Copies bytes to the device by way of pinned memory, if they are not there."""
        aval = entry.aval
        array = np.frombuffer(raw, aval.dtype, aval.size).reshape(aval.shape)
        if self._has_link:
            # The pinned array may be `raw` itself, as on a CPU.
            array = jax.device_put(array, entry.sharding.with_memory_kind(_PINNED))
        return jax.block_until_ready(jax.device_put(array, entry.sharding))
