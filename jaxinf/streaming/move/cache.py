"""Values that leave memory for drives, and come back before they are needed.

    leave ─► threads write ─► gone          memory is free from here
    bring ─► threads read  ─► take          … to here; release ends it

Invariant: a value that is taken has the bits that it left with, whether it comes from
the drive or was still on its way out. One that is coded has lost low bits on the drive.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from jaxinf.io import BufferPool
from jaxinf.io.buffers import Buffer
from jaxinf.io.pages import PAGE_BYTES
from jaxinf.streaming.move.scratch import Part, Place, Scratch, aligned, raw_bytes
from jaxinf.streaming.move.workers import Job, Workers
from jaxinf.streaming.plan.forms import PART_BYTES
from jaxinf.typing import Array

__all__ = ["THREADS_PER_DRIVE", "Cache", "CacheCounts", "writing_bytes"]

THREADS_PER_DRIVE = 2


def writing_bytes(num_drives: int) -> int:
    """Memory of a cache for writing, beside that of the values."""
    return num_drives * THREADS_PER_DRIVE * PART_BYTES


@dataclass
class CacheCounts:
    """Traffic and times since the previous counts.

    Attributes:
      num_written_bytes, num_read_bytes: Bytes moved.
      write_s, read_s: Times in which some drive wrote, or read.
      waited_s: Time that the caller waited for either.
      num_forwarded: Number of values handed back before they had left.
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


@dataclass
class _Entry:
    """A value outside the caller's hands.

    Attributes:
      value: The value while it leaves; None when its memory is free.
      buffer: Memory into which it is read; None before.
      num_parts: Number of its parts that are still to be moved.
      error: What prevented it from being read.
      written: Its parts, as they were written.
    """

    place: Place
    value: Any = None
    buffer: Buffer | None = None
    num_parts: int = 0
    error: BaseException | None = None
    written: list[Part] = field(default_factory=list)


class Cache:
    """Moves values to drives and back, on threads of its own. Used from one thread.

    Args:
      scratch: The files.
      places: A place for each value that may leave.
      capacity_bytes: Memory for values that have come back.
    """

    def __init__(
        self, scratch: Scratch, places: Mapping[Any, Place], capacity_bytes: int
    ) -> None:
        self._scratch = scratch
        self._places = places
        self._pool = BufferPool(max(capacity_bytes, PAGE_BYTES))
        self._entries: dict[Any, _Entry] = {}
        self._workers = Workers(
            [THREADS_PER_DRIVE] * scratch.num_drives, ("write", "read")
        )
        self._error: BaseException | None = None
        self.counts = CacheCounts()

    def leave(self, key: Any, value: Any) -> None:
        """Starts writing a value, which may still be computed; does not block.

        The caller drops its own reference. The value must not change until `gone`.
        """
        entry = _Entry(self._places[key], value)
        self._entries[key] = entry
        self._write(entry)

    def gone(self, key: Any) -> None:
        """Frees a value's memory; blocks until it is written.

        Raises:
          StoreSpaceError, StoreIOError: The drive is full, or failed.
        """
        entry = self._entries[key]
        self._await(entry)
        entry.value = None

    def bring(self, key: Any) -> None:
        """Starts reading a value that is gone; does not block."""
        entry = self._entries[key]
        if entry.value is not None:
            return
        entry.buffer = self._pool.acquire(entry.place.memory_bytes, block=False)
        assert entry.buffer is not None, "the plan has room for what comes back"
        self._read(entry, entry.buffer.array)

    def take(self, key: Any) -> tuple[Array | None, Any]:
        """Returns a value; blocks until it has been read.

        Returns:
          Its bytes, `uint8`, page-aligned and perhaps longer than the value, valid
          until `release`; or, instead of them, the value itself if it was not `gone`.

        Raises:
          StoreIOError: The drive failed. Other values can still be taken.
        """
        entry = self._entries[key]
        if entry.value is not None:
            self.counts.num_forwarded += 1
            return None, entry.value
        assert entry.buffer is not None, "a value is brought before it is taken"
        self._await(entry)
        return entry.buffer.array, None

    def look(self, key: Any) -> tuple[Array | None, Any]:
        """Returns a value as `take` does, also before `bring`; blocks.

        Its memory is the caller's if it has to be read.

        Raises:
          KeyError: The value is not here.
          StoreIOError: The drive failed.
        """
        entry = self._entries[key]
        if entry.value is not None:
            return None, entry.value
        raw, bounce = aligned(entry.place.memory_bytes), aligned(PART_BYTES)
        for part in entry.written:
            self._scratch.read(part, raw, bounce)
        return raw, None

    def release(self, key: Any) -> None:
        """Frees the memory of a value that nothing reads any more.

        Blocks while a value that was not `gone` is being written.
        """
        entry = self._entries.pop(key)
        if entry.value is not None:
            self._await(entry)
        if entry.buffer is not None:
            entry.buffer.release()

    def reset(self) -> None:
        """Drops all values; blocks until no transfer is under way."""
        self._workers.reset()
        self._error = None
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            if entry.buffer is not None:
                entry.buffer.release()
        capacity = self._pool.capacity_bytes
        self._pool.resize(1)  # idle memory goes back to the system between steps
        self._pool.resize(capacity)

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
        return counts

    # --- threads -------------------------------------------------------------------

    def _write(self, entry: _Entry) -> None:
        def move(part: Part, bounce: Array) -> Part:
            # This waits until it is computed.
            raw = raw_bytes(np.asarray(entry.value))
            with self._workers.timed("write"):
                return self._scratch.write(part, raw, bounce)

        def ended(part: Part | None, error: BaseException | None) -> None:
            entry.num_parts -= 1
            if part is None:
                self._error = self._error or error
                return
            entry.written.append(part)
            self.counts.num_written_bytes += part.num_bytes

        self._submit(entry, entry.place.parts, move, ended)

    def _read(self, entry: _Entry, out: Array) -> None:
        def move(part: Part, bounce: Array) -> Part:
            with self._workers.timed("read"):
                self._scratch.read(part, out, bounce)
            return part

        def ended(part: Part | None, error: BaseException | None) -> None:
            entry.num_parts -= 1
            if part is None:  # it may be computed again
                entry.error = entry.error or error
                return
            self.counts.num_read_bytes += part.num_bytes

        self._submit(entry, entry.written, move, ended)

    def _submit(
        self,
        entry: _Entry,
        parts: Sequence[Part],
        move: Callable[[Part, Array], Part],
        ended: Callable[[Part | None, BaseException | None], None],
    ) -> None:
        with self._workers.changed:
            entry.num_parts = len(parts)
            for part in parts:
                self._workers.submit(part.drive, Job(partial(move, part), ended))

    def _await(self, entry: _Entry) -> None:
        began_s = time.perf_counter()
        with self._workers.changed:
            self._workers.changed.wait_for(
                lambda: not entry.num_parts or self._error is not None
            )
            self.counts.waited_s += time.perf_counter() - began_s
            error = self._error or entry.error
        if error is not None:
            raise error
