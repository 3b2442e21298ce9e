"""Gives a file a second name, or makes a copy of it.

Invariant: no link is followed, and nothing is overwritten.
"""

import errno
import os
import shutil
from pathlib import Path

from jaxinf.errors import StoreIOError
from jaxinf.transfer import check_regular, translated

_REFUSED = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}


def link_file(source: Path, target: Path) -> None:
    """Gives a file a second name.

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
            if error.errno not in _REFUSED:
                raise
            raise StoreIOError(
                f"{source}: expected a file of this user's, on a file system with hard "
                f"links, of which checkpoints and snapshots consist: {error.strerror}; "
                "move the store to such a file system (ext4, xfs, btrfs)"
            ) from error


def copy_file(source: Path, target: Path) -> None:
    """Copies a file; the copy must not exist, and does not after an error."""
    try:
        with open(source, "rb", opener=_no_link) as old, target.open("xb") as new:
            shutil.copyfileobj(old, new, 1 << 22)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
