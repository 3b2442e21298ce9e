"""What a directory's file system is and can do, by looking and by trying.

Invariant: what is tried is tried in a temporary directory that is gone at the end.
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
      mount_point: where it is mounted.
      fs_type: ``ext4``, ….
      source: the device, or whatever stands for one.
      is_read_only: of the mount or the file system.
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
      is_rotational: what the kernel believes; virtual drives often say they are.
    """

    name: str
    is_rotational: bool


@dataclass(frozen=True)
class Abilities:
    """What a file system can do; the first failure's text is in `refusals`."""

    direct_io: bool
    hard_links: bool
    symlinks: bool
    fallocate: bool
    locks: bool
    refusals: dict[str, str]


def find_mount(
    path: Path, *, mountinfo: Path = Path("/proc/self/mountinfo")
) -> Mount | None:
    """The mount that a path lies on; None where the kernel does not tell."""
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
    """The drive under a path; None for a file system without one."""
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
    """A temporary directory below `path`, removed with all that is in it.

    Raises:
      OSError: nothing can be made there.
    """
    scratch = Path(tempfile.mkdtemp(prefix=".jaxinf-doctor-", dir=path))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def probe_abilities(scratch: Path) -> Abilities:
    """Tries everything that a store does with files.

    Args:
      scratch: an empty directory on the file system.

    Raises:
      OSError: not even an ordinary file can be written.
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
    """The system call itself: the C library's function would write instead."""
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
