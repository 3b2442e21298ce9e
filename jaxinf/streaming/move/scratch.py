"""Files without names, in which values and gradients wait on one or more drives.

    value ─► parts of up to 4 MiB ─► drive 0, drive 1, …, drive 0, …

Invariant: what waits comes back with its bits. The files have no name, so they
disappear with the process, however it ends, and runs that share a folder never meet.
They are never synced.
"""

import itertools
import math
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinf.streaming.move.work_queues import WorkQueues
from jaxinf.streaming.program.graph import Piece
from jaxinf.transfer import (
    ByteMeters,
    aligned,
    page_ceil,
    read_into,
    span,
    translated,
    write_from,
)
from jaxinf.typing import Array, PathLikeStr

PART_BYTES = 4 << 20
"""The longest part of a value that is moved at once."""

THREADS_PER_DRIVE = 2


class ScratchRun(NamedTuple):
    """A run of a value's bytes, and its place on a drive.

    Attributes:
      offset_bytes: Position in the drive's file, in whole pages.
    """

    drive: int
    offset_bytes: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def place_bytes(parts: Sequence[ScratchRun]) -> int:
    """Bytes of a value that are moved each way, and memory for it: whole pages."""
    return sum(page_ceil(part.num_bytes) for part in parts)


def writing_bytes(num_drives: int) -> int:
    """Memory of the threads of drives, beside that of the values."""
    return num_drives * THREADS_PER_DRIVE * PART_BYTES


class Scratch:
    """Files without names, one on each drive, and threads that write and read them.

    Args:
      folders: A folder on each drive; none if there is no value to hold.
      content: What the files hold, for errors.
      num_threads: Number of each drive's threads.

    Attributes:
      jobs: Has a queue for each drive, and others of who uses it.
    """

    def __init__(
        self,
        folders: Sequence[PathLikeStr],
        meters: ByteMeters | None = None,
        *,
        content: str = "activations",
        num_threads: int = THREADS_PER_DRIVE,
    ) -> None:
        self._folders = [Path(folder) for folder in folders]
        self._meters = ByteMeters() if meters is None else meters
        self._content, self._num_threads = content, num_threads
        self.jobs = WorkQueues(f"jaxinf-{content}")
        self._forms: dict[Sequence[ScratchRun], tuple[Any, Any]] = {}
        self._own = threading.local()  # a thread's memory to write a part from
        self._files: list[int] = []

    def allocate(self, sizes: Iterable[int]) -> list[Sequence[ScratchRun]]:
        """Takes room for values of so many bytes; blocks. Called once.

        Returns:
          The place of each; the parts of all take turns on the drives.

        Raises:
          StoreSpaceError, StoreIOError: A drive is full, or failed.
        """
        places, ends = [], [0] * len(self._folders)
        turns = itertools.cycle(range(len(self._folders)))
        for num_bytes in sizes:
            parts = []
            for start in range(0, max(num_bytes, 1), PART_BYTES):
                drive, stop = next(turns), min(start + PART_BYTES, num_bytes)
                parts.append(ScratchRun(drive, ends[drive], start, stop))
                ends[drive] += page_ceil(stop - start)
            places.append(tuple(parts))
        try:
            self._open(ends if places else ())
        except BaseException:
            self.close()
            raise
        return places

    def _open(self, ends: Sequence[int]) -> None:
        for drive, end in enumerate(ends):
            making = translated("making a file", self._shown(drive))
            with making, tempfile.TemporaryFile(dir=self._folders[drive]) as file:
                self._files.append(os.dup(file.fileno()))
            if end:
                with translated("reserving room", self._shown(drive)):
                    os.posix_fallocate(self._files[drive], 0, end)

    # --- moves ---------------------------------------------------------------------

    def start_write(
        self,
        parts: Sequence[ScratchRun],
        value: Array | jax.Array,
        ended: Callable[[], None] = lambda: None,
    ) -> Set[ScratchRun]:
        """Starts to write a value, which may still be computed.

        Args:
          ended: Called when all of it is there, on a thread with the lock of `jobs`.

        Returns:
          The parts that have still to be written.
        """
        self._forms[parts] = value.shape, value.dtype
        return self._start(self.write, parts, value, ended)

    def array(self, parts: Sequence[ScratchRun], memory: Array) -> Array:
        """Returns what was written there, in the memory that it was read into."""
        shape, dtype = self._forms[parts]
        return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)

    def start_read(
        self,
        parts: Sequence[ScratchRun],
        out: Array,
        ended: Callable[[], None] = lambda: None,
    ) -> Set[ScratchRun]:
        """As `start_write`, into a value's memory, in whole pages."""
        return self._start(self.read, parts, out, ended)

    def _start(
        self,
        move: Callable[..., None],
        parts: Sequence[ScratchRun],
        array: Array | jax.Array,
        ended: Callable[[], None],
    ) -> Set[ScratchRun]:
        left = {*parts}

        def run(part: ScratchRun) -> None:
            move(part, array)
            with self.jobs.changed:
                left.remove(part)
                if not left:
                    ended()

        for part in parts:
            self.jobs.submit(partial(run, part), part.drive, self._num_threads)
        return left

    def write(self, part: ScratchRun, value: Array | jax.Array) -> None:
        """Writes a part of a value; blocks. Thread-safe.

        Raises:
          StoreSpaceError, StoreIOError: The drive is full, or failed.
        """
        if not hasattr(self._own, "memory"):
            self._own.memory = aligned(PART_BYTES)
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        length = part.num_bytes
        padded = self._own.memory[: page_ceil(length)]
        padded[:length] = raw[part.start : part.stop]
        padded[length:] = 0
        self._move(write_from, part, padded)

    def read(self, part: ScratchRun, out: Array) -> None:
        """Reads a part into the whole value's memory; blocks. Thread-safe.

        Args:
          out: `uint8`, page-aligned, with room for the value in whole pages.

        Raises:
          StoreIOError: The drive failed.
        """
        length = page_ceil(part.num_bytes)
        self._move(read_into, part, out[part.start : part.start + length])

    def _move(self, call: Any, part: ScratchRun, memory: Array) -> None:
        drive, kind = part.drive, "read" if call is read_into else "write"
        with span(kind, drive=str(self._folders[drive])):
            call(
                f"/proc/self/fd/{self._files[drive]}",
                memory,
                part.offset_bytes,
                len(memory),
                meters=self._meters,
                shown=self._shown(drive),
            )

    def close(self) -> None:
        """Ends the threads and closes the files, which removes them; idempotent."""
        self.jobs.close()
        files, self._files = self._files, []
        for file in files:
            os.close(file)

    def _shown(self, drive: int) -> str:
        return f"{self._folders[drive]} (a file of {self._content})"


