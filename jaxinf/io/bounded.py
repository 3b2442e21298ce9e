"""Reads small, untrusted files as a whole.

Invariant: only regular files are opened, and only while they are read. The caller's
limit bounds the memory, whatever the file is.
"""

import os
import stat
from pathlib import Path

from jaxinf.errors import StoreIOError
from jaxinf.io.failures import translated
from jaxinf.typing import PathLikeStr

__all__ = ["MACHINE_MEMORY_BYTES", "check_holds", "check_regular", "read_bounded"]

MACHINE_MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""Limit of an array that is read as a whole."""

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: PathLikeStr, status: os.stat_result) -> None:
    """Refuses other than regular files, which may block, never end, or lead elsewhere.

    Args:
      path: the path, for the error.
      status: its status.

    Raises:
      StoreIOError: names the kind of the file.
    """
    if not stat.S_ISREG(status.st_mode):
        found = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise StoreIOError(
            f"{os.fspath(path)}: expected a regular file, found {found}, which is not "
            "read; something other than jaxinf put it there. Restore the file from a "
            "checkpoint or a backup"
        )


def check_holds(path: PathLikeStr, num_bytes: int) -> None:
    """Refuses a path unless it is a regular file of at least `num_bytes`.

    Raises:
      StoreIOError: names the kind or the length of the file.
    """
    with translated("read", path):
        status = os.stat(path)
    check_regular(path, status)
    if status.st_size < num_bytes:
        raise StoreIOError(
            f"{os.fspath(path)}: truncated: expected {num_bytes} bytes, found "
            f"{status.st_size}; restore it from a checkpoint, and run "
            '"jaxinf verify" to find what else is damaged'
        )


def read_bounded(
    path: PathLikeStr, most_bytes: int, *, follows_links: bool = True
) -> bytes:
    """Returns the content of a regular file; does not block on other kinds.

    Args:
      path: path of the file.
      most_bytes: limit of its length.
      follows_links: whether the path's last component may be a symbolic link.

    Raises:
      StoreIOError: the file is missing, too large or not regular, or the drive failed.
    """
    path = Path(path)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    with translated("read", path):
        # This comes before opening, because opening some devices has effects.
        check_regular(path, path.stat() if follows_links else path.lstat())
        fd = os.open(path, flags | (0 if follows_links else os.O_NOFOLLOW))
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            check_regular(path, status)
            content = b""
            if status.st_size <= most_bytes:
                # A read of `most_bytes` would allocate all of that at once.
                content = file.read(status.st_size + 1)
    if max(status.st_size, len(content)) > most_bytes:
        raise StoreIOError(
            f"{path}: expected a file of at most {most_bytes} bytes, found "
            f"{max(status.st_size, len(content))}; restore it from a checkpoint or a "
            "backup"
        )
    return content
