"""What `jaxinf doctor` says of one directory: its file system and bandwidth.

Invariant: a failure becomes a `Problem` of that directory and does not affect others;
tests run in a temporary directory that is removed at the end.
"""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxinf.cli.host import Finding, Problem
from jaxinf.cli.probe import measure_bandwidth
from jaxinf.errors import StoreError
from jaxinf.terminal import format_bytes, format_count, format_rate
from jaxinf.transfer import supports_direct
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


def look_at_place(path: Path, file_bytes: int, progress: ProgressCallback) -> Finding:
    """Examines a directory; measures it with a file of that length, if any; blocks."""
    place = Finding(str(path))
    try:
        _examine(path, place, file_bytes, progress)
    except OSError as error:
        what = f"making a file here failed: {error.strerror}"
        remedy = "give a directory that this user can write, on a drive with free space"
        place.problems.append(Problem(what, remedy, is_fatal=True))
    except StoreError as error:
        what, _, remedy = str(error).rpartition("; ")
        place.problems.append(Problem(what, remedy, is_fatal=True))
    return place


def _examine(
    path: Path, place: Finding, file_bytes: int, progress: ProgressCallback
) -> None:
    facts, problems = place.facts, place.problems
    speed, lacking = None, set[str]()
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        remedy = "check the name" if path.exists() else f"mkdir -p {path}, or mount it"
        raise StoreError(f"{path}: expected a directory, found {found}; {remedy}")
    if mount := find_mount(path):
        facts["file system"] = f"{mount.filesystem} on {mount.source}"
        if mount.filesystem in ("tmpfs", "ramfs"):
            what = f"{mount.filesystem} is memory: state here is gone after a reboot"
            problems.append(Problem(what, "use a drive's file system"))
    total, _, free = shutil.disk_usage(path)
    params = format_count(free // _ADAM_STORED_BYTES)
    facts["free"] = f"{format_bytes(free)} of {format_bytes(total)}: {params} params "
    facts["free"] += "with Adam in fp32"
    with tempfile.TemporaryDirectory(prefix=".jaxinf-doctor-", dir=path) as name:
        for key, (has, what, is_needed) in _ABILITIES.items():
            if why := _refusal(has, Path(name)):
                remedy = "use a local file system such as ext4 or xfs"
                problems.append(Problem(f"no {what} ({why})", remedy, is_needed))
                lacking.add(key)
        num_bytes = min(file_bytes, free // _SHARE_OF_FREE)
        try:
            if file_bytes:
                speed = measure_bandwidth(Path(name), num_bytes, progress)
        except ValueError as error:
            problems.append(Problem(str(error), "free space, or give a larger --size"))
    if speed is not None:
        how = "buffered, so partly memory's" if "direct_io" in lacking else "direct"
        rates = map(format_rate, (speed.read, speed.write, speed.mixed))
        facts["bandwidth"] = "read {}, write {}, mixed {}".format(*rates)
        facts["bandwidth"] += f" ({how}, {format_bytes(speed.moved_bytes)} moved)"
        params = format_count(speed.mixed / _ADAM_STEP_BYTES)
        facts["means"] = f"{params} params/s with Adam in fp32"
        place.bandwidth = speed


def _refusal(has: Callable[[Path], bool], scratch: Path) -> str | None:
    """Returns why a file system lacks something; None if it has it."""
    try:
        return None if has(scratch) else "the file system refuses it"
    except OSError as error:
        return error.strerror or str(error)


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


def _can_link(scratch: Path) -> bool:
    (scratch / "one").touch()
    os.link(scratch / "one", scratch / "two")
    return True


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
    "hard_links": (_can_link, "hard links: no step can be kept or pinned", True),
    "symlinks": (_can_replace_symlink, "symlinks: no step can be committed", True),
    "locks": (_can_lock, "file locks (flock): two runs could write at once", True),
}
"""What is tried, what is lost without it, and whether a store needs it."""
