"""The directory of an export, which appears only when it is complete.

Invariant: nothing appears under the requested name until all of it is durable.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxinf.io import fsync_directory, sync_filesystem
from jaxinf.io.failures import translated
from jaxinf.store.space import check_free_space

_SLACK_BYTES = 1 << 20


@contextlib.contextmanager
def new_directory(destination: Path, num_bytes: int) -> Iterator[Path]:
    """Yields a temporary directory that is renamed at the end of the context.

    After an error it is removed with its content. Blocks at the end until everything is
    on the drive.

    Args:
      destination: must not exist; directories above it are made.

    Raises:
      FileExistsError: the name exists already.
      StoreSpaceError: the file system has less room; nothing was written.
      StoreIOError: the operating system refused something.
    """
    if os.path.lexists(destination):
        raise FileExistsError(
            f"{destination}: expected a name that is free, found something there; "
            "remove it, or export to another name"
        )
    with translated("creation", destination.parent):
        destination.parent.mkdir(parents=True, exist_ok=True)
    check_free_space(
        {destination.parent: num_bytes + _SLACK_BYTES},
        "the export takes up to",
        "free some, or export to another directory",
    )
    temporary = destination.with_name(
        f".{destination.name}.{secrets.token_hex(4)}.partial"
    )
    with translated("creation", temporary):
        temporary.mkdir()
    try:
        yield temporary
        sync_filesystem(temporary)
        with translated("renaming", destination):
            os.rename(temporary, destination)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_directory(destination.parent)
