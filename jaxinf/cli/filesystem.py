"""Finds the file system of a directory, and tests its features.

Invariant: tests run in a temporary directory that is removed at the end.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxinf.io import supports_direct

__all__ = [
    "Abilities",
    "BlockDevice",
    "Mount",
    "find_block_device",
    "find_mount",
    "probe_abilities",
    "scratch_directory",
]

_ENOTSUP = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True)
class Mount:
    """A line of ``/proc/self/mountinfo``.

    Attributes:
      mount_point: the directory where it is mounted.
      fs_type: the file system's type: ``ext4``, ….
      source: the device, or the text that stands for it.
      is_read_only: whether the mount or the file system is read-only.
    """

    mount_point: str
    fs_type: str
    source: str
    is_read_only: bool


@dataclass(frozen=True)
class BlockDevice:
    """The drive under a file system.

    Attributes:
      name: as in ``/sys/block``.
      is_rotational: the kernel's information; often true for virtual drives.
    """

    name: str
    is_rotational: bool


@dataclass(frozen=True)
class Abilities:
    """Features of a file system; `refusals` has the error of each missing one."""

    direct_io: bool
    hard_links: bool
    symlinks: bool
    fallocate: bool
    locks: bool
    refusals: dict[str, str]


def find_mount(
    path: Path, *, mountinfo: Path = Path("/proc/self/mountinfo")
) -> Mount | None:
    """Finds the mount of a path; None if the kernel does not list it."""
    real = os.path.realpath(path)
    best: Mount | None = None
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        mount = _parse_mount(line)
        if mount is None or os.path.commonpath([mount.mount_point, real]) != (
            mount.mount_point
        ):
            continue
        # A later mount at the same place covers an earlier one.
        if best is None or len(mount.mount_point) >= len(best.mount_point):
            best = mount
    return best


def _parse_mount(line: str) -> Mount | None:
    left, separator, right = line.partition(" - ")
    before, after = left.split(), right.split()
    if not separator or len(before) < 6 or len(after) < 3:
        return None
    return Mount(
        mount_point=_unescape(before[4]),
        fs_type=after[0],
        source=_unescape(after[1]),
        is_read_only="ro" in before[5].split(",") or "ro" in after[2].split(","),
    )


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def find_block_device(
    path: Path, mount: Mount | None, *, sysfs: Path = Path("/sys")
) -> BlockDevice | None:
    """Finds the drive of a path; None for a file system without one."""
    numbers = [path.stat().st_dev]
    if mount is not None and mount.source.startswith("/dev/"):
        with contextlib.suppress(OSError):
            numbers.append(os.stat(mount.source).st_rdev)  # btrfs has its own st_dev
    for number in numbers:
        entry = sysfs / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
        if not entry.exists():
            continue
        drive = entry.resolve()
        if (drive / "partition").exists():
            drive = drive.parent
        with contextlib.suppress(OSError):
            text = (drive / "queue" / "rotational").read_text()
            return BlockDevice(drive.name, text.strip() == "1")
    return None


@contextlib.contextmanager
def scratch_directory(path: Path) -> Iterator[Path]:
    """Makes a temporary directory below `path`, and removes it with its content.

    Raises:
      OSError: no directory can be made there.
    """
    scratch = Path(tempfile.mkdtemp(prefix=".jaxinf-doctor-", dir=path))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def probe_abilities(scratch: Path) -> Abilities:
    """Tries each kind of file operation that a store needs.

    Args:
      scratch: an empty directory on the file system.

    Raises:
      OSError: an ordinary file cannot be written.
    """
    (scratch / "file").write_bytes(b"x")
    refusals: dict[str, str] = {}

    def can(name: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except OSError as error:
            refusals[name] = error.strerror or str(error)
            return False
        return True

    return Abilities(
        direct_io=supports_direct(scratch),
        hard_links=can("hard_links", lambda: _try_hard_link(scratch)),
        symlinks=can("symlinks", lambda: _try_symlink(scratch)),
        fallocate=can("fallocate", lambda: _try_fallocate(scratch)),
        locks=can("locks", lambda: _try_lock(scratch)),
        refusals=refusals,
    )


def _try_hard_link(scratch: Path) -> None:
    os.link(scratch / "file", scratch / "link")
    if (scratch / "file").stat().st_nlink != 2:
        raise OSError(errno.EOPNOTSUPP, "links are not counted")


def _try_symlink(scratch: Path) -> None:
    (scratch / "new").symlink_to("file")
    (scratch / "current").symlink_to("nowhere")
    os.replace(scratch / "new", scratch / "current")
    if os.readlink(scratch / "current") != "file":
        raise OSError(errno.EOPNOTSUPP, "a symlink cannot be replaced by rename")


def _try_fallocate(scratch: Path) -> None:
    """Makes the system call itself; the C library would write zeros as a fallback."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(scratch / "file", os.O_RDWR | os.O_CLOEXEC)
    try:
        start, length = ctypes.c_int64(0), ctypes.c_int64(8192)
        fallocate = getattr(libc, "fallocate64", libc.fallocate)
        if fallocate(ctypes.c_int(fd), ctypes.c_int(0), start, length):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(fd)


def _try_lock(scratch: Path) -> None:
    fd = os.open(scratch / "file", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)
