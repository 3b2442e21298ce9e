"""Reads and writes that bypass the page cache, with a buffered fallback.

Invariant: a call moves all its bytes or raises; a file system that refuses direct I/O
  is used buffered, a symlink is not followed, and a pipe is not waited for. All
  functions block, release the GIL and are thread-safe; each call opens and closes its
  file.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxinf.errors import StoreIOError
from jaxinf.transfer.failures import translated
from jaxinf.transfer.meters import ByteMeters
from jaxinf.transfer.pages import PAGE_BYTES, page_ceil, page_floor
from jaxinf.transfer.support import REFUSALS, probed_refusal, warn_once
from jaxinf.typing import Array, PathLikeStr

# Paths of open files that may have no other name.
_OWN_DESCRIPTORS = "/proc/self/fd/"


@dataclass(frozen=True)
class _Transfer:
    """One request: the array's first bytes, at an offset of the file."""

    path: PathLikeStr
    writes: bool
    array: Array
    offset_bytes: int
    buffered: bool = True

    def run_pages(self, end: int) -> int:
        """Moves array[:end] directly, or buffered if that is refused."""
        if end == 0:
            return 0
        try:
            with self._opened(os.O_DIRECT) as fd:
                done = self._run(fd, 0, end, whole_pages=True)
            # A write that stopped within a page met a limit. Buffered I/O can continue
            # from that byte, and its error names the limit.
            return self.run_rest(done, end) if self.writes and done < end else done
        except OSError as error:
            if error.errno not in REFUSALS or not self.buffered:
                raise
            refusal = error
        with self._opened(0) as fd:
            done = self._run(fd, 0, end, whole_pages=False)
            directory = os.path.dirname(self.path) or "."
            warn_once(os.fstat(fd).st_dev, directory, refusal)
            return done

    def run_rest(self, start: int, end: int) -> int:
        """Moves array[start:end], buffered; writes are flushed."""
        if not self.buffered:
            raise OSError(errno.EINVAL, "no whole pages")
        with self._opened(0) as fd:
            done = self._run(fd, start, end, whole_pages=False)
            if self.writes:
                os.fdatasync(fd)
            return done

    @contextmanager
    def _opened(self, extra_flags: int) -> Iterator[int]:
        flags = (os.O_WRONLY if self.writes else os.O_RDONLY) | os.O_NONBLOCK
        if not os.fspath(self.path).startswith(_OWN_DESCRIPTORS):
            flags |= os.O_NOFOLLOW
        fd = os.open(self.path, flags | os.O_CLOEXEC | extra_flags)
        try:
            yield fd
        finally:
            os.close(fd)

    def _run(self, fd: int, start: int, end: int, *, whole_pages: bool) -> int:
        """Moves array[start:end]; returns where it stopped, which may be EOF."""
        call = os.pwritev if self.writes else os.preadv
        done = start
        while done < end:
            moved = call(fd, [self.array[done:end].data], self.offset_bytes + done)
            if whole_pages and moved % PAGE_BYTES:
                return done + moved  # a read stops within a page at EOF
            if moved == 0:
                break
            done += moved
        return done


def read_into(
    path: PathLikeStr,
    array: Array,
    offset_bytes: int,
    num_bytes: int,
    *,
    meters: ByteMeters | None = None,
    buffered: bool = True,
    shown: PathLikeStr | None = None,
) -> None:
    """Reads a part of a file into a buffer; blocks until done.

    If the buffer has room, the length is rounded up to whole pages, so the buffer
    receives more of the file. Otherwise the odd end is read buffered.

    Args:
      path: the file.
      array: uint8, 1-D, contiguous, page-aligned and writable: `Buffer.array` or a part
        of it that starts on a page.
      offset_bytes: position in the file, a multiple of the page.
      num_bytes: number of bytes, at most the array's length.
      meters: counts the bytes read.
      buffered: whether to use the page cache when direct I/O is refused.
      shown: the path in errors, for a file without a name.

    Raises:
      ValueError: if array, offset or length are not as described.
      StoreIOError: if the file is missing, too short, or the drive failed; or direct
        I/O was refused.
    """
    _check_request(path, array, offset_bytes, num_bytes)
    if not array.flags.writeable:
        raise ValueError(f"{os.fspath(path)}: expected a writable array to read into")
    end = page_ceil(num_bytes)
    if end > array.shape[0]:
        end = page_floor(num_bytes)
    transfer = _Transfer(path, False, array, offset_bytes, buffered)
    shown = path if shown is None else shown
    with translated("read", shown, offset_bytes):
        done = transfer.run_pages(end)
        if end <= done < num_bytes:
            done = transfer.run_rest(done, num_bytes)
        if done < num_bytes:
            raise StoreIOError(
                f"{os.fspath(shown)}: truncated: expected {offset_bytes + num_bytes} "
                f"bytes, found {os.stat(path).st_size}; restore it from a checkpoint, "
                'and run "jaxinf verify" to find what else is damaged'
            )
    if meters is not None:
        meters.add(drive_read_bytes=done)


