"""The lock: one writer, named, and free as soon as it is gone."""

import os
import signal
import subprocess
import sys

import pytest

from jaxinf.errors import StoreLockedError
from jaxinf.store import StoreLock

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


def test_another_process_is_named_and_its_death_frees_the_lock(tmp_path, holder):
    with pytest.raises(
        StoreLockedError, match=rf"locked by process {holder.pid} on .*"
    ):
        StoreLock(tmp_path)
    with pytest.raises(StoreLockedError, match=rf"kill {holder.pid}\), or use another"):
        StoreLock(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    StoreLock(tmp_path).release()


@pytest.mark.usefixtures("holder")
def test_a_holder_that_has_not_written_its_name(tmp_path):
    for text in (b"", b"{", b"7", b'{"pid": "x"}', b"\xff"):
        (tmp_path / "lock").write_bytes(text)
        with pytest.raises(StoreLockedError, match="process that is just starting"):
            StoreLock(tmp_path)


def test_a_stale_text_means_nothing(tmp_path):
    (tmp_path / "lock").write_text('{"pid": 1, "host": "h", "command": ["c"]}' * 9)
    lock = StoreLock(tmp_path)
    assert f'"pid": {os.getpid()}' in (tmp_path / "lock").read_text()
    lock.release()


def test_a_holder_takes_its_name_along(tmp_path):
    """The next one may be asked about before it has written its own."""
    lock = StoreLock(tmp_path)
    lock.release()
    assert not (tmp_path / "lock").read_bytes()


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


def test_no_descriptor_stays(tmp_path):
    before = os.listdir("/proc/self/fd")
    lock = StoreLock(tmp_path)
    with pytest.raises(StoreLockedError):
        StoreLock(tmp_path)
    lock.release()
    assert os.listdir("/proc/self/fd") == before
