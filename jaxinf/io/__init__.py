"""Direct file I/O, its aligned buffers, and what was moved and done: bytes and times.

Invariant: memory stays within the budget that the user set, every byte moved is
counted once, and a failed call raises an error that names the file and the remedy.
"""

from jaxinf.io.beneath import (
    check_holds,
    check_regular,
    open_beneath,
    read_beneath,
    read_bounded,
)
from jaxinf.io.buffers import Buffer, BufferPool
from jaxinf.io.checksums import crc32c, crc32c_combine
from jaxinf.io.direct import DirectIO, read_into, write_from
from jaxinf.io.failures import file_progress
from jaxinf.io.files import (
    allocate_file,
    fsync_directory,
    fsync_file,
    opened_to_write,
    sync_filesystem,
    write_bytes_atomically,
)
from jaxinf.io.memory import MACHINE_MEMORY_BYTES, free_memory
from jaxinf.io.meters import ByteCounts, ByteMeters
from jaxinf.io.pages import PAGE_BYTES, page_ceil
from jaxinf.io.spans import add_span, span, timeline
from jaxinf.io.support import supports_direct

__all__ = [
    "MACHINE_MEMORY_BYTES",
    "PAGE_BYTES",
    "Buffer",
    "BufferPool",
    "ByteCounts",
    "ByteMeters",
    "DirectIO",
    "add_span",
    "allocate_file",
    "check_holds",
    "check_regular",
    "crc32c",
    "crc32c_combine",
    "file_progress",
    "free_memory",
    "fsync_directory",
    "fsync_file",
    "open_beneath",
    "opened_to_write",
    "page_ceil",
    "read_beneath",
    "read_bounded",
    "read_into",
    "span",
    "supports_direct",
    "sync_filesystem",
    "timeline",
    "write_bytes_atomically",
    "write_from",
]
