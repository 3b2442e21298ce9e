"""The page: the unit of direct I/O.

Invariant: file offsets, buffer addresses and lengths of direct I/O are whole pages.
"""

PAGE_BYTES = 4096


def page_floor(num_bytes: int) -> int:
    """Rounds down to whole pages."""
    return num_bytes - num_bytes % PAGE_BYTES


def page_ceil(num_bytes: int) -> int:
    """Rounds up to whole pages."""
    return num_bytes + -num_bytes % PAGE_BYTES
