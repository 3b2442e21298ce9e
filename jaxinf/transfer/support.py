"""Finds file systems that support direct I/O, and warns about others.

Invariant: a file system is probed once and warned about once, for any number of threads
and directories.
"""

import errno
import logging
import mmap
import os
import secrets
import threading

from jaxinf.transfer.failures import translated
from jaxinf.transfer.pages import PAGE_BYTES
from jaxinf.typing import PathLikeStr

REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
"""Errors of a file system without direct I/O, at opening or at the first request."""

_LOGGER = logging.getLogger("jaxinf.transfer")
_NO_ANSWER = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}

_lock = threading.Lock()
_refusals: dict[int, OSError | None] = {}  # results of probes by st_dev
_warned: set[int] = set()


def supports_direct(directory: PathLikeStr) -> bool:
    """Returns whether a directory's file system supports direct I/O.

    The first call for a file system writes and removes a file of one page. If it lacks
    permission or room, direct I/O is assumed; refused requests fall back by themselves.

    Raises:
      StoreIOError: if the directory is missing or the drive failed.
    """
    return probed_refusal(directory) is None


def probed_refusal(directory: PathLikeStr) -> OSError | None:
    """Returns the error that refused direct I/O in a directory, or None."""
    with translated("probe of direct I/O", directory), _lock:
        device = os.stat(directory).st_dev
        if device in _refusals:
            return _refusals[device]
        try:
            _probe(directory)
        except OSError as error:
            if error.errno in _NO_ANSWER:
                return None
            if error.errno not in REFUSALS:
                raise
            return _refusals.setdefault(device, error.with_traceback(None))
        return _refusals.setdefault(device, None)


def _probe(directory: PathLikeStr) -> None:
    """Writes and reads a page with O_DIRECT; raises the file system's error."""
    name = f".jaxinf-probe-{os.getpid()}-{secrets.token_hex(4)}"
    path = os.path.join(directory, name)
    flags = os.O_RDWR | os.O_CLOEXEC
    os.close(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        fd = os.open(path, flags | os.O_DIRECT)
        try:
            with mmap.mmap(-1, PAGE_BYTES) as page:
                os.pwritev(fd, [page], 0)
                os.preadv(fd, [page], 0)
        finally:
            os.close(fd)
    finally:
        os.unlink(path)


def warn_once(device: int, directory: PathLikeStr, error: OSError) -> None:
    """Logs that direct I/O is refused, once for each `st_dev`."""
    with _lock:
        if device in _warned:
            return
        _warned.add(device)
    _LOGGER.warning(
        "%s: direct I/O is refused (%s); buffered I/O is used, which is slower and "
        "fills the page cache; put the store on a file system such as ext4 or xfs",
        os.fspath(directory),
        os.strerror(error.errno or 0),
    )
