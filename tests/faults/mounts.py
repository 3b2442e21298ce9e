"""File systems for a single test: small ones, and ones that lose power.

Invariant: everything mounted is unmounted and its loop device freed at the end.
"""

import array
import fcntl
import functools
import os
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

_EXT4_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32), linux/fs/ext4/ext4.h
_WITHOUT_FLUSHING_THE_LOG = 2


def _run(*command):
    subprocess.run([str(c) for c in command], check=True, capture_output=True)


@contextmanager
def tmpfs(path, **options):
    """A file system in memory at a new directory; `size` and `nr_inodes` limit it."""
    path.mkdir()
    words = ",".join(f"{key}={value}" for key, value in options.items())
    _run("mount", "-t", "tmpfs", "-o", words or "defaults", "none", path)
    try:
        yield path
    finally:
        _run("umount", "--lazy", path)


class Ext4:
    def __init__(self, path, num_bytes, *options):
        self.path = path
        self.image = path.with_name(f"{path.name}.img")
        with open(self.image, "wb") as file:
            file.truncate(num_bytes)
        _run("mkfs.ext4", "-q", "-m", 0, *options, self.image)
        path.mkdir()
        self.mount()

    def mount(self):
        _run("mount", "-o", "loop", self.image, self.path)

    def unmount(self):
        _run("umount", "--lazy", self.path)

    def cut_power(self):
        """Cuts the image off: nothing reaches it any more, not even the journal."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            word = array.array("I", [_WITHOUT_FLUSHING_THE_LOG])
            fcntl.ioctl(fd, _EXT4_SHUTDOWN, word)
        finally:
            os.close(fd)


@functools.cache
def why_not(kind):
    """Tries to mount a file system; returns why that fails, or nothing."""
    try:
        with tempfile.TemporaryDirectory() as directory:
            if kind == "ext4":
                Ext4(Path(directory) / "probe", 2 << 20).unmount()
            else:
                with tmpfs(Path(directory) / "probe", size="1m"):
                    pass
    except (OSError, subprocess.CalledProcessError) as error:
        return f"cannot mount: {getattr(error, 'stderr', None) or error}"
    return ""


def require(kind):
    """Skips a test if mounting fails, or fails it if mounting was promised."""
    if reason := why_not(kind):
        if os.environ.get("JAXINF_REQUIRE_MOUNTS") == "1":
            pytest.fail(f"JAXINF_REQUIRE_MOUNTS=1, but {reason}")
        pytest.skip(reason)


@pytest.fixture
def mount_tmpfs(tmp_path):
    require("tmpfs")
    with ExitStack() as undo:
        yield lambda name, **options: undo.enter_context(
            tmpfs(tmp_path / name, **options)
        )


@pytest.fixture
def mount_ext4(place):
    require("ext4")
    with ExitStack() as undo:

        def make(name, num_bytes=32 << 20, *options):
            made = Ext4(place / name, num_bytes, *options)
            undo.callback(made.unmount)
            return made

        yield make
