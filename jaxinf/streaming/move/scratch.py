"""Files without names, in which values wait on one or more drives.

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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from jaxinf.store import drive_of
from jaxinf.transfer import ByteMeters, read_into, span, write_from
from jaxinf.transfer.failures import translated
from jaxinf.transfer.pages import page_ceil
from jaxinf.typing import Array, PathLikeStr

PART_BYTES = 4 << 20
"""The longest part of a value that is moved at once."""

Folders: TypeAlias = Sequence[PathLikeStr]
"""A folder on each drive."""

_NO_NAMELESS = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}
_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True)
class Part:
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


@dataclass(frozen=True)
class Place:
    """The parts of one value."""

    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that are moved each way, and memory for the value: whole pages."""
        return sum(page_ceil(part.num_bytes) for part in self.parts)


class Scratch:
    """Files without names, one on each drive. Thread-safe, but for `allocate`.

    Args:
      folders: A folder on each drive; none if there is no value to hold.
      content: What the files hold, for errors.
    """

    def __init__(
        self,
        folders: Folders,
        meters: ByteMeters | None = None,
        *,
        content: str = "activations",
    ) -> None:
        self._folders = [Path(folder) for folder in folders]
        self._meters = ByteMeters() if meters is None else meters
        self._content = content
        self._drives = [drive_of(folder) for folder in self._folders]
        self._files: list[int] = []
        self._ends = [0] * len(folders)
        self._reserved = [0] * len(folders)
        self._next_drive = itertools.cycle(range(len(folders)))
        self._opening = threading.Lock()

    @property
    def num_drives(self) -> int:
        return len(self._folders)

    def allocate(self, num_bytes: int) -> Place:
        """Returns a place for a value; its parts take turns on the drives."""
        parts = []
        for start in range(0, max(num_bytes, 1), PART_BYTES):
            drive, stop = next(self._next_drive), min(start + PART_BYTES, num_bytes)
            parts.append(Part(drive, self._ends[drive], start, stop))
            self._ends[drive] += page_ceil(stop - start)
        return Place(tuple(parts))

    def reserve(self) -> None:
        """Takes room on the drives for all places; blocks.

        Raises:
          StoreSpaceError, StoreIOError: A drive is full, or failed.
        """
        self._open()
        for drive, end in enumerate(self._ends):
            if end <= self._reserved[drive]:
                continue
            with translated("reserving room", self._shown(drive)):
                try:
                    os.posix_fallocate(self._files[drive], 0, end)
                except OSError as error:
                    if error.errno not in _NO_FALLOCATE:
                        raise
                    os.ftruncate(self._files[drive], end)
            self._reserved[drive] = end

    def reset(self) -> None:
        """Gives up all places; the files keep their room for new ones."""
        self._ends = [0] * len(self._folders)
        self._credit = [0.0] * len(self._folders)

    def write(self, part: Part, raw: Array, bounce: Array, what: object = "") -> None:
        """Writes a part of a value; blocks.

        Args:
          raw: The whole value, `uint8`, contiguous.
          bounce: Page-aligned memory for a part, which the drive reads.

        Raises:
          StoreSpaceError, StoreIOError: The drive is full, or failed.
        """
        self._open()
        length = part.num_bytes
        padded = bounce[: page_ceil(length)]
        padded[:length] = raw[part.start : part.stop]
        padded[length:] = 0
        with self._request("write", part.drive, length, what):
            write_from(
                self._path(part.drive),
                padded,
                part.offset_bytes,
                len(padded),
                meters=self._meters,
                shown=self._shown(part.drive),
            )

    def read(self, part: Part, out: Array, what: object = "") -> None:
        """Reads a part into the whole value's memory; blocks.

        Args:
          out: `uint8`, page-aligned, with room for the value in whole pages.

        Raises:
          StoreIOError: The drive failed.
        """
        length = page_ceil(part.num_bytes)
        target = out[part.start : part.start + length]
        with self._request("read", part.drive, length, what):
            read_into(
                self._path(part.drive),
                target,
                part.offset_bytes,
                length,
                meters=self._meters,
                shown=self._shown(part.drive),
            )

    def close(self) -> None:
        """Closes the files, which removes them; idempotent."""
        files, self._files = self._files, []
        for file in files:
            os.close(file)
        self._reserved = [0] * len(self._folders)

    def _open(self) -> None:
        # One of the threads that write first; the others' parts would be lost.
        with self._opening:
            if not self._files:
                self._make_files()

    def _make_files(self) -> None:
        with contextlib.ExitStack() as opened:
            files = []
            for drive, folder in enumerate(self._folders):
                with translated("making a file", self._shown(drive)):
                    files.append(_nameless(folder))
                opened.callback(os.close, files[-1])
            self._files = files
            opened.pop_all()

    def _path(self, drive: int) -> str:
        return f"/proc/self/fd/{self._files[drive]}"

    def _shown(self, drive: int) -> str:
        return f"{self._folders[drive]} (a file of {self._content})"

    def _request(
        self, kind: Literal["read", "write"], drive: int, num_bytes: int, what: object
    ) -> AbstractContextManager[None]:
        place = {"drive": self._drives[drive], "num_bytes": num_bytes}
        return span(kind, (self._content, what), **place)


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
