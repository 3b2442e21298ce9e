"""Files without names, in which values and gradients wait on one or more drives.

    value ─► runs of up to 4 MiB ─► drive 0, drive 1, …, drive 0, …

Invariant: what waits comes back with its bits. The files have no name, so they
disappear with the process, however it ends, and steps that share a folder never meet.
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

MAX_RUN_BYTES = 4 << 20
"""The longest run of a value's bytes that is moved at once."""

THREADS_PER_DRIVE = 2

_Key = TypeVar("_Key")


class ScratchRun(NamedTuple):
    """A run of a value's bytes, and its page-aligned place in a drive's file."""

    drive: int
    offset_bytes: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def padded_bytes(runs: Sequence[ScratchRun]) -> int:
    """Returns the bytes that a value takes in memory and files, in whole pages."""
    return sum(page_ceil(run.num_bytes) for run in runs)


def writing_bytes(num_drives: int) -> int:
    """Returns the memory of the drives' threads, beside that of the values."""
    return num_drives * THREADS_PER_DRIVE * MAX_RUN_BYTES


class ScratchFiles:
    """Files without names, one in each drive's folder, with a queue of jobs each.

    Errors name the content. Without folders no value may go to drives.
    """

    def __init__(
        self,
        folders: Sequence[PathLikeStr],
        meters: ByteMeters | None = None,
        *,
        content: str = "activations",
    ) -> None:
        self._folders = [Path(folder) for folder in folders]
        self._meters = ByteMeters() if meters is None else meters
        self._content = content
        self._num_threads = 1 if content == "gradients" else THREADS_PER_DRIVE
        self._thread = threading.local()  # with memory to write a run from
        self._files: list[int] = []

    def allocate(self, sizes: Mapping[_Key, int]) -> dict[_Key, tuple[ScratchRun, ...]]:
        """Reserves room for values of these bytes; blocks. Called once.

        Returns the runs of each value; successive runs are on successive drives.

        Raises:
          StoreSpaceError, StoreIOError: A drive is full, or failed.
        """
        places, ends = {}, [0] * len(self._folders)
        turns = itertools.cycle(range(len(self._folders)))
        for key, num_bytes in sizes.items():
            runs = []
            for start in range(0, max(num_bytes, 1), MAX_RUN_BYTES):
                drive, stop = next(turns), min(start + MAX_RUN_BYTES, num_bytes)
                runs.append(ScratchRun(drive, ends[drive], start, stop))
                ends[drive] += page_ceil(stop - start)
            places[key] = tuple(runs)
        try:
            for drive, num_bytes in enumerate(ends if places else ()):
                self._open(drive, num_bytes)
        except BaseException:
            self.close()
            raise
        return places

    def _open(self, drive: int, num_bytes: int) -> None:
        making = translated("making a file", self._describe(drive))
        with making, tempfile.TemporaryFile(dir=self._folders[drive]) as file:
            self._files.append(os.dup(file.fileno()))
        if num_bytes:
            with translated("reserving room", self._describe(drive)):
                os.posix_fallocate(self._files[drive], 0, num_bytes)

    # --- moves ---------------------------------------------------------------------

    def start(
        self,
        jobs: WorkQueues,
        move: Callable[[ScratchRun, Any], None],
        runs: Sequence[ScratchRun],
        array: Array | jax.Array,
        on_moved: Callable[[], None] = lambda: None,
    ) -> Callable[[], object]:
        """Starts to `write` a value, which may still be computed, or to `read` it.

        Returns a function that blocks until all runs are moved.

        Args:
          array: The value, or memory for it in whole pages.
          on_moved: Called when all runs are moved, on a thread with the lock of `jobs`.
        """
        unmoved = {*runs}

        def move_run(run: ScratchRun) -> None:
            move(run, array)
            with jobs.changed:
                unmoved.remove(run)
                if not unmoved:
                    on_moved()

        for run in runs:
            queue = Queue((self._content, run.drive), self._num_threads)
            jobs.submit(partial(move_run, run), queue)
        return partial(jobs.wait_for, lambda: not unmoved)

    def write(self, run: ScratchRun, value: Array | jax.Array) -> None:
        """Writes a run of a value; blocks. Thread-safe.

        Raises:
          StoreSpaceError, StoreIOError: The drive is full, or failed.
        """
        if not hasattr(self._thread, "memory"):
            self._thread.memory = allocate_pages(MAX_RUN_BYTES)
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        length = run.num_bytes
        padded = self._thread.memory[: page_ceil(length)]
        padded[:length] = raw[run.start : run.stop]
        padded[length:] = 0
        self._move(write_from, run, padded)

    def read(self, run: ScratchRun, out: Array) -> None:
        """Reads a run into the whole value's memory; blocks. Thread-safe.

        Args:
          out: `uint8`, page-aligned, with room for the value in whole pages.

        Raises:
          StoreIOError: The drive failed.
        """
        length = page_ceil(run.num_bytes)
        self._move(read_into, run, out[run.start : run.start + length])

    def _move(self, call: Any, run: ScratchRun, memory: Array) -> None:
        drive, kind = run.drive, "read" if call is read_into else "write"
        file, name = f"/proc/self/fd/{self._files[drive]}", self._describe(drive)
        with span(kind, drive=str(self._folders[drive])):
            offset, length = run.offset_bytes, len(memory)
            call(file, memory, offset, length, meters=self._meters, shown=name)

    def close(self) -> None:
        """Closes the files, which removes them; no job may use them. Idempotent."""
        while self._files:
            os.close(self._files.pop())

    def _describe(self, drive: int) -> str:
        return f"{self._folders[drive]} (a file of {self._content})"


def scratch_files(engine: Engine, content: str = "activations") -> ScratchFiles:
    """Returns files on the store's drives for the values or gradients of a step."""
    folders, meters = engine.files.directory.csd_directories, engine.files.meters
    return ScratchFiles(folders, meters, content=content)


def array_in(memory: Array, like: jax.ShapeDtypeStruct | Array) -> Array:
    """Returns the value that was read into this memory."""
    num_bytes = like.size * like.dtype.itemsize
    return memory[:num_bytes].view(like.dtype).reshape(like.shape)
