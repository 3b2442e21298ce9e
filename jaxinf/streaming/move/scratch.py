"""Files without names, in which values and gradients wait on one or more drives.

    value ─► parts of up to 4 MiB ─► drive 0, drive 1, …, drive 0, …

Invariant: the files have no name, so they disappear with the process, however it ends,
and runs that share a folder never meet. They are never synced.
"""

import contextlib
import errno
import itertools
import os
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinf.streaming.move.workers import Workers
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

_NO_NAMELESS = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}


class Part(NamedTuple):
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


def place_bytes(parts: Sequence[Part]) -> int:
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
        self._workers = Workers([num_threads] * len(folders), f"jaxinf-{content}")
        self._own = threading.local()  # a thread's memory to write a part from
        self._opening = threading.Lock()
        self._files: list[int] = []
        self._reserved = [0] * len(folders)
        self.reset()

    # --- places --------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> tuple[Part, ...]:
        """Returns a place for a value; its parts take turns on the drives.

        Not thread-safe.
        """
        parts = []
        for start in range(0, max(num_bytes, 1), PART_BYTES):
            drive, stop = next(self._turns), min(start + PART_BYTES, num_bytes)
            parts.append(Part(drive, self._ends[drive], start, stop))
            self._ends[drive] += page_ceil(stop - start)
        return tuple(parts)

    def reserve(self) -> None:
        """Takes room on the drives for all places; blocks.

        Raises:
          StoreSpaceError, StoreIOError: A drive is full, or failed.
        """
        self._open()
        for drive, end in enumerate(self._ends):
            if end > self._reserved[drive]:
                with translated("reserving room", self._shown(drive)):
                    os.posix_fallocate(self._files[drive], 0, end)
                self._reserved[drive] = end

    def reset(self) -> None:
        """Gives up all places; the files keep their room for new ones."""
        self._ends = [0] * len(self._folders)
        self._turns = itertools.cycle(range(len(self._folders)))

    # --- moves ---------------------------------------------------------------------

    def start_write(
        self, parts: Sequence[Part], value: Array | jax.Array, what: object = ""
    ) -> list[Future[int]]:
        """Starts to write a value, which may still be computed; a future a part."""

        def write(part: Part) -> int:
            raw = raw_bytes(np.asarray(jax.block_until_ready(value)))
            return self.write(part, raw, what)

        return [self._workers.submit(p.drive, partial(write, p)) for p in parts]

    def start_read(
        self, parts: Sequence[Part], out: Array, what: object = ""
    ) -> list[Future[int]]:
        """Starts to read a value into its memory, in whole pages; a future a part."""
        return [
            self._workers.submit(p.drive, partial(self.read, p, out, what))
            for p in parts
        ]

    def drop(self) -> None:
        """Drops moves that have not begun; blocks until the others have ended."""
        self._workers.reset()

    def write(self, part: Part, raw: Array, what: object = "") -> int:
        """Writes a part of a value, and returns its bytes; blocks. Thread-safe.

        Args:
          raw: The whole value, `uint8`, contiguous.

        Raises:
          StoreSpaceError, StoreIOError: The drive is full, or failed.
        """
        self._open()
        if not hasattr(self._own, "memory"):
            self._own.memory = aligned(PART_BYTES)
        length = part.num_bytes
        padded = self._own.memory[: page_ceil(length)]
        padded[:length] = raw[part.start : part.stop]
        padded[length:] = 0
        self._move(write_from, part, padded, what)
        return length

    def read(self, part: Part, out: Array, what: object = "") -> int:
        """Reads a part into the whole value's memory; blocks. Thread-safe.

        Args:
          out: `uint8`, page-aligned, with room for the value in whole pages.

        Raises:
          StoreIOError: The drive failed.
        """
        length = page_ceil(part.num_bytes)
        self._move(read_into, part, out[part.start : part.start + length], what)
        return part.num_bytes

    def _move(self, call: Any, part: Part, memory: Array, what: object) -> None:
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

    # --- files ---------------------------------------------------------------------

    def close(self) -> None:
        """Ends the threads and closes the files, which removes them; idempotent."""
        self._workers.close()
        files, self._files = self._files, []
        for file in files:
            os.close(file)
        self._reserved = [0] * len(self._folders)

    def _open(self) -> None:
        # One of the threads that write first; the others' parts would be lost.
        with self._opening, contextlib.ExitStack() as opened:
            if self._files:
                return
            files = []
            for drive, folder in enumerate(self._folders):
                with translated("making a file", self._shown(drive)):
                    files.append(_nameless(folder))
                opened.callback(os.close, files[-1])
            self._files = files
            opened.pop_all()

    def _shown(self, drive: int) -> str:
        return f"{self._folders[drive]} (a file of {self._content})"


def raw_bytes(value: Array) -> Array:
    """Returns the bytes of an array, `uint8`; a copy if it is not contiguous."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _nameless(folder: Path) -> int:
    """Opens a new file without a name, and returns its descriptor."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_NAMELESS or not folder.is_dir():
            raise
    descriptor, name = tempfile.mkstemp(prefix="values-", dir=folder)
    os.unlink(name)
    return descriptor
