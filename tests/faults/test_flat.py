"""A long run keeps no descriptors, threads or memory of earlier steps."""

import os
import threading
from pathlib import Path

from families import LONG
from store_driver import Driver

NUM_STEPS = 5000 if LONG else 300
WARM_UP = 50
GROWTH_BYTES = 8 << 20
NUM_IN_FLIGHT = 4
"""Files that prefetching workers may have open at any moment."""

LEAVES = {
    "bias": ((129,), "float32"),
    "embed": ((5, 1025), "float32"),
    "scale": ((), "float32"),
}


def resources():
    """Returns the numbers of open descriptors and threads, and resident bytes."""
    for thread in threading.enumerate():
        if thread.name == "jaxinf-commit":  # it has committed, and is about to end
            thread.join(60)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    num_fds = len(os.listdir("/proc/self/fd"))
    return num_fds, threading.active_count(), pages * os.sysconf("SC_PAGE_SIZE")


def test_steps_keep_nothing(place):
    driver = Driver(
        place / "store", LEAVES, memory_bytes=1 << 20, keep_steps=(0, 1)
    ).init()
    try:
        driver.steps(WARM_UP).store.wait()
        num_fds, num_threads, num_bytes = resources()
        for step in range(WARM_UP, NUM_STEPS):
            driver.step()
            if step % 100 == 0:
                driver.store.checkpoint()
        driver.store.wait()
        found = resources()
        assert found[0] <= num_fds + NUM_IN_FLIGHT
        assert found[1] == num_threads
        assert found[2] < num_bytes + GROWTH_BYTES
        assert len(os.listdir(place / "store" / "checkpoints")) == 1
    finally:
        driver.engine.close()
