"""Free memory of the machine, or of the container that this process is in.

Invariant: what the system does not say limits nothing.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

MACHINE_MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""Limit of an array that is read as a whole."""

_LIMITS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the controller that /proc/self/cgroup names (none in version 2 of control groups):
the files of the limit and of the use, and the field of what is freed on demand."""


def free_memory(
    *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> tuple[int, str] | None:
    """Returns the bytes that this process may still take, and what limits them.

    None if the system does not say.
    """
    of_cgroups = _of_cgroups(proc / "self/cgroup", cgroups)
    return min([*_of_machine(proc / "meminfo"), *of_cgroups], default=None)


def _of_machine(meminfo: Path) -> Iterator[tuple[int, str]]:
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = meminfo.read_text().splitlines()
        sizes = dict(line.split(":") for line in lines)
        yield int(sizes["MemAvailable"].split()[0]) << 10, "the machine"


def _of_cgroups(groups: Path, mount: Path) -> Iterator[tuple[int, str]]:
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = groups.read_text().splitlines()
    for line in lines:
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        for name in set(controllers.split(",")) & _LIMITS.keys():
            # A container may see its own group as the root, with its path outside.
            inside = mount / name / path.lstrip("/")
            for group in (inside, *inside.parents):
                yield from _of_group(group, *_LIMITS[name])
                if group == mount / name:
                    break


def _of_group(
    group: Path, limit: str, used: str, freed: str
) -> Iterator[tuple[int, str]]:
    with contextlib.suppress(OSError, ValueError):  # "max", or a group without a limit
        limit_bytes = int((group / limit).read_text())
        used_bytes = int((group / used).read_text())
        lines = (group / "memory.stat").read_text().splitlines()
        stat = dict(line.split() for line in lines)
        free_bytes = max(0, limit_bytes - used_bytes + int(stat.get(freed, 0)))
        yield free_bytes, f"the limit of {limit_bytes} bytes in {group / limit}"
