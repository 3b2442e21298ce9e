"""Where the stores of these tests lie, and how long the tests may take."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

LONG = os.environ.get("JAXINF_FAULTS") == "long"
"""Whether `make faults` runs, which takes its time."""


@contextlib.contextmanager
def memory_directory() -> Iterator[Path]:
    """A new directory in a tmpfs; on the temporary files' drive without one."""
    has_memory = os.access("/dev/shm", os.W_OK)
    path = tempfile.mkdtemp(dir="/dev/shm" if has_memory else None, prefix="jaxinf-")
    try:
        yield Path(path).resolve()
    finally:
        shutil.rmtree(path)
