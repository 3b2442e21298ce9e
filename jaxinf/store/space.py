"""The space of chunk files on drives, and the check for room.

Invariant: space is refused before anything is written.
"""

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from jaxinf.errors import StoreSpaceError
from jaxinf.io import page_ceil
from jaxinf.layout import Chunk
from jaxinf.store.contents import StateRecord
from jaxinf.terminal import format_bytes


def stored_bytes(chunk: Chunk, state: StateRecord) -> int:
    """Returns the bytes of a chunk's file in one slot on the drive: whole pages."""
    if not chunk.num_elements:
        return 0
    num_elements = state.num_elements(chunk.num_elements)
    return page_ceil(num_elements * state.itemsize)


def check_free_space(needs: Mapping[Path, int], what: str, remedy: str) -> None:
    """Refuses needs for which file systems have no room.

    Args:
      needs: bytes below each directory, which need not exist.
      what, remedy: parts of the message.

    Raises:
      StoreSpaceError: names the file system, the bytes needed and the bytes free.
    """
    per_device: dict[int, list[tuple[Path, int]]] = defaultdict(list)
    for directory, need in needs.items():
        existing = _existing_parent(directory)
        per_device[existing.stat().st_dev].append((existing, need))
    for entries in per_device.values():
        need = sum(n for _, n in entries)
        status = os.statvfs(entries[0][0])
        free = status.f_bavail * status.f_frsize
        if need > free:
            raise StoreSpaceError(
                f"{entries[0][0]}: {what} {need:,} bytes ({format_bytes(need)}) "
                f"there, the file system has {free:,} free ({format_bytes(free)}); "
                f"{remedy}"
            )


def _existing_parent(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
