"""Translates errors of the operating system into errors with a remedy.

Invariant: no `OSError` about a store's file leaves this package untranslated.
"""

import errno
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxinf.errors import StoreError, StoreIOError, StoreSpaceError
from jaxinf.typing import PathLikeStr

_INODES_REMEDY = (
    "no inodes are left there: remove files, or make the file system with more of them"
)

_SPACE_REMEDIES = {
    errno.ENOSPC: "free space there, remove a checkpoint, or add a CSD",
    errno.EDQUOT: "raise the quota, or free space within it",
    errno.EFBIG: "raise the file-size limit (ulimit -f), or use another file system",
}

_REMEDIES = {
    errno.ENOENT: "restore it from a checkpoint, mount the drive, or undo a rename",
    errno.EACCES: "give this user access",
    errno.EPERM: "give this user access",
    errno.EROFS: "mount the file system writable",
    errno.EEXIST: "remove the file first if nothing needs it",
    errno.EIO: 'check the drive (dmesg, smartctl), then run "jaxinf verify"',
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOLCK: "use a local file system, or mount this one with locks",
}


def store_error(
    action: str, path: PathLikeStr, error: OSError, offset_bytes: int | None = None
) -> StoreError:
    """Returns `StoreSpaceError` if there was no room, else `StoreIOError`."""
    code = error.errno or 0
    where = "" if offset_bytes is None else f" at byte {offset_bytes}"
    why = os.strerror(code) if code else str(error) or type(error).__name__
    what = f"{os.fspath(path)}: {action}{where} failed: {why}"
    if code == errno.ENOSPC and _lacks_inodes(path):
        return StoreSpaceError(f"{what}; {_INODES_REMEDY}")
    if code in _SPACE_REMEDIES:
        return StoreSpaceError(f"{what}; {_SPACE_REMEDIES[code]}")
    name = f" ({errno.errorcode.get(code, code)})" if code else ""
    remedy = _REMEDIES.get(code, "check the path and the drive")
    return StoreIOError(f"{what}{name}; {remedy}")


def existing_parent(path: PathLikeStr) -> Path:
    """Returns the path, or the nearest parent that exists."""
    whole = Path(path).absolute()
    return next(one for one in (whole, *whole.parents) if one.exists())


def _lacks_inodes(path: PathLikeStr) -> bool:
    """Whether a full file system has bytes left, but no room for another file."""
    try:
        status = os.statvfs(existing_parent(path))
    except OSError:
        return False
    return status.f_files > 0 and status.f_favail == 0 and status.f_bavail > 0


@contextmanager
def translated(
    action: str, path: PathLikeStr, offset_bytes: int | None = None
) -> Iterator[None]:
    """Translates an `OSError` of the body into a `StoreError`."""
    global _last_ended
    call = next(_calls)
    _under_way[call] = time.monotonic()
    try:
        yield
    except OSError as error:
        raise store_error(action, path, error, offset_bytes) from error
    finally:
        del _under_way[call]
        _last_ended = call


_LONGEST_S = 600.0  # a call counts as progress for this long: a flush takes minutes
_calls = itertools.count(1)
_under_way: dict[int, float] = {}
_last_ended = 0


def file_progress() -> tuple[int, int]:
    """Returns numbers that change as long as this process works on files.

    They show work that no meter counts, such as a flush, or making a store.
    """
    now_s = time.monotonic()
    is_busy = any(now_s - began_s < _LONGEST_S for began_s in [*_under_way.values()])
    return _last_ended, int(now_s) if is_busy else 0
