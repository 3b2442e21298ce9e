"""What these tests have in common: where stores lie, how long to take, how to step."""

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


def step_durably(driver) -> None:
    """One step of a run; raises what its commit raises."""
    driver.step()
    driver.store.wait()