def write_from(
    path: PathLikeStr,
    array: Array,
    offset_bytes: int,
    num_bytes: int,
    *,
    meters: ByteMeters | None = None,
    buffered: bool = True,
    shown: PathLikeStr | None = None,
) -> None:
    """Writes a buffer to a part of an existing file; blocks until it is copied.

    The buffer may be reused on return; the data is durable after `sync_filesystem`. The
    rest of the data's last page must be padding. If the file's length and a writable
    buffer have room, the length is rounded up to whole pages, and zeros follow the data
    in the buffer and in the file. Otherwise the odd end is written buffered and made
    durable at once.

    Args:
      path: the file, which exists.
      array: uint8, 1-D, contiguous and page-aligned.
      offset_bytes: position in the file, a multiple of the page.
      num_bytes: number of bytes, at most the array's length.
      meters: counts the bytes written.
      buffered: whether to use the page cache when direct I/O is refused.
      shown: the path in errors, for a file without a name.

    Raises:
      ValueError: if array, offset or length are not as described.
      StoreSpaceError: if there is no room.
      StoreIOError: if the file is missing or the drive failed; or direct I/O was
        refused.
    """
    _check_request(path, array, offset_bytes, num_bytes)
    with translated("write", path if shown is None else shown, offset_bytes):
        end = _written_pages(path, array, offset_bytes, num_bytes)
        transfer = _Transfer(path, True, array, offset_bytes, buffered)
        done = transfer.run_pages(end)
        if end <= done < num_bytes:
            done = transfer.run_rest(done, num_bytes)
        if done < num_bytes:
            raise OSError(errno.EIO, f"only {done} of {num_bytes} bytes were written")
    if meters is not None:
        meters.add(drive_write_bytes=done)


class DirectIO:
    """Reads and writes of the files under one directory. Thread-safe.

    Args:
      root_directory: relative paths start here.
      meters: counts the bytes moved.
      buffered: whether to use the page cache, after one warning, when direct I/O is
        refused.

    Attributes:
      root_directory: relative paths start here.
      direct: whether the file system supports direct I/O.

    Raises:
      StoreIOError: if the directory is missing or the drive failed.
    """

    def __init__(
        self,
        root_directory: PathLikeStr,
        meters: ByteMeters | None = None,
        *,
        buffered: bool = True,
    ) -> None:
        self.root_directory = Path(root_directory)
        self._options = {"meters": meters, "buffered": buffered}
        refusal = probed_refusal(self.root_directory)
        self.direct = refusal is None
        if refusal is not None and buffered:
            warn_once(self.root_directory.stat().st_dev, root_directory, refusal)

    def read(
        self, path: PathLikeStr, array: Array, offset_bytes: int, num_bytes: int
    ) -> None:
        """Like `read_into`, with the path taken from the root and the meters set."""
        full_path = os.path.join(self.root_directory, path)
        read_into(full_path, array, offset_bytes, num_bytes, **self._options)

    def write(
        self, path: PathLikeStr, array: Array, offset_bytes: int, num_bytes: int
    ) -> None:
        """Like `write_from`, with the path taken from the root and the meters set."""
        full_path = os.path.join(self.root_directory, path)
        write_from(full_path, array, offset_bytes, num_bytes, **self._options)


def _check_request(
    path: PathLikeStr, array: Array, offset_bytes: int, num_bytes: int
) -> None:
    found = None
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
        found = f"{array.dtype} of shape {array.shape}, strides {array.strides}"
    elif array.ctypes.data % PAGE_BYTES:
        found = f"an array at address {array.ctypes.data:#x}"
    elif offset_bytes < 0 or offset_bytes % PAGE_BYTES:
        found = f"an offset of {offset_bytes}"
    elif not 0 <= num_bytes <= array.shape[0]:
        found = f"{num_bytes} bytes of an array of {array.shape[0]}"
    if found is not None:
        raise ValueError(
            f"{os.fspath(path)}: expected a contiguous 1-D uint8 array on a page "
            f"boundary, an offset in whole pages of {PAGE_BYTES} and a length within "
            f"the array, found {found}; take the array from a BufferPool"
        )


def _written_pages(
    path: PathLikeStr, array: Array, offset_bytes: int, num_bytes: int
) -> int:
    """Returns the number of bytes to write in whole pages, and zeroes their padding."""
    end = page_ceil(num_bytes)
    if end == num_bytes:
        return end
    if end > array.shape[0] or not array.flags.writeable:
        return page_floor(num_bytes)
    if offset_bytes + end > os.stat(path).st_size:
        return page_floor(num_bytes)
    array[num_bytes:end] = 0
    return end