# --- gradients that wait ------------------------------------------------------------


class Waiting(NamedTuple):
    """Gradients that wait for the last one of a step.

    Attributes:
      capacity_bytes: Memory for those that stay there.
      on_drive: The others, which go to a drive, and their bytes.
    """

    capacity_bytes: int
    on_drive: Mapping[Piece, int]


def waiting(sizes: Mapping[Piece, int], capacity_bytes: int) -> Waiting:
    """Chooses the gradients that wait in memory: in their order, as there is room."""
    left_bytes, on_drive = capacity_bytes, dict[Piece, int]()
    for piece, num_bytes in sizes.items():
        if num_bytes > left_bytes:
            on_drive[piece] = num_bytes
        else:
            left_bytes -= num_bytes
    return Waiting(capacity_bytes, on_drive)


def file_bytes(planned: Waiting) -> int:
    """Returns the bytes of all that go to the file, in whole pages."""
    return sum(map(page_ceil, planned.on_drive.values()))


class Spill:
    """Holds gradients until they are dropped. Used from one thread at a time.

    An array that it returns stays valid for as long as someone refers to it.

    Args:
      scratch: Files for gradients that go to drives, closed with this.

    Attributes:
      kept_bytes: The most bytes in memory since `reset`.
      written_bytes: Bytes written to the file since then, in whole pages.
    """

    def __init__(self, scratch: Scratch, planned: Waiting) -> None:
        self._scratch = scratch
        own = planned.on_drive
        self._places = dict(zip(own, scratch.allocate(own.values()), strict=True))
        self._held: dict[Piece, jax.Array | Array | None] = {}  # None on a drive
        self.reset()

    def put(self, key: Piece, value: jax.Array | Array) -> None:
        """Takes a gradient; blocks while it is written.

        Raises:
          StoreSpaceError, StoreIOError: The drive is full, or failed.
        """
        assert key not in self._held, "a gradient leaves once"
        if key not in self._places:
            self._held[key] = value
            self._held_bytes += value.nbytes
            self.kept_bytes = max(self.kept_bytes, self._held_bytes)
            return
        parts, array = self._places[key], np.asarray(value, order="C")
        left = self._scratch.start_write(parts, array)
        self._scratch.jobs.wait_for(lambda: not left)
        self._held[key] = None
        self.written_bytes += place_bytes(parts)

    def read(self, *, removes: bool = False) -> Iterator[tuple[Piece, Array]]:
        """Yields all gradients, in the order in which they came.

        What is read ahead has as much memory as the largest of them.

        Args:
          removes: Whether to drop each, so that it is read for the last time.
        """
        keys = [*self._held]
        to_read = deque(key for key in keys if key in self._places)
        sizes = {key: place_bytes(self._places[key]) for key in to_read}
        room_bytes = max(sizes.values(), default=0)
        begun: deque[tuple[Array, Set[ScratchRun]]] = deque()
        for key in keys:
            while to_read and sizes[to_read[0]] <= room_bytes:
                first = to_read.popleft()
                parts, memory = self._places[first], aligned(sizes[first])
                begun.append((memory, self._scratch.start_read(parts, memory)))
                room_bytes -= sizes[first]
            value = self._held.pop(key) if removes else self._held[key]
            if value is not None:
                self._held_bytes -= value.nbytes if removes else 0
                yield key, np.asarray(value)
                continue
            memory, left = begun.popleft()
            self._scratch.jobs.wait_for(lambda left=left: not left)
            yield key, self._scratch.array(self._places[key], memory)
            del memory
            room_bytes += sizes[key]

    def reset(self) -> None:
        """Drops all gradients."""
        self._scratch.jobs.reset()
        self._held.clear()
        self._held_bytes = self.written_bytes = self.kept_bytes = 0

    def close(self) -> None:
        """Drops everything, and the file; idempotent."""
        self.reset()
        self._scratch.close()
