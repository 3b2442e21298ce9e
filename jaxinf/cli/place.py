"""Examines one directory for `jaxinf doctor`: its file system and bandwidth.

Invariant: a failure becomes a `Problem` of that directory and does not affect others;
tests run in a temporary directory that is removed at the end.
"""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jaxinf.cli.host import Problem
from jaxinf.cli.probe import Bandwidth, measure_bandwidth
from jaxinf.errors import StoreError
from jaxinf.io import supports_direct
from jaxinf.store.links import can_link
from jaxinf.terminal import format_bytes, format_count, format_rate
from jaxinf.typing import ProgressCallback

_ADAM_STORED_BYTES = 24
"""Bytes of a param with Adam in fp32: three states of 4 bytes in two slots."""

_ADAM_STEP_BYTES = 20
"""Bytes that a step moves for each float32 param: 8 read, 12 written.

The params come with the gradients where they are in the host's memory, as on a CPU."""

_SHARE_OF_FREE = 4  # the temporary file takes at most a quarter of the free space


class Mount(NamedTuple):
    """A line of ``/proc/self/mounts``; `source` is a device, or stands for it."""

    source: str
    mount_point: str
    filesystem: str


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

    def to_rows(self) -> dict[str, str]:
        """For the terminal."""
        rows = {}
        if self.mount:
            rows["file system"] = f"{self.mount.filesystem} on {self.mount.source}"
        if self.total_bytes:
            free, total = format_bytes(self.free_bytes), format_bytes(self.total_bytes)
            params = format_count(self.free_bytes // _ADAM_STORED_BYTES)
            rows["free"] = f"{free} of {total}: {params} params with Adam in fp32"
        if speed := self.bandwidth:
            is_direct, size = (
                self.abilities["direct_io"],
                format_bytes(speed.moved_bytes),
            )
            how = "direct" if is_direct else "buffered, so partly memory's"
            read, write, mixed = map(
                format_rate, (speed.read, speed.write, speed.mixed)
            )
            rows["bandwidth"] = f"read {read}, write {write}, mixed {mixed} ("
            rows["bandwidth"] += f"{how}, {size} moved)"
            params = format_count(speed.mixed / _ADAM_STEP_BYTES)
            rows["means"] = f"{params} params/s with Adam in fp32"
        return rows


def look_at_place(path: Path, file_bytes: int, progress: ProgressCallback) -> Place:
    """Examines a directory; measures it with a file of that length, if any; blocks."""
    place = Place(path)
    try:
        _examine(place, file_bytes, progress)
    except OSError as error:
        what = f"making a file here failed: {error.strerror}"
        remedy = "give a directory that this user can write, on a drive with free space"
        place.problems.append(Problem(what, remedy, is_fatal=True))
    except StoreError as error:
        what, _, remedy = str(error).rpartition("; ")
        place.problems.append(Problem(what, remedy, is_fatal=True))
    return place


def _examine(place: Place, file_bytes: int, progress: ProgressCallback) -> None:
    path, problems = place.path, place.problems
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        remedy = "check the name" if path.exists() else f"mkdir -p {path}, or mount it"
        raise StoreError(f"{path}: expected a directory, found {found}; {remedy}")
    place.mount = find_mount(path)
    if place.mount and place.mount.filesystem in ("tmpfs", "ramfs"):
        what = f"{place.mount.filesystem} is memory: state here is gone after a reboot"
        problems.append(Problem(what, "use a drive's file system"))
    place.total_bytes, _, place.free_bytes = shutil.disk_usage(path)
    with tempfile.TemporaryDirectory(prefix=".jaxinf-doctor-", dir=path) as name:
        for key, (is_there, what, is_needed) in _ABILITIES.items():
            why = "the file system refuses it"
            try:
                place.abilities[key] = is_there(Path(name))
            except OSError as error:
                place.abilities[key], why = False, error.strerror
            if not place.abilities[key]:
                remedy = "use a local file system such as ext4 or xfs"
                problems.append(Problem(f"no {what} ({why})", remedy, is_needed))
        num_bytes = min(file_bytes, place.free_bytes // _SHARE_OF_FREE)
        try:
            if file_bytes:
                place.bandwidth = measure_bandwidth(Path(name), num_bytes, progress)
        except ValueError as error:
            problems.append(Problem(str(error), "free space, or give a larger --size"))


def find_mount(path: Path, *, mounts: Path = Path("/proc/self/mounts")) -> Mount | None:
    """Finds the mount of a path; None if the kernel does not list it."""
    real, above = path.resolve(), []
    for line in mounts.read_text().splitlines() if mounts.exists() else []:
        source, mount_point, filesystem = (
            re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), word)
            for word in line.split(" ")[:3]
        )
        if real.is_relative_to(mount_point):
            above.append(Mount(source, mount_point, filesystem))
    # Of several mounts at one place, the last one covers the others.
    return max(reversed(above), key=lambda one: len(one.mount_point), default=None)


def _can_replace_symlink(scratch: Path) -> bool:
    (scratch / "new").symlink_to("file")
    (scratch / "current").symlink_to("nowhere")
    os.replace(scratch / "new", scratch / "current")
    return os.readlink(scratch / "current") == "file"


def _can_lock(scratch: Path) -> bool:
    with (scratch / "file").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


_ABILITIES: dict[str, tuple[Callable[[Path], bool], str, bool]] = {
    "direct_io": (
        supports_direct,
        "direct I/O: buffered I/O is used, slower, and it fills the page cache",
        False,
    ),
    "hard_links": (can_link, "hard links: checkpoints and snapshots are copies", False),
    "symlinks": (_can_replace_symlink, "symlinks: no step can be committed", True),
    "locks": (_can_lock, "file locks (flock): two runs could write at once", True),
}
"""What is tried, what is lost without it, and whether a store needs it."""
