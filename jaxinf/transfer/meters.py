"""Counters of the bytes that cross the drives and the host link.

Invariant: a counter only grows; a step's bytes are the difference of two snapshots.
"""

import threading
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class ByteCounts:
    """Bytes moved; `later - earlier` gives the bytes moved in between."""

    drive_read_bytes: int = 0  # from files, whole pages where direct I/O rounds up
    drive_write_bytes: int = 0  # to files, likewise
    link_down_bytes: int = 0  # over the host link to the CSDs: gradients
    link_up_bytes: int = 0  # over the host link from the CSDs: new params

    def __sub__(self, other: "ByteCounts") -> "ByteCounts":
        return ByteCounts(
            *(getattr(self, f.name) - getattr(other, f.name) for f in fields(self))
        )


class ByteMeters:
    """Running totals of `ByteCounts`. Thread-safe; no method blocks for long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = dict.fromkeys((f.name for f in fields(ByteCounts)), 0)

    def add(self, **moved_bytes: int) -> None:
        """Adds bytes that have moved, by the names of `ByteCounts`."""
        with self._lock:
            for name, count in moved_bytes.items():
                self._totals[name] += count

    def snapshot(self) -> ByteCounts:
        """Returns the totals of one moment."""
        with self._lock:
            return ByteCounts(**self._totals)
