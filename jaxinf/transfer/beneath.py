"""Opens files that a stranger's store names: below a directory, without links.

Invariant: no link below the directory is followed, only regular files are read, none of
them is waited for, and the caller's limit bounds the memory. A name with a part that is
no directory raises `StoreFormatError`; a file that is missing, too large or not
regular, or a failure of the drive, `StoreIOError`.
"""

import os
import stat
from pathlib import PurePath

from jaxinf.errors import StoreFormatError, StoreIOError
from jaxinf.transfer.failures import translated
from jaxinf.typing import PathLikeStr

_FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_beneath(root: PathLikeStr, name: PathLikeStr, flags: int = os.O_RDONLY) -> int:
    """Opens a regular file, or with `O_DIRECTORY` a directory; returns its descriptor.

    Args:
      root: An existing directory, to which links may lead.
      name: Relative path below it, on which there may be no link.

    Raises:
      StoreFormatError: As above, or the name leads out of the root.
      OSError: The operating system refused it; `FileNotFoundError` for a missing part.
    """
    *folders, last = parts = PurePath(name).parts
    if ".." in parts or os.path.isabs(name):
        raise StoreFormatError(
            f"{os.fspath(root)}: expected a name below it, found {os.fspath(name)!r}; "
            "restore the store's documents from a backup"
        )
    here = os.open(root, _FOLDER_FLAGS)
    try:
        for number, folder in enumerate(folders):
            above = here
            path = os.path.join(root, *parts[: number + 1])
            here = _open_folder(above, folder, _FOLDER_FLAGS, path)
            os.close(above)
        if flags & os.O_DIRECTORY:
            path = os.path.join(root, *parts)
            return _open_folder(here, last, flags | os.O_CLOEXEC, path)
        # Opening some devices has effects, so this comes before.
        status = os.stat(last, dir_fd=here, follow_symlinks=False)
        check_regular(os.path.join(root, *parts), status)
        return os.open(last, flags | _FILE_FLAGS | os.O_NOFOLLOW, dir_fd=here)
    finally:
        os.close(here)


def _open_folder(here: int, name: str, flags: int, path: str) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=here)
    except NotADirectoryError as error:
        status = os.stat(name, dir_fd=here, follow_symlinks=False)
        raise StoreFormatError(
            f"{path}: expected a directory of a jaxinf store, found {_kind(status)}, "
            "which jaxinf neither makes nor follows: find out who did, and remove it "
            "(a copy of a store that is made with cp -a is whole)"
        ) from error


def read_beneath(root: PathLikeStr, name: PathLikeStr, limit_bytes: int) -> bytes:
    """Returns the content of a file below a directory; see `open_beneath`."""
    path = os.path.join(root, name)
    with translated("read", path):
        return _read_whole(open_beneath(root, name), path, limit_bytes)


def read_bounded(path: PathLikeStr, limit_bytes: int) -> bytes:
    """Returns the content of a regular file, to which links may lead."""
    with translated("read", path):
        check_regular(path, os.stat(path))
        fd = os.open(path, os.O_RDONLY | _FILE_FLAGS)
        return _read_whole(fd, path, limit_bytes)


def _read_whole(fd: int, path: PathLikeStr, limit_bytes: int) -> bytes:
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        check_regular(path, status)
        content = b""
        if status.st_size <= limit_bytes:
            # A read of `limit_bytes` would allocate all of that at once.
            content = file.read(status.st_size + 1)
    num_bytes = max(status.st_size, len(content))
    if num_bytes > limit_bytes:
        raise StoreIOError(
            f"{os.fspath(path)}: expected a file of at most {limit_bytes} bytes, found "
            f"{num_bytes}; restore it from a checkpoint or a backup"
        )
    return content


def check_regular(path: PathLikeStr, status: os.stat_result) -> None:
    """Refuses what is no regular file: it may block, never end, or lead elsewhere."""
    if not stat.S_ISREG(status.st_mode):
        raise StoreIOError(
            f"{os.fspath(path)}: expected a regular file, found {_kind(status)}, which "
            "is not read; something other than jaxinf put it there. Restore the file "
            "from a checkpoint or a backup"
        )


def _kind(status: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(status.st_mode), "something else")


def check_length(root: PathLikeStr, name: PathLikeStr, num_bytes: int) -> None:
    """Refuses a name unless it is a regular file of at least `num_bytes`."""
    path = os.path.join(root, name)
    with translated("read", path):
        fd = open_beneath(root, name)
        try:
            length = os.fstat(fd).st_size
        finally:
            os.close(fd)
    if length < num_bytes:
        raise StoreIOError(
            f"{path}: truncated: expected {num_bytes} bytes, found {length}; restore "
            'it from a checkpoint, and run "jaxinf verify" to find what else is damaged'
        )
