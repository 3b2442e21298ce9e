"""Files without names, in which values and gradients wait on one or more drives.

    value ─► parts of up to 4 MiB ─► drive 0, drive 1, …, drive 0, …

Invariant: what waits comes back with its bits. The files have no name, so they
disappear with the process, however it ends, and runs that share a folder never meet.
They are never synced.
"""

import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxinf.engine import Engine
from jaxinf.streaming.move.work_queues import Queue, WorkQueues
from jaxinf.transfer import (
    ByteMeters,
    allocate_pages,
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

_Key = TypeVar("_Key")


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
    """Files without names, one on each drive, with a queue of jobs each.

    Args:
      folders: A folder on each drive; none if there is no value to hold.
      content: What the files hold, for errors.
      num_threads: Number of each drive's threads.
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
        self._own = threading.local()  # a thread's memory to write a part from
        self._files: list[int] = []

    def allocate(self, sizes: Mapping[_Key, int]) -> dict[_Key, tuple[ScratchRun, ...]]:
        """Takes room for values of so many bytes; blocks. Called once.

        Returns:
          The place of each; the parts of all take turns on the drives.

        Raises:
          StoreSpaceError, StoreIOError: A drive is full, or failed.
        """
        places, ends = {}, [0] * len(self._folders)
        turns = itertools.cycle(range(len(self._folders)))
        for key, num_bytes in sizes.items():
            parts = []
            for start in range(0, max(num_bytes, 1), PART_BYTES):
                drive, stop = next(turns), min(start + PART_BYTES, num_bytes)
                parts.append(ScratchRun(drive, ends[drive], start, stop))
                ends[drive] += page_ceil(stop - start)
            places[key] = tuple(parts)
        try:
            for drive, end in enumerate(ends if places else ()):
                self._open(drive, end)
        except BaseException:
            self.close()
            raise
        return places

    def _open(self, drive: int, num_bytes: int) -> None:
        making = translated("making a file", self._shown(drive))
        with making, tempfile.TemporaryFile(dir=self._folders[drive]) as file:
            self._files.append(os.dup(file.fileno()))
        if num_bytes:
            with translated("reserving room", self._shown(drive)):
                os.posix_fallocate(self._files[drive], 0, num_bytes)

    # --- moves ---------------------------------------------------------------------

    def start(
        self,
        jobs: WorkQueues,
        move: Callable[[ScratchRun, Any], None],
        parts: Sequence[ScratchRun],
        array: Array | jax.Array,
        ended: Callable[[], None] = lambda: None,
    ) -> Callable[[], object]:
        """Starts to `write` a value, which may still be computed, or to `read` it.

        Args:
          array: The value, or memory for it in whole pages.
          ended: Called when all of it is there, on a thread with the lock of `jobs`.

        Returns:
          What blocks until all of it is there.
        """
        left = {*parts}

        def run(part: ScratchRun) -> None:
            move(part, array)
            with jobs.changed:
                left.remove(part)
                if not left:
                    ended()

        for part in parts:
            queue = Queue((self._content, part.drive), self._num_threads)
            jobs.submit(partial(run, part), queue)
        return partial(jobs.wait_for, lambda: not left)

    def write(self, part: ScratchRun, value: Array | jax.Array) -> None:
        """Writes a part of a value; blocks. Thread-safe.

        Raises:
          StoreSpaceError, StoreIOError: The drive is full, or failed.
        """
        if not hasattr(self._own, "memory"):
            self._own.memory = allocate_pages(PART_BYTES)
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
        file, shown = f"/proc/self/fd/{self._files[drive]}", self._shown(drive)
        with span(kind, drive=str(self._folders[drive])):
            offset, length = part.offset_bytes, len(memory)
            call(file, memory, offset, length, meters=self._meters, shown=shown)

    def close(self) -> None:
        """Closes the files, which removes them; no job may use them. Idempotent."""
        while self._files:
            os.close(self._files.pop())

    def _shown(self, drive: int) -> str:
        return f"{self._folders[drive]} (a file of {self._content})"


def store_scratch(engine: Engine, content: str = "activations") -> Scratch:
    """Returns files on the store's drives, for what waits there in a step."""
    folders, meters = engine.files.directory.csd_directories, engine.files.meters
    num_threads = 1 if content == "gradients" else THREADS_PER_DRIVE
    return Scratch(folders, meters, content=content, num_threads=num_threads)


def array_in(memory: Array, like: jax.ShapeDtypeStruct | Array) -> Array:
    """Returns the array of a value in the memory that it was read into."""
    num_bytes = like.size * like.dtype.itemsize
    return memory[:num_bytes].view(like.dtype).reshape(like.shape)
