import ctypes
import errno
import os
import resource
import threading
from types import SimpleNamespace

import pytest
from inject import raising

from jaxinf.errors import StoreIOError, StoreSpaceError
from jaxinf.transfer import (
    allocate_file,
    failures,
    file_progress,
    fsync_directory,
    sync_filesystem,
    write_bytes_atomically,
)

PAGE = 4096


@pytest.mark.parametrize(
    ("logical", "allocated"),
    [(0, 0), (1, 1), (4095, 1), (4096, 4096), (4097, 4097), (1 << 20, 4097)],
)
def test_allocation(any_dir, logical, allocated):
    path = any_dir / "f"
    allocate_file(path, logical, allocated)
    status = path.stat()
    assert status.st_size == logical
    assert status.st_blocks * 512 == allocated + -allocated % PAGE
    assert not any(path.read_bytes())
    with pytest.raises(StoreIOError, match=r"EEXIST\); remove the file first"):
        allocate_file(path, 8192, 0)
    assert path.stat().st_size == logical


def test_allocation_beyond_a_limit_leaves_no_file(place):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, limits[1]))
    try:
        with pytest.raises(StoreSpaceError, match="ulimit -f"):
            allocate_file(place / "f", 2 * PAGE, 2 * PAGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    # On a tmpfs the kernel refuses at once and fills nothing.
    status = os.statvfs(place)
    if num_bytes := 2 * status.f_blocks * status.f_frsize:
        with pytest.raises(StoreSpaceError, match=r"allocation failed: .*; free space"):
            allocate_file(place / "f", num_bytes, num_bytes)
    assert not list(place.iterdir())


def test_a_new_file_replaces_the_old_one(any_dir):
    path = any_dir / "commit.json"
    write_bytes_atomically(path, b"one, long")
    write_bytes_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in any_dir.iterdir()] == ["commit.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_failures_leave_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / "commit.json"
    path.mkdir()
    with pytest.raises(StoreIOError, match=r"commit\.json: write failed.*EISDIR"):
        write_bytes_atomically(path, b"")
    path.rmdir()
    write_bytes_atomically(path, b"one")
    monkeypatch.setattr(os, "fsync", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        write_bytes_atomically(path, b"two")
    assert [entry.name for entry in tmp_path.iterdir()] == ["commit.json"]
    assert path.read_bytes() == b"one"


def test_syncing(any_dir):
    path = any_dir / "f"
    with pytest.raises(StoreIOError, match="ENOENT"):
        fsync_directory(path)
    path.write_text("x")
    fsync_directory(any_dir)
    sync_filesystem(any_dir)
    for sync in (fsync_directory, sync_filesystem):
        with pytest.raises(StoreIOError, match="ENOTDIR"):
            sync(path)


def test_a_failed_syncfs_is_raised(place, monkeypatch):
    class Library:
        def syncfs(self, fd):
            ctypes.set_errno(errno.EIO)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: Library())
    with pytest.raises(StoreIOError, match=r"sync failed.*EIO\); check the drive"):
        sync_filesystem(place)


def test_a_long_flush_is_progress_and_idleness_is_none(place, monkeypatch):
    clock = SimpleNamespace(now_s=1000.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr("jaxinf.transfer.failures.time", clock)
    idle = file_progress()
    clock.now_s += 5
    assert file_progress() == idle
    begun, may_end, fsync = threading.Event(), threading.Event(), os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (begun.set(), may_end.wait(60), fsync(fd))
    )
    thread = threading.Thread(target=fsync_directory, args=(place,))
    thread.start()
    assert begun.wait(60)
    before = file_progress()
    clock.now_s += 5
    assert file_progress() != before
    clock.now_s += failures._LONGEST_S
    stuck = file_progress()
    clock.now_s += 5
    assert file_progress() == stuck
    may_end.set()
    thread.join()
    assert file_progress() not in {idle, stuck}
