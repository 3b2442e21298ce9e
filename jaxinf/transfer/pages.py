"""The page, the unit of direct I/O; and the memory of the machine.

Invariant: file offsets, buffer addresses and lengths of direct I/O are whole pages.
"""

import os

PAGE_BYTES = 4096

MACHINE_MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""Limit of an array that is read as a whole."""


def page_floor(num_bytes: int) -> int:
    """Rounds down to whole pages."""
    return num_bytes - num_bytes % PAGE_BYTES


def page_ceil(num_bytes: int) -> int:
    """Rounds up to whole pages."""
    return num_bytes + -num_bytes % PAGE_BYTES
