"""Reads and writes that bypass the page cache.

Invariant: a call moves all its bytes or raises, follows no symlink, and waits for no
pipe. What a file system refuses to move directly goes through the page cache, which is
slower. All functions block, release the GIL and are thread-safe; each call opens and
closes its file. They raise `StoreSpaceError` if there is no room, and `StoreIOError` if
the file is missing or too short, the drive failed, or direct I/O was refused.
"""

import contextlib
import errno
import logging
import os
import secrets

from jaxinf.errors import StoreIOError
from jaxinf.transfer.failures import translated
from jaxinf.transfer.files import opened
from jaxinf.transfer.meters import ByteMeters
from jaxinf.transfer.pool import PAGE_BYTES, allocate_pages, page_ceil, page_floor
from jaxinf.typing import Array, PathLikeStr

REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
"""Errors of a file system without direct I/O, at opening or at the first request."""

_LOGGER = logging.getLogger("jaxinf.transfer")
_OWN_DESCRIPTORS = "/proc/self/fd/"  # of open files that may have no other name
_warned: set[int] = set()  # by st_dev


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
    """Reads a part of a file into a buffer, in whole pages; blocks until done.

    Args:
      array: ``uint8``, 1-D, contiguous, page-aligned and writable, with room for the
        whole last page.
      offset_bytes: Position in the file, a multiple of the page.
      num_bytes: Number of bytes; the array receives all of the last page.
      buffered: Whether to use the page cache when direct I/O is refused.
      shown: The path in errors, for a file without a name.
    """
    pages, shown = _pages(array, num_bytes), path if shown is None else shown
    with translated("read", shown, offset_bytes):
        done = _move(path, pages, offset_bytes, buffered=buffered, writes=False)
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
    file gets whole pages, with zeros behind the data. A file that ends within the last
    page, as that of a scalar does, keeps its length; this end goes through the page
    cache.

    Args:
      array: The data, as for `read_into`; its last page gets zeros behind them.
      offset_bytes, num_bytes, meters, buffered, shown: Arguments of `read_into`.
    """
    pages = _pages(array, num_bytes)
    pages[num_bytes:] = 0
    with translated("write", path if shown is None else shown, offset_bytes):
        if pages.size > num_bytes:
            length = os.stat(path).st_size - offset_bytes
            pages = pages if pages.size <= length else pages[:num_bytes]
        done = _move(path, pages, offset_bytes, buffered=buffered, writes=True)
        if done < num_bytes:
            raise OSError(errno.EIO, f"only {done} of {num_bytes} bytes were written")
    if meters is not None:
        meters.add(drive_write_bytes=done)


def _pages(array: Array, num_bytes: int) -> Array:
    end = page_ceil(num_bytes)
    assert end <= array.size, "a buffer has whole pages"
    return array[:end]


def supports_direct(directory: PathLikeStr) -> bool:
    """Whether a directory's file system supports direct I/O.

    Writes and removes a file of one page.
    """
    name = f".jaxinf-probe-{os.getpid()}-{secrets.token_hex(4)}"
    path = os.path.join(directory, name)
    with translated("probe of direct I/O", directory):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            try:
                page = allocate_pages(PAGE_BYTES)
                for writes in (True, False):
                    _move(path, page, 0, buffered=False, writes=writes)
            finally:
                os.unlink(path)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            return False
    return True


def _move(
    path: PathLikeStr, array: Array, offset_bytes: int, *, buffered: bool, writes: bool
) -> int:
    """Moves an array, its whole pages directly; returns the number of bytes moved.

    A write that stopped within a page met a limit. It goes on through the page cache,
    whose error names the limit.
    """
    access, done, refusal = os.O_WRONLY if writes else os.O_RDONLY, 0, None
    whole = array[: page_floor(array.size)]
    if whole.size:
        try:
            with _opened(path, access | os.O_DIRECT) as fd:
                done = _move_rest(fd, whole, 0, offset_bytes, writes, whole_pages=True)
        except OSError as error:
            if error.errno not in REFUSALS or not buffered:
                raise
            refusal = error
    if done < array.size and (writes or refusal):
        if not buffered:
            raise OSError(errno.EINVAL, "no whole pages")
        with _opened(path, access) as fd:
            done = _move_rest(fd, array, done, offset_bytes, writes)
            if writes and refusal is None:
                os.fdatasync(fd)  # before Linux 5.8 syncfs keeps the drive's errors
            if refusal is not None:
                device = os.fstat(fd).st_dev
                _warn_once(device, os.path.dirname(path) or ".", refusal)
    return done


def _move_rest(
    fd: int,
    array: Array,
    done: int,
    offset_bytes: int,
    writes: bool,
    *,
    whole_pages: bool = False,
) -> int:
    """Moves array[done:]; returns the number of bytes moved in all, at EOF fewer."""
    call = os.pwritev if writes else os.preadv
    while done < array.size:
        moved = call(fd, [array[done:].data], offset_bytes + done)
        done += moved
        if not moved or (whole_pages and moved % PAGE_BYTES):
            break  # a read stops within a page at EOF
    return done


def _opened(path: PathLikeStr, flags: int) -> contextlib.AbstractContextManager[int]:
    if not os.fspath(path).startswith(_OWN_DESCRIPTORS):
        flags |= os.O_NOFOLLOW
    return opened(path, flags | os.O_NONBLOCK)


def _warn_once(device: int, directory: PathLikeStr, error: OSError) -> None:
    if device in _warned:
        return
    _warned.add(device)
    _LOGGER.warning(
        "%s: direct I/O is refused (%s); buffered I/O is used, which is slower and "
        "fills the page cache; put the store on a file system such as ext4 or xfs",
        os.fspath(directory),
        os.strerror(error.errno or 0),
    )
