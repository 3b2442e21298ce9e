"""Values that leave memory for drives, and come back before they are needed.

    leave ─► threads write ─► gone          memory is free from here
    bring ─► threads read  ─► take          … to here; release ends it

Invariant: a value that is taken has the bits that it left with, whether it comes from
the drive or was still on its way out. One that is coded has lost low bits on the drive.
"""

import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxinf.activations.scratch import (
    PART_BYTES,
    Part,
    Place,
    Scratch,
    aligned,
    raw_bytes,
)
from jaxinf.io import BufferPool
from jaxinf.io.buffers import Buffer
from jaxinf.io.pages import PAGE_BYTES
from jaxinf.typing import Array

__all__ = ["Cache", "CacheCounts", "writing_bytes"]

_THREADS_PER_DRIVE = 2


def writing_bytes(num_drives: int) -> int:
    """Memory of a cache for writing, beside that of the values."""
    return num_drives * _THREADS_PER_DRIVE * PART_BYTES


@dataclass
class CacheCounts:
    """Traffic and times since the previous counts.

    Attributes:
      num_written_bytes, num_read_bytes: Bytes moved.
      write_s, read_s: Times in which some drive wrote, or read.
      waited_s: Time that the caller waited for either.
      num_forwarded: Number of values handed back before they had left.
    """

    num_written_bytes: int = 0
    num_read_bytes: int = 0
    write_s: float = 0.0
    read_s: float = 0.0
    waited_s: float = 0.0
    num_forwarded: int = 0


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


class _Job(NamedTuple):
    key: Hashable
    entry: _Entry
    part: Part
    writes: bool


@dataclass
class _Clock:
    """Adds up the time in which at least one job of a direction runs."""

    num_running: int = 0
    since_s: float = 0.0
    total_s: float = 0.0

    def start(self) -> None:
        if not self.num_running:
            self.since_s = time.perf_counter()
        self.num_running += 1

    def stop(self) -> None:
        self.num_running -= 1
        if not self.num_running:
            self.total_s += time.perf_counter() - self.since_s


@dataclass
class _Clocks:
    write: _Clock = field(default_factory=_Clock)
    read: _Clock = field(default_factory=_Clock)


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
        self._changed = threading.Condition()
        self._entries: dict[Any, _Entry] = {}
        self._jobs: list[deque[_Job]] = [deque() for _ in range(scratch.num_drives)]
        self._num_running = 0
        self._clocks = _Clocks()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._error: BaseException | None = None
        self.counts = CacheCounts()

    def leave(self, key: Any, value: Any) -> None:
        """Starts writing a value, which may still be computed; does not block.

        The caller drops its own reference. The value must not change until `gone`.
        """
        entry = _Entry(self._places[key], value)
        self._entries[key] = entry
        self._submit(key, entry, writes=True)

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
        self._submit(key, entry, writes=False)

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
        with self._changed:
            for jobs in self._jobs:
                jobs.clear()
            self._changed.wait_for(lambda: not self._num_running)
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
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._pool.close()

    def take_counts(self) -> CacheCounts:
        """Returns the counts since the last call."""
        counts, self.counts = self.counts, CacheCounts()
        with self._changed:
            clocks = self._clocks
            counts.write_s, clocks.write.total_s = clocks.write.total_s, 0.0
            counts.read_s, clocks.read.total_s = clocks.read.total_s, 0.0
        return counts

    # --- threads -------------------------------------------------------------------

    def _submit(self, key: Any, entry: _Entry, *, writes: bool) -> None:
        if not self._threads:
            self._start()
        with self._changed:
            parts = entry.place.parts if writes else entry.written
            entry.num_parts = len(parts)
            for part in parts:
                self._jobs[part.drive].append(_Job(key, entry, part, writes))
            self._changed.notify_all()

    def _await(self, entry: _Entry) -> None:
        began_s = time.perf_counter()
        with self._changed:
            self._changed.wait_for(
                lambda: not entry.num_parts or self._error is not None
            )
            self.counts.waited_s += time.perf_counter() - began_s
            error = self._error or entry.error
        if error is not None:
            raise error

    def _start(self) -> None:
        for drive in range(self._scratch.num_drives):
            for _ in range(_THREADS_PER_DRIVE):
                thread = threading.Thread(
                    target=self._run,
                    args=(drive,),
                    name="jaxinf-activations",
                    daemon=True,
                )
                self._threads.append(thread)
                thread.start()

    def _run(self, drive: int) -> None:
        with BufferPool(PART_BYTES).acquire(PART_BYTES) as bounce:
            while (job := self._next(drive)) is not None:
                error = self._move(job, bounce.array)
                with self._changed:
                    self._num_running -= 1
                    job.entry.num_parts -= 1
                    if error is not None and job.writes:
                        self._error = self._error or error
                    elif error is not None:  # it may be computed again
                        job.entry.error = job.entry.error or error
                    del job  # it holds the value
                    self._changed.notify_all()

    def _next(self, drive: int) -> _Job | None:
        """The next job of a drive; blocks until there is one. None at the end."""
        jobs = self._jobs[drive]
        with self._changed:
            self._changed.wait_for(lambda: jobs or self._is_closed)
            if self._is_closed:
                return None
            self._num_running += 1
            return jobs.popleft()

    def _move(self, job: _Job, bounce: Array) -> BaseException | None:
        """Moves a part; returns the error that prevented it."""
        entry = job.entry
        try:
            if job.writes:
                # This waits until it is computed.
                raw = raw_bytes(np.asarray(entry.value))
                with self._timed(self._clocks.write):
                    written = self._scratch.write(job.part, raw, bounce)
                with self._changed:
                    entry.written.append(written)
                    self.counts.num_written_bytes += written.num_bytes
            else:
                assert entry.buffer is not None
                with self._timed(self._clocks.read):
                    self._scratch.read(job.part, entry.buffer.array, bounce)
                with self._changed:
                    self.counts.num_read_bytes += job.part.num_bytes
        except BaseException as error:
            return error
        return None

    @contextmanager
    def _timed(self, clock: _Clock) -> Iterator[None]:
        with self._changed:
            clock.start()
        try:
            yield
        finally:
            with self._changed:
                clock.stop()
