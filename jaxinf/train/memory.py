"""The memory of this process, by tier.

Invariant: a figure that the system does not give is 0, or None of the JAX device.
"""

import contextlib
import os
import resource
import sys
from pathlib import Path

import jax


def rss_bytes() -> int:
    """Resident memory of this process now."""
    return _now_bytes() or peak_rss_bytes()


def peak_rss_bytes() -> int:
    """Returns the peak resident memory of this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return max(peak, _now_bytes())  # the kernel updates its peak only now and then


def device_bytes() -> int | None:
    """Memory in use on this process's JAX devices; None where it is the host's."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    used = [one["bytes_in_use"] for one in stats if one and "bytes_in_use" in one]
    return sum(used) if used else None


def _now_bytes() -> int:
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0
