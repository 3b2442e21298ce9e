"""Finds the process that has a store open.

Invariant: this never takes the lock, not even for an instant, since a run that starts
at that moment would be refused.
"""

import os
import socket
from pathlib import Path

from jaxinf.documents import DocumentError, decode
from jaxinf.errors import StoreError
from jaxinf.io import read_beneath
from jaxinf.store import Holder

_MOST_BYTES = 1 << 20


def find_writer(store: Path, *, locks: Path = Path("/proc/locks")) -> Holder | None:
    """Finds the holder of ``STORE/lock``; None if no process of this machine holds it.

    The lock's file still names its last holder after it has ended, so the kernel's list
    of locks decides. The kernel may not know of a holder on another machine.
    """
    path = store / "lock"
    try:
        found = os.stat(path)
        writer = decode(read_beneath(store, path.name, _MOST_BYTES), Holder)
    except (OSError, StoreError, DocumentError):
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
