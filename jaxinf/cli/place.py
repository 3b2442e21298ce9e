"""Examines one directory for `jaxinf doctor`: its file system and bandwidth.

Invariant: a failure becomes a `Problem` of that directory and does not affect others;
tests run in a temporary directory that is removed at the end.
"""

import ctypes
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxinf.cli.bandwidth import NUM_THREADS, Bandwidth, measure_bandwidth
from jaxinf.cli.machine import Problem
from jaxinf.errors import StoreError
from jaxinf.io import supports_direct
from jaxinf.layout import PAGE_BYTES
from jaxinf.terminal import format_bytes
from jaxinf.typing import ProgressCallback

ADAM_STORED_BYTES = 24
"""Bytes of a param with Adam in fp32: three states of 4 bytes in two slots."""

ADAM_STEP_BYTES = 20
"""Bytes that a step moves for each float32 param: 8 read, 12 written.

The params come with the gradients where they are in the host's memory, as on a CPU."""

_SHARE_OF_FREE = 4  # the temporary file takes at most a quarter of the free space


class Mount(NamedTuple):
    """A line of ``/proc/self/mountinfo``; `source` is a device, or stands for it."""

    mount_point: str
    fs_type: str
    source: str


@dataclass
class Place:
    """A directory that could hold a store; None stands for what is not known."""

    path: Path
    mount: Mount | None = None
    free_bytes: int = 0
    total_bytes: int = 0
    abilities: dict[str, bool] = field(default_factory=dict)
    bandwidth: Bandwidth | None = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def is_usable(self) -> bool:
        """Whether a store can be made here."""
        return not any(problem.is_fatal for problem in self.problems)

    @property
    def adam_params(self) -> int:
        """Number of params with Adam in fp32 that fit into the free space."""
        return self.free_bytes // ADAM_STORED_BYTES

    @property
    def adam_params_per_s(self) -> float | None:
        """Params a second that the drive can update with Adam in fp32."""
        return self.bandwidth and self.bandwidth.mixed / ADAM_STEP_BYTES

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        mount, speed = self.mount, self.bandwidth
        return {
            "path": str(self.path),
            "usable": self.is_usable,
            "filesystem": mount and mount.fs_type,
            "mount_point": mount and mount.mount_point,
            "source": mount and mount.source,
            "free_bytes": self.free_bytes,
            "total_bytes": self.total_bytes,
            "adam_params": self.adam_params,
            **{name: self.abilities.get(name) for name in _TRIES},
            "bandwidth": speed
            and {
                "file_bytes": speed.file_bytes,
                "read_bytes_per_s": speed.read,
                "write_bytes_per_s": speed.write,
                "mixed_bytes_per_s": speed.mixed,
            },
            "adam_params_per_s": self.adam_params_per_s,
            "problems": [problem.to_json() for problem in self.problems],
        }


