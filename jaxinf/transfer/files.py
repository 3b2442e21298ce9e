"""Makes files, writes them, and makes them durable.

Invariant: a new file has all its room, or all its content, or is not there. Except
where an `OSError` is said to be raised, a function raises `StoreSpaceError` if there is
no room, and `StoreIOError` for any other refusal of the system.
"""

import contextlib
import ctypes
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxinf.layout import box_runs
from jaxinf.transfer.failures import translated
from jaxinf.transfer.pool import page_ceil
from jaxinf.typing import Array, PathLikeStr


def allocate_file(
    path: PathLikeStr, num_bytes_logical: int, num_bytes_allocated: int
) -> None:
    """Creates a file with room on the drive for its beginning, and a hole behind that.

    Blocks while the file system allocates. The file must not exist.

    Args:
      num_bytes_logical: Length of the file.
      num_bytes_allocated: Number of bytes to allocate now, rounded up to whole pages
        within the length; they read as zeros.
    """
    allocated = min(page_ceil(num_bytes_allocated), num_bytes_logical)
    with translated("allocation", path), _new_file(path) as fd:
        os.ftruncate(fd, num_bytes_logical)
        if allocated:
            os.posix_fallocate(fd, 0, allocated)


def write_bytes_atomically(path: PathLikeStr, content: bytes) -> None:
    """Writes a file so that a crash leaves the old or the new one.

    Blocks until it is durable. A temporary file beside it is removed on any error.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    with translated("write", path), _new_file(temporary) as fd:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.fsync(fd)
        os.replace(temporary, path)
    fsync_directory(path.parent)


def write_at(fd: int, values: Array, offset_bytes: int) -> None:
    """Writes a contiguous array to an open file; blocks. Raises OSError."""
    memory, done = values.reshape(-1).view(np.uint8).data, 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done:], offset_bytes + done)


def write_box(
    fd: int,
    shape: Sequence[int],
    start: Sequence[int],
    values: Array,
    offset_bytes: int = 0,
) -> None:
    """Writes a box of an array to an open file; blocks. Raises OSError.

    The array has this shape, in C order, and begins at `offset_bytes` of the file; the
    box's first element has the index `start`.
    """
    flat, done = values.reshape(-1), 0
    for place, length in box_runs(shape, start, values.shape):
        part = flat[done : done + length]
        write_at(fd, part, offset_bytes + place * flat.itemsize)
        done += length


def fsync_directory(path: PathLikeStr) -> None:
    """Blocks until the names in a directory are durable."""
    with translated("sync", path), opened(path, os.O_DIRECTORY) as fd:
        os.fsync(fd)


def sync_filesystem(directory: PathLikeStr) -> None:
    """Blocks until all data written to a directory's file system is durable.

    One call of `syncfs` serves any number of files. Delayed allocation may find no
    room only now.
    """
    with translated("sync", directory), opened(directory, os.O_DIRECTORY) as fd:
        if ctypes.CDLL(None, use_errno=True).syncfs(ctypes.c_int(fd)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


def opened_to_write(path: PathLikeStr) -> contextlib.AbstractContextManager[int]:
    """Opens an existing file for writing, which must not be a symlink; see `opened`."""
    return opened(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)


@contextlib.contextmanager
def opened(path: PathLikeStr, flags: int) -> Iterator[int]:
    """Yields a descriptor of a file. Raises OSError, which the caller translates."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _new_file(path: PathLikeStr) -> Iterator[int]:
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        try:
            yield fd
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            raise
