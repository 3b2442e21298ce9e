"""The lock: one writer, which is named; it is free as soon as the writer has ended."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from jaxinf.errors import StoreIOError, StoreLockedError
from jaxinf.store import StoreLock
from jaxinf.store.lock import LockFile

HOLDER = """
import os, signal, sys
from pathlib import Path
from jaxinf.store import StoreLock
lock = StoreLock(Path(sys.argv[1]))
if not os.fork():
    print(os.getpid(), flush=True)  # it has no descriptor of the lock any more
signal.pause()
"""


def test_same_process(tmp_path):
    lock = StoreLock(tmp_path)
    with pytest.raises(StoreLockedError, match="locked by this very process; close"):
        StoreLock(tmp_path)
    lock.release()
    lock.release()
    StoreLock(tmp_path).release()


def test_another_process_is_named_and_its_death_frees_the_lock(tmp_path):
    """Also if a child outlives it."""
    command = [sys.executable, "-c", HOLDER, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        child = int(holder.stdout.readline())
        try:
            said = (
                rf"locked by process {holder.pid} on .*kill {holder.pid}\), or use an"
            )
            with pytest.raises(StoreLockedError, match=said):
                StoreLock(tmp_path)
            for text in (b"", b"{", b"7", b'{"pid": "x"}', b"\xff"):  # no name yet
                (tmp_path / "lock").write_bytes(text)
                with pytest.raises(StoreLockedError, match="that is just start"):
                    StoreLock(tmp_path)
            holder.kill()
            holder.wait()
            StoreLock(tmp_path).release()
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "kind", "expected"),
    [
        (errno.EAGAIN, StoreLockedError, "locked by a process that is just starting"),
        (errno.EACCES, StoreLockedError, "locked by a process that is just starting"),
        (errno.ENOLCK, StoreIOError, "No locks available.*mount this one with locks"),
        (errno.EIO, StoreIOError, "Input/output error .EIO.; check the drive"),
    ],
)
def test_a_lock_that_is_refused_is_not_always_taken(
    tmp_path, monkeypatch, code, kind, expected
):
    def refuse(fd, flags):
        if flags != fcntl.LOCK_UN:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(kind, match=expected):
        StoreLock(tmp_path)


@pytest.mark.parametrize("name", ["lock", "publish.lock"])
def test_a_lock_that_is_no_file_of_ours(tmp_path, name):
    """A link is not followed, a pipe is not waited for, a user's file not written."""
    lock, victim = tmp_path / name, tmp_path / "victim"
    victim.write_text("mine")
    take = StoreLock if name == "lock" else lambda place: LockFile(place / name)
    lock.symlink_to(victim)
    with pytest.raises(StoreIOError, match="ELOOP"):
        take(tmp_path)
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(StoreIOError, match="found a named pipe"):
        take(tmp_path)
    lock.unlink()
    os.link(victim, lock)
    if name == "lock":
        StoreLock(tmp_path).release()
    assert victim.read_text() == "mine"
