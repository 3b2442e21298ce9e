"""Bytes between drives, host memory and devices.

    tasks ──► mover: threads and waiting ──► units of work, which its user performs
                │  ▲
                ▼  │ the next unit
      queues, scheduling: plain data, no threads, locks or I/O

Invariant: what stays in memory is decided from the order of uses, which is known.
"""

from jaxinf.transfer.cache import stays
from jaxinf.transfer.drive_monitor import DriveMonitor
from jaxinf.transfer.failure import Failure
from jaxinf.transfer.mover import Mover
from jaxinf.transfer.queues import Queues
from jaxinf.transfer.tasks import (
    Compute,
    Limits,
    Load,
    Loads,
    Resident,
    Task,
    Unit,
    Write,
)

__all__ = [
    "Compute",
    "DriveMonitor",
    "Failure",
    "Limits",
    "Load",
    "Loads",
    "Mover",
    "Queues",
    "Resident",
    "Task",
    "Unit",
    "Write",
    "stays",
]
