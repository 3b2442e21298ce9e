"""File systems for a single test: small ones, and ones that lose power.

Invariant: everything mounted is unmounted and its loop device freed at the end.
"""

import array
import fcntl
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

_EXT4_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32), linux/fs/ext4/ext4.h
_WITHOUT_FLUSHING_THE_LOG = 2


def _run(*command: object) -> None:
    subprocess.run([str(c) for c in command], check=True, capture_output=True)


@contextmanager
def tmpfs(path: Path, **options: object) -> Iterator[Path]:
    """A file system in memory at a new directory; `size` and `nr_inodes` limit it."""
    path.mkdir()
    words = ",".join(f"{key}={value}" for key, value in options.items())
    _run("mount", "-t", "tmpfs", "-o", words or "defaults", "none", path)
    try:
        yield path
    finally:
        _run("umount", "--lazy", path)


class Ext4:
    """An ext4 file system in a file, at a new directory."""

    def __init__(self, path: Path, num_bytes: int, *options: str) -> None:
        self.path = path
        self.image = path.with_name(f"{path.name}.img")
        with open(self.image, "wb") as file:
            file.truncate(num_bytes)
        _run("mkfs.ext4", "-q", "-m", 0, *options, self.image)
        path.mkdir()
        self.mount()

    def mount(self) -> None:
        _run("mount", "-o", "loop", self.image, self.path)

    def unmount(self) -> None:
        _run("umount", "--lazy", self.path)

    def cut_power(self) -> None:
        """Cuts the image off: nothing reaches it any more, not even the journal."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            word = array.array("I", [_WITHOUT_FLUSHING_THE_LOG])
            fcntl.ioctl(fd, _EXT4_SHUTDOWN, word)
        finally:
            os.close(fd)


def require(try_it: Callable[[Path], None]) -> None:
    """Skips a test if mounting fails, or fails it if mounting was promised."""
    try:
        with tempfile.TemporaryDirectory() as directory:
            try_it(Path(directory) / "probe")
    except (OSError, subprocess.CalledProcessError) as error:
        reason = f"cannot mount: {getattr(error, 'stderr', None) or error}"
        if os.environ.get("JAXINF_REQUIRE_MOUNTS") == "1":
            pytest.fail(f"JAXINF_REQUIRE_MOUNTS=1, but {reason}")
        pytest.skip(reason)


@pytest.fixture(scope="session")
def can_mount_tmpfs() -> None:
    def try_it(path: Path) -> None:
        with tmpfs(path, size="1m"):
            pass

    require(try_it)


@pytest.fixture(scope="session")
def can_mount_ext4() -> None:
    def try_it(path: Path) -> None:
        Ext4(path, 2 << 20).unmount()

    require(try_it)


@pytest.fixture
def mount_tmpfs(can_mount_tmpfs: None, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts tmpfs below the test's directory."""
    with ExitStack() as undo:
        yield lambda name, **options: undo.enter_context(
            tmpfs(tmp_path / name, **options)
        )


@pytest.fixture
def mount_ext4(can_mount_ext4: None, place: Path) -> Iterator[Callable[..., Ext4]]:
    """Mounts ext4 file systems whose images are in memory."""
    with ExitStack() as undo:

        def make(name: str, num_bytes: int = 32 << 20, *options: str) -> Ext4:
            made = Ext4(place / name, num_bytes, *options)
            undo.callback(made.unmount)
            return made

        yield make
