"""The lock that gives a store its one writer.

Invariant: the lock is the kernel's (flock), so it dies with its holder; the text in the
file only names the holder for the message.
"""

import contextlib
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxinf.errors import StoreLockedError
from jaxinf.schema import SchemaError, check_json
from jaxinf.store.schemas import LOCK

__all__ = ["StoreLock", "lock_exclusively"]


class StoreLock:
    """Holds ``STORE/lock`` from construction until `release`.

    Raises:
      StoreLockedError: at once when another open store holds it, naming the holder.
    """

    def __init__(self, store_path: Path) -> None:
        path = store_path / "lock"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 4096, 0)
            os.close(self._fd)
            self._fd = -1
            raise StoreLockedError(
                f"{store_path}: expected to be the store's only writer, found it "
                f"locked by {_describe(holder)}"
            ) from error
        text = json.dumps(
            {"pid": os.getpid(), "host": socket.gethostname(), "command": sys.argv}
        )
        self._pid = os.getpid()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def release(self) -> None:
        """Gives the lock back; idempotent. In a forked child the parent keeps it."""
        if self._fd >= 0:
            if self._pid == os.getpid():
                # Else an error could name this process instead of the next holder.
                with contextlib.suppress(OSError):  # of a drive that is gone
                    os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


def _describe(holder: bytes) -> str:
    try:
        who = check_json(holder, LOCK)
    except SchemaError:
        return "a process that is just starting; try again"
    pid, host, command = who["pid"], who["host"], who["command"]
    if pid == os.getpid() and host == socket.gethostname():
        return "this very process; close the store that is already open first"
    line = command if isinstance(command, str) else " ".join(command)
    return (
        f"process {pid} on {host} ({line[:200]}); wait for it or stop it "
        f"(kill {pid}), or use another store"
    )


@contextlib.contextmanager
def lock_exclusively(path: Path) -> Iterator[None]:
    """Waits for and holds an flock on a file, which is made if missing."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
