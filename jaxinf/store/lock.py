"""The locks of a store: for its writer, for flips, for its checkpoints.

Invariant: a lock is the kernel's (flock) and ends with its holder. A forked child has
no lock's descriptor, so it cannot hold a lock longer than its parent. A lock counts
only while the locked file has the lock's name.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from jaxinf.documents import DocumentError, decode
from jaxinf.errors import StoreError, StoreFormatError, StoreLockedError
from jaxinf.transfer import check_regular, read_beneath, store_error, translated


class Holder(msgspec.Struct, frozen=True):
    """The process that the file ``lock`` names, for messages only."""

    pid: Annotated[int, Meta(ge=1, le=2**32)]
    host: Annotated[str, Meta(max_length=256)]
    command: tuple[str, ...]


_NUM_ATTEMPTS = 1000  # to lock a file that others keep removing before it is locked
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LOCK_BYTES = 1 << 20
_IS_TAKEN = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES}

# Held while a descriptor is opened and noted, or closed, so that no fork comes between.
_GUARD = threading.RLock()
_OPEN: "set[LockFile]" = set()


class LockFile:
    """A file, made if missing, that is locked from construction until `close`.

    A forked child closes it: all descriptors of one opening share a lock, so with the
    child's copy the lock would outlive the parent. Without `waits` a lock that another
    opening holds is a BlockingIOError. A StoreError says that the file cannot be
    opened, is not a regular file, or that the file system has no locks.
    """

    def __init__(self, path: Path, *, waits: bool = True) -> None:
        self.path = path
        operation = fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB
        for _ in range(_NUM_ATTEMPTS):
            with _GUARD, translated("locking", path):
                self.fd = os.open(path, _FLAGS, 0o644)
                _OPEN.add(self)
            with contextlib.ExitStack() as undo:
                undo.callback(self.close)
                try:
                    self._status = os.fstat(self.fd)
                    check_regular(path, self._status)
                    fcntl.flock(self.fd, operation)
                    if self.is_in_place():
                        undo.pop_all()
                        return
                except OSError as error:
                    if error.errno in _IS_TAKEN:
                        raise BlockingIOError(*error.args) from error
                    raise store_error("locking", path, error) from error
        raise StoreFormatError(
            f"{path}: expected a lock that stays, found another file at each of "
            f"{_NUM_ATTEMPTS} attempts; use a store on a local file system"
        )

    def is_in_place(self) -> bool:
        """Whether the lock's name still leads to this file."""
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return False
        return os.path.samestat(status, self._status)

    def close(self) -> None:
        """Unlocks and closes the file; idempotent. A forked child has closed it."""
        with _GUARD:
            if self.fd >= 0:
                _OPEN.discard(self)
                # After a mere close it would stay locked while another descriptor is
                # open, such as that of a child between fork and exec.
                with contextlib.suppress(OSError):  # the drive may be gone
                    fcntl.flock(self.fd, fcntl.LOCK_UN)
                os.close(self.fd)
                self.fd = -1


def lock_exclusively(path: Path) -> contextlib.closing[LockFile]:
    """Waits for a lock, which the returned context releases; raises as `LockFile`."""
    return contextlib.closing(LockFile(path))


class StoreLock(LockFile):
    """Holds ``STORE/lock`` from construction until `release`; does not wait.

    Another open store that holds it is named by a StoreLockedError.
    """

    def __init__(self, store_path: Path) -> None:
        this = Holder(os.getpid(), socket.gethostname(), tuple(sys.argv))
        try:
            super().__init__(store_path / "lock", waits=False)
        except BlockingIOError as error:
            if (other := read_holder(store_path)) is None:
                holder = "a process that is just starting; try again"
            elif (other.pid, other.host) == (this.pid, this.host):
                holder = "this very process; close the store that is already open first"
            else:
                command = " ".join(other.command)[:200]
                holder = (
                    f"process {other.pid} on {other.host} ({command}); wait for it or "
                    f"stop it (kill {other.pid}), or use another store"
                )
            raise StoreLockedError(
                f"{store_path}: expected to be the store's only writer, found it "
                f"locked by {holder}"
            ) from error
        with contextlib.ExitStack() as undo, translated("locking", self.path):
            undo.callback(self.close)
            self._write(json.dumps(msgspec.to_builtins(this)))
            undo.pop_all()

    def check(self) -> None:
        """Raises StoreLockedError if another process could hold the lock as well."""
        if not self.is_in_place():
            raise StoreLockedError(
                f"{self.path}: expected the file that this process has locked, found "
                "it removed or replaced; another run may write to the store now, so "
                "this one commits nothing more. Make sure that one run is left, and "
                "open the store again; nothing needs that file removed"
            )

    def release(self) -> None:
        """Releases the lock; idempotent. A forked child leaves it to the parent."""
        if self.fd >= 0:
            # Otherwise an error could name this process instead of the next holder.
            with contextlib.suppress(OSError):  # the drive may be gone
                self._write("")
            self.close()

    def _write(self, text: str) -> None:
        """Replaces the file's text, unless it may be a link to a user's file."""
        start = os.pread(self.fd, 16, 0)
        is_ours = not start or start.startswith(b'{"pid": ')
        if is_ours or os.fstat(self.fd).st_nlink == 1:
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, text.encode(), 0)


def read_holder(store_path: Path) -> Holder | None:
    """Returns the process that ``STORE/lock`` names, if any; takes no lock."""
    try:
        return decode(read_beneath(store_path, "lock", _LOCK_BYTES), Holder)
    except (DocumentError, StoreError):
        return None


def _forget_all() -> None:
    """Closes all locks in a forked child; the parent's stay locked."""
    for file in _OPEN:
        os.close(file.fd)
        file.fd = -1
    _OPEN.clear()
    _GUARD.release()


os.register_at_fork(
    before=_GUARD.acquire,
    after_in_parent=_GUARD.release,
    after_in_child=_forget_all,
)
