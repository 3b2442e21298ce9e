"""Finds the process that has a store open.

Invariant: this never takes the lock, not even for an instant, since a run that starts
at that moment would be refused.
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from jaxinf.errors import StoreError
from jaxinf.io import read_beneath
from jaxinf.schema import SchemaError, check_json
from jaxinf.store import LOCK

_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Writer:
    """The process that has a store open."""

    pid: int
    host: str
    command: tuple[str, ...]


def find_writer(store: Path, *, locks: Path = Path("/proc/locks")) -> Writer | None:
    """Finds the holder of ``STORE/lock``; None if no process of this machine holds it.

    The lock's file still names its last holder after it has ended, so the kernel's list
    of locks decides. The kernel may not know of a holder on another machine.
    """
    path = store / "lock"
    try:
        found = os.stat(path)
        who = check_json(read_beneath(store, path.name, _MOST_BYTES), LOCK)
        command = who["command"]
        words = (command,) if isinstance(command, str) else tuple(command)
        writer = Writer(who["pid"], who["host"], words)
    except (OSError, StoreError, SchemaError):
        return None
    if writer.host != socket.gethostname():
        return None
    try:
        held = _is_held(locks.read_text(), found, writer.pid)
    except OSError:
        held = Path(f"/proc/{writer.pid}").exists()
    return writer if held else None


def _is_held(locks: str, file: os.stat_result, pid: int) -> bool:
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
    for line in locks.splitlines():
        words = line.split()
        if len(words) < 6 or words[1] != "FLOCK":
            continue
        lock_device, _, inode = words[5].rpartition(":")
        if inode != str(file.st_ino):
            continue
        # On some file systems (btrfs) this device differs from that of stat.
        if lock_device == device or words[4] == str(pid):
            return True
    return False