def look_at_place(path: Path, file_bytes: int, progress: ProgressCallback) -> Place:
    """Examines and measures a directory; blocks.

    Args:
      file_bytes: length of the temporary file; 0 for no measurement.
    """
    place = Place(path)

    def note(what: str, remedy: str, *, is_fatal: bool = False) -> None:
        place.problems.append(Problem(what, remedy, is_fatal))

    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        remedy = (
            "give a directory" if path.exists() else f"mkdir -p {path}, or mount it"
        )
        note(f"expected a directory, found {found}", remedy, is_fatal=True)
        return place
    place.mount = mount = find_mount(path)
    usage, status = shutil.disk_usage(path), os.statvfs(path)
    place.total_bytes, place.free_bytes = usage.total, status.f_bavail * status.f_frsize
    try:
        with tempfile.TemporaryDirectory(prefix=".jaxinf-doctor-", dir=path) as name:
            _test(place, Path(name))
            shortest = 2 * NUM_THREADS * PAGE_BYTES
            longest = place.free_bytes // _SHARE_OF_FREE
            if file_bytes and longest < shortest:
                free = format_bytes(place.free_bytes)
                remedy = f"free space; a store takes {ADAM_STORED_BYTES} bytes a param"
                note(f"{free} free: too little to measure with", remedy)
            elif file_bytes:
                num_bytes = min(file_bytes, longest)
                place.bandwidth = measure_bandwidth(Path(name), num_bytes, progress)
    except PermissionError:
        remedy = f"chown it to this user ({os.getuid()}), or give another directory"
        note("this user cannot write here", remedy, is_fatal=True)
    except (OSError, StoreError) as error:
        if mount is not None and status.f_flag & os.ST_RDONLY:
            remedy = f"mount -o remount,rw {mount.mount_point}"
            note("the file system is mounted read-only", remedy, is_fatal=True)
        else:
            text = error.strerror if isinstance(error, OSError) else str(error)
            remedy = (
                "give a directory on a local drive (ext4, xfs); if it is one, check "
            )
            remedy += "its free space and its health (dmesg, smartctl)"
            what = f"writing, reading or syncing a file failed: {text}"
            note(what, remedy, is_fatal=True)
    if mount is not None and mount.fs_type in ("tmpfs", "ramfs"):
        what = "is memory: state here offloads nothing and is gone after a reboot"
        note(f"{mount.fs_type} {what}", "use a drive's file system")
    return place


# --- the file system -----------------------------------------------------------------


def find_mount(
    path: Path, *, mountinfo: Path = Path("/proc/self/mountinfo")
) -> Mount | None:
    """Finds the mount of a path; None if the kernel does not list it."""
    real, best = os.path.realpath(path), None
    lines = mountinfo.read_text().splitlines() if mountinfo.exists() else []
    for line in lines:
        left, _, right = line.partition(" - ")
        before, after = left.split(), right.split()
        if len(before) < 6 or len(after) < 2:
            continue
        point, source = (
            re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
            for text in (before[4], after[1])
        )
        is_above = os.path.commonpath([point, real]) == point
        # A later mount at the same place covers an earlier one.
        if is_above and (best is None or len(point) >= len(best.mount_point)):
            best = Mount(point, after[0], source)
    return best


def _test(place: Place, scratch: Path) -> None:
    """Tries each kind of file operation that a store needs."""
    (scratch / "file").write_bytes(b"x")
    for name, (action, lost, is_fatal) in _TRIES.items():
        try:
            action(scratch)
        except OSError as error:
            reason = error.strerror or str(error)
            remedy = "use a local file system such as ext4 or xfs"
            place.problems.append(Problem(f"no {lost} ({reason})", remedy, is_fatal))
            place.abilities[name] = False
        else:
            place.abilities[name] = True


def _try_direct(scratch: Path) -> None:
    if not supports_direct(scratch):
        raise OSError(errno.EOPNOTSUPP, "the file system refuses it")


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
    fallocate = getattr(libc, "fallocate64", libc.fallocate)
    with (scratch / "file").open("r+b") as file:
        fd, start, length = file.fileno(), ctypes.c_int64(0), ctypes.c_int64(8192)
        if fallocate(ctypes.c_int(fd), ctypes.c_int(0), start, length):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _try_lock(scratch: Path) -> None:
    with (scratch / "file").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


_TRIES: dict[str, tuple[Callable[[Path], None], str, bool]] = {
    "direct_io": (
        _try_direct,
        "direct I/O: buffered I/O is used, slower, and it fills the page cache",
        False,
    ),
    "hard_links": (
        _try_hard_link,
        "hard links: snapshots and frozen params are not possible",
        False,
    ),
    "symlinks": (_try_symlink, "symlinks: no step can be committed", True),
    "fallocate": (
        _try_fallocate,
        "preallocation (fallocate): making a store is slow, and a run can find the "
        "drive full",
        False,
    ),
    "locks": (_try_lock, "file locks (flock): two runs could write at once", True),
}
"""What is tried, what is lost without it, and whether a store needs it."""
