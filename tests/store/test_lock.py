"""The lock: one writer, which is named; it is free as soon as the writer has ended."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from jaxinf.errors import (
    StoreFormatError,
    StoreIOError,
    StoreLockedError,
)
from jaxinf.store import StoreLock
from jaxinf.store.lock import LockFile, lock_exclusively

HOLDER = """
import sys, time
from pathlib import Path
from jaxinf.store.lock import StoreLock
lock = StoreLock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_same_process(tmp_path):
    lock = StoreLock(tmp_path)
    with pytest.raises(StoreLockedError, match="locked by this very process; close"):
        StoreLock(tmp_path)
    lock.release()
    lock.release()
    StoreLock(tmp_path).release()


@pytest.mark.long
def test_another_process_is_named_and_its_death_frees_the_lock(tmp_path, holder):
    said = rf"locked by process {holder.pid} on .*kill {holder.pid}\), or use another"
    with pytest.raises(StoreLockedError, match=said):
        StoreLock(tmp_path)
    for text in (b"", b"{", b"7", b'{"pid": "x"}', b"\xff"):  # no name yet
        (tmp_path / "lock").write_bytes(text)
        with pytest.raises(StoreLockedError, match="process that is just starting"):
            StoreLock(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    StoreLock(tmp_path).release()


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_forked_child_leaves_the_name(tmp_path):
    lock = StoreLock(tmp_path)
    child = os.fork()
    if not child:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(StoreLockedError, match="this very process"):
        StoreLock(tmp_path)
    lock.release()


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


# --- forks ---------------------------------------------------------------------------


def forked(path):
    """Forks a child that stays; returns its id, and its open files below a place."""
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        found = [os.readlink(link) for link in links if os.path.lexists(link)]
        os.write(tell, "\n".join(f for f in found if f.startswith(str(path))).encode())
        os.close(tell)
        signal.pause()
    os.close(tell)
    with open(told, "rb") as stream:
        return child, stream.read().decode()


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_child_forked_within_a_lock_has_no_part_in_it(tmp_path):
    path = tmp_path / "publish.lock"
    with lock_exclusively(path):
        child, found = forked(tmp_path)
    try:
        assert found == ""
        with open(path, "rb") as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


FORKING_HOLDER = """
import os, signal, sys
from pathlib import Path
from jaxinf.store.lock import StoreLock
lock = StoreLock(Path(sys.argv[1]))
child = os.fork()
if not child:
    print(os.getpid(), flush=True)  # it has no descriptor of the lock any more
    signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_that_outlives_its_parent_does_not_keep_the_store(tmp_path):
    command = [sys.executable, "-c", FORKING_HOLDER, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.wait()
        try:
            StoreLock(tmp_path).release()
        finally:
            os.kill(child, signal.SIGKILL)


# --- the file ------------------------------------------------------------------------


def test_a_lock_whose_file_was_removed_is_no_lock(tmp_path):
    lock = StoreLock(tmp_path)
    lock.check()
    (tmp_path / "lock").unlink()
    with pytest.raises(StoreLockedError, match="found it removed or replaced"):
        lock.check()
    other = StoreLock(tmp_path)
    with pytest.raises(StoreLockedError, match="found it removed or replaced"):
        lock.check()
    other.check()
    lock.release()
    other.check()
    other.release()


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


def test_a_file_that_is_never_in_place_ends_in_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(LockFile, "is_in_place", lambda self: False)
    with pytest.raises(StoreFormatError, match="does not tell files apart"):
        StoreLock(tmp_path)
    with (
        pytest.raises(StoreFormatError, match="does not tell files apart"),
        lock_exclusively(tmp_path / "publish.lock"),
    ):
        pass
