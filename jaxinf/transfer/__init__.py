"""Bytes between drives and host memory: files, buffers, and who moves what when.

    tasks ──► mover: threads and waiting ──► units of work, which its user performs
                │  ▲
                ▼  │ the next unit
      queues, scheduling: plain data, no threads, locks or I/O

Invariant: memory stays within the budget that the user set, every byte moved is
counted once, and a failed call raises an error that names the file and the remedy.
"""

from jaxinf.transfer.beneath import (
    check_length,
    check_regular,
    open_beneath,
    read_beneath,
    read_bounded,
)
from jaxinf.transfer.checksums import crc32c, crc32c_combine
from jaxinf.transfer.direct import REFUSALS, read_into, supports_direct, write_from
from jaxinf.transfer.failures import (
    existing_parent,
    file_progress,
    store_error,
    translated,
)
from jaxinf.transfer.files import (
    allocate_file,
    fsync_directory,
    opened_to_write,
    sync_filesystem,
    write_at,
    write_box,
    write_bytes_atomically,
)
from jaxinf.transfer.memory import MACHINE_MEMORY_BYTES, free_memory
from jaxinf.transfer.meters import ByteCounts, ByteMeters
from jaxinf.transfer.mover import Failure, Mover
from jaxinf.transfer.pool import (
    PAGE_BYTES,
    Buffer,
    BufferPool,
    allocate_array,
    allocate_pages,
    huge_page_ceil,
    huge_page_floor,
    page_ceil,
    page_floor,
)
from jaxinf.transfer.queues import Queues
from jaxinf.transfer.spans import add_span, phase_totals, span
from jaxinf.transfer.tasks import (
    Compute,
    Limits,
    Load,
    Loads,
    Resident,
    Task,
    Unit,
    Write,
    idle,
)
