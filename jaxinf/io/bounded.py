"""Small files read whole, of which nothing is believed.

Invariant: only regular files are opened, never for longer than a read takes; memory is
bounded by what the caller allows, not by what the file is.
"""

import os
import stat
from pathlib import Path

from jaxinf.errors import StoreIOError
from jaxinf.io.failures import translated
from jaxinf.typing import PathLikeStr

__all__ = ["check_holds", "check_regular", "read_bounded"]

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: PathLikeStr, status: os.stat_result) -> None:
    """Refuses what is no regular file: it may block, never end, or lead elsewhere.

    Args:
      path: for the error.
      status: of it.

    Raises:
      StoreIOError: says what it is.
    """
    if not stat.S_ISREG(status.st_mode):
        found = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise StoreIOError(
            f"{os.fspath(path)}: expected a regular file, found {found}, which is not "
            "read; something other than jaxinf put it there. Restore the file from a "
            "checkpoint or a backup"
        )


def check_holds(path: PathLikeStr, num_bytes: int) -> None:
    """Refuses what is no regular file, or has fewer bytes than are to be read.

    Raises:
      StoreIOError: says what it is.
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
    """The content of a regular file; blocks for no other.

    Args:
      path: of the file.
      most_bytes: that it may have.
      follows_links: whether its last component may be a symbolic link.

    Raises:
      StoreIOError: it is missing, larger, no regular file, or the drive failed.
    """
    path = Path(path)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    with translated("read", path):
        # Before it is opened: with some devices that alone does something.
        check_regular(path, path.stat() if follows_links else path.lstat())
        fd = os.open(path, flags | (0 if follows_links else os.O_NOFOLLOW))
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            check_regular(path, status)
            content = b""
            if status.st_size <= most_bytes:
                # Room for the most that it may have would be taken at once.
                content = file.read(status.st_size + 1)
    if max(status.st_size, len(content)) > most_bytes:
        raise StoreIOError(
            f"{path}: expected a file of at most {most_bytes} bytes, found "
            f"{max(status.st_size, len(content))}; restore it from a checkpoint or a "
            "backup"
        )
    return content
