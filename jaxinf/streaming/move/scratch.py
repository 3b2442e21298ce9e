"""Files without names, in which values and gradients wait on one or more drives.

    value ─► parts of up to 4 MiB ─► drive 0, drive 1, …, drive 0, …

Invariant: the files have no name, so they disappear with the process, however it ends,
and runs that share a folder never meet. They are never synced.
"""

import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinf.streaming.move.jobs import Jobs
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
        self._content = content
        self._drives = [str(folder) for folder in self._folders]
        self._jobs = [Jobs(f"jaxinf-{content}", num_threads) for _ in folders]
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
        self, parts: Sequence[ScratchRun], value: Array | jax.Array, what: object = ""
    ) -> Future[None]:
        """Starts to write a value, which may still be computed."""

        def write(part: ScratchRun) -> None:
            raw = raw_bytes(np.asarray(jax.block_until_ready(value)))
            self.write(part, raw, what)

        return self._start(write, parts)

    def start_read(
        self, parts: Sequence[ScratchRun], out: Array, what: object = ""
    ) -> Future[None]:
        """Starts to read a value into its memory, in whole pages."""
        return self._start(lambda part: self.read(part, out, what), parts)

    def _start(
        self, move: Callable[[ScratchRun], None], parts: Sequence[ScratchRun]
    ) -> Future[None]:
        """Returns the future of a move; it ends when each of the parts has."""
        whole: Future[None] = Future()
        found, guard = list[BaseException | None](), threading.Lock()

        def ended(moved: Future[None]) -> None:
            if moved.cancelled():
                whole.cancel()
                return
            with guard:
                found.append(moved.exception())
                is_last = len(found) == len(parts)
            if not is_last:
                return
            if (error := next(filter(None, found), None)) is not None:
                whole.set_exception(error)
            else:
                whole.set_result(None)

        for part in parts:
            self._jobs[part.drive].submit(partial(move, part), ended)
        return whole

    def drop(self) -> None:
        """Drops moves that have not begun; blocks until the others have ended."""
        for jobs in self._jobs:
            jobs.reset()

    def write(self, part: ScratchRun, raw: Array, what: object = "") -> None:
        """Writes a part of a value; blocks. Thread-safe.

        Args:
          raw: The whole value, `uint8`, contiguous.

        Raises:
          StoreSpaceError, StoreIOError: The drive is full, or failed.
        """
        if not hasattr(self._own, "memory"):
            self._own.memory = aligned(PART_BYTES)
        length = part.num_bytes
        padded = self._own.memory[: page_ceil(length)]
        padded[:length] = raw[part.start : part.stop]
        padded[length:] = 0
        self._move(write_from, part, padded, what)

    def read(self, part: ScratchRun, out: Array, what: object = "") -> None:
        """Reads a part into the whole value's memory; blocks. Thread-safe.

        Args:
          out: `uint8`, page-aligned, with room for the value in whole pages.

        Raises:
          StoreIOError: The drive failed.
        """
        length = page_ceil(part.num_bytes)
        self._move(read_into, part, out[part.start : part.start + length], what)

    def _move(self, call: Any, part: ScratchRun, memory: Array, what: object) -> None:
        drive, kind = part.drive, "read" if call is read_into else "write"
        place = {"drive": self._drives[drive], "num_bytes": len(memory)}
        with span(kind, (self._content, what), **place):
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
        for jobs in self._jobs:
            jobs.close()
        files, self._files = self._files, []
        for file in files:
            os.close(file)

    def _shown(self, drive: int) -> str:
        return f"{self._folders[drive]} (a file of {self._content})"


def raw_bytes(value: Array) -> Array:
    """Returns the bytes of an array, `uint8`; a copy if it is not contiguous."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
