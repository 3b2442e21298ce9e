"""Gives a file a second name, without a copy of its bytes if possible.

Invariant: on a file system without hard links, files are copied with one log message.
"""

import errno
import fcntl
import logging
import os
import shutil
import uuid
from pathlib import Path

from jaxinf.transfer import check_regular
from jaxinf.transfer.failures import translated

_LOG = logging.getLogger("jaxinf")

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_FICLONE = 0x40049409
_said: set[int] = set()


def link_or_copy(source: Path, target: Path) -> None:
    """Gives a file a second name: a hard link, else a reflink, else a copy.

    Args:
      target: the new name, on the same file system; must not exist.

    Raises:
      StoreIOError, StoreSpaceError: the source is no file, or the file system refused.
    """
    with translated("hard link", source):
        check_regular(source, os.lstat(source))
    with translated(f"hard link of {source}", target):
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _say(source, "reflinked" if copy_file(source, target) else "copied")


def can_link(directory: Path) -> bool:
    """Whether a directory's file system has hard links."""
    name = f".link-{uuid.uuid4().hex}"
    first, second = directory / name, directory / f"{name}-2"
    try:
        first.touch()
        os.link(first, second)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    else:
        return True
    finally:
        first.unlink(missing_ok=True)
        second.unlink(missing_ok=True)


def copy_file(source: Path, target: Path) -> bool:
    """Copies a file, by a reflink if the file system supports it.

    Args:
      target: the copy; must not exist, and does not exist after an error.

    Returns:
      Whether the copy is a reflink.
    """
    try:
        with open(source, "rb", opener=_no_link) as old, target.open("xb") as new:
            try:
                fcntl.ioctl(new, _FICLONE, old.fileno())
            except OSError:
                shutil.copyfileobj(old, new, 1 << 22)
                return False
            return True
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def _say(source: Path, how: str) -> None:
    device = source.stat().st_dev
    if device not in _said:
        _said.add(device)
        _LOG.warning(
            "%s: its file system has no hard links; checkpoints and snapshots are %s "
            "there, which takes the time and the space of the data",
            source.parent,
            how,
        )
