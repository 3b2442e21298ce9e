"""Examines one directory for `jaxinf doctor`.

Invariant: a failure becomes a `Problem` of that directory and does not affect others.
"""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinf.cli.bandwidth import (
    NUM_THREADS,
    Bandwidth,
    measure_bandwidth,
)
from jaxinf.cli.filesystem import (
    Abilities,
    BlockDevice,
    Mount,
    find_block_device,
    find_mount,
    probe_abilities,
    scratch_directory,
)
from jaxinf.cli.machine import Problem
from jaxinf.errors import StoreError
from jaxinf.layout import PAGE_BYTES
from jaxinf.terminal import format_bytes
from jaxinf.typing import ProgressCallback

__all__ = ["ADAM_STEP_BYTES", "ADAM_STORED_BYTES", "Place", "look_at_place"]

ADAM_STORED_BYTES = 24
"""Bytes of a param with Adam in fp32: three states of 4 bytes in two slots."""

ADAM_STEP_BYTES = 20
"""Bytes that a step moves for each float32 param: 8 read, 12 written.

The params come with the gradients where they are in the host's memory, as on a CPU."""

_SHARE_OF_FREE = 4  # the temporary file takes at most a quarter of the free space


@dataclass
class Place:
    """A directory that could hold a store.

    Attributes:
      path: the directory's absolute path.
      mount, block_device: its mount and drive, if known.
      free_bytes, total_bytes: free and total space of its file system.
      abilities: features of its file system; None if they could not be tested.
      bandwidth: the measured bandwidth; None if there was no measurement.
      problems: missing features and failures.
    """

    path: Path
    mount: Mount | None = None
    block_device: BlockDevice | None = None
    free_bytes: int = 0
    total_bytes: int = 0
    abilities: Abilities | None = None
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
        mount, drive, can = self.mount, self.block_device, self.abilities
        return {
            "path": str(self.path),
            "usable": self.is_usable,
            "filesystem": mount and mount.fs_type,
            "mount_point": mount and mount.mount_point,
            "source": mount and mount.source,
            "block_device": drive and drive.name,
            "rotational": drive and drive.is_rotational,
            "free_bytes": self.free_bytes,
            "total_bytes": self.total_bytes,
            "adam_params": self.adam_params,
            "direct_io": can and can.direct_io,
            "hard_links": can and can.hard_links,
            "symlinks": can and can.symlinks,
            "fallocate": can and can.fallocate,
            "locks": can and can.locks,
            "bandwidth": self.bandwidth
            and {
                "file_bytes": self.bandwidth.file_bytes,
                "read_bytes_per_s": self.bandwidth.read,
                "write_bytes_per_s": self.bandwidth.write,
                "mixed_bytes_per_s": self.bandwidth.mixed,
            },
            "adam_params_per_s": self.adam_params_per_s,
            "problems": [problem.to_json() for problem in self.problems],
        }


def look_at_place(path: Path, file_bytes: int, progress: ProgressCallback) -> Place:
    """Examines, tests and measures a directory; blocks until done.

    Args:
      path: the directory.
      file_bytes: length of the temporary file; 0 for no measurement.
      progress: called during the measurement.
    """
    place = Place(path)
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        remedy = (
            "give a directory" if path.exists() else f"mkdir -p {path}, or mount it"
        )
        place.problems.append(
            Problem(f"expected a directory, found {found}", remedy, is_fatal=True)
        )
        return place
    place.mount = find_mount(path)
    place.block_device = find_block_device(path, place.mount)
    usage = shutil.disk_usage(path)
    stat = os.statvfs(path)
    place.total_bytes = usage.total
    place.free_bytes = stat.f_bavail * stat.f_frsize
    try:
        with scratch_directory(path) as scratch:
            place.abilities = probe_abilities(scratch)
            place.problems += _ability_problems(place.abilities)
            place.bandwidth = _measure(place, scratch, file_bytes, progress)
    except (OSError, StoreError) as error:
        place.problems.append(_failed(place, error))
    place.problems += _drive_problems(place)
    return place


def _measure(
    place: Place, scratch: Path, file_bytes: int, progress: ProgressCallback
) -> Bandwidth | None:
    if not file_bytes:
        return None
    shortest = 2 * NUM_THREADS * PAGE_BYTES
    file_bytes = min(file_bytes, place.free_bytes // _SHARE_OF_FREE)
    if file_bytes < shortest:
        place.problems.append(
            Problem(
                f"{format_bytes(place.free_bytes)} free: too little to measure with",
                f"free some space; a store takes {ADAM_STORED_BYTES} bytes a param",
            )
        )
        return None
    return measure_bandwidth(scratch, file_bytes, progress)


def _failed(place: Place, error: Exception) -> Problem:
    if isinstance(error, PermissionError):
        return Problem(
            "this user cannot write here",
            f"chown it to this user ({os.getuid()}), or give another directory",
            is_fatal=True,
        )
    if place.mount is not None and place.mount.is_read_only:
        return Problem(
            "the file system is mounted read-only",
            f"mount -o remount,rw {place.mount.mount_point}",
            is_fatal=True,
        )
    text = error.strerror if isinstance(error, OSError) else str(error)
    return Problem(
        f"writing, reading or syncing a file failed: {text}",
        "give a directory on a local drive (ext4, xfs); if it is one, check its free "
        "space and its health (dmesg, smartctl)",
        is_fatal=True,
    )


def _ability_problems(can: Abilities) -> list[Problem]:
    local = "use a local file system such as ext4 or xfs"
    checks = [
        (can.symlinks, "symlinks", "symlinks: no step can be committed", True),
        (can.locks, "locks", "file locks (flock): two runs could write at once", True),
        (
            can.hard_links,
            "hard_links",
            "hard links: snapshots and frozen params are not possible",
            False,
        ),
        (
            can.fallocate,
            "fallocate",
            "preallocation (fallocate): making a store is slow, and a run can find the "
            "drive full",
            False,
        ),
        (
            can.direct_io,
            "direct_io",
            "direct I/O: buffered I/O is used, slower, and it fills the page cache",
            False,
        ),
    ]
    return [
        Problem(f"no {text}{_because(can, name)}", local, is_fatal)
        for works, name, text, is_fatal in checks
        if not works
    ]


def _because(can: Abilities, name: str) -> str:
    return f" ({can.refusals[name]})" if name in can.refusals else ""


def _drive_problems(place: Place) -> list[Problem]:
    problems = []
    if place.mount is not None and place.mount.fs_type in ("tmpfs", "ramfs"):
        problems.append(
            Problem(
                f"{place.mount.fs_type} is memory: state here offloads nothing and is "
                "gone after a reboot",
                "use a drive's file system",
            )
        )
    if place.block_device is not None and place.block_device.is_rotational:
        problems.append(
            Problem(
                f"{place.block_device.name} reports that it is a rotating disk",
                "use an NVMe drive; a virtual drive may report this for an SSD, so "
                "trust the measurement",
            )
        )
    return problems
