"""A file system's bandwidth as a store uses it: direct I/O, large blocks, few threads.

    write  ─►  fsync  ─►  read  ─►  mixed: each thread reads a block, then writes one

Invariant: the file has no name during the measurement, so it disappears however the
  process ends; each thread has one block of memory.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxinf.io import BufferPool, allocate_file, fsync_file, read_into, write_from
from jaxinf.layout import PAGE_BYTES
from jaxinf.typing import Array, ProgressCallback

NUM_THREADS = 4
BLOCK_BYTES = 16 << 20
_POLL_S = 0.1
_LEAST_S = 1e-9  # what takes no time that can be measured

_Transfer = Callable[[int, Array], int]


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second.

    Attributes:
      write: bandwidth of writing alone, until durable.
      mixed: bandwidth of reads and writes in equal parts, until durable.
      taken_write, taken_mixed: the same until the drive has taken the writes, which may
        be in a cache of its own.
      flush: bandwidth at which it makes them durable then.
    """

    file_bytes: int
    read: float
    write: float
    mixed: float
    taken_write: float
    taken_mixed: float
    flush: float


class _Phase(NamedTuple):
    num_bytes: int
    taken_s: float
    flush_s: float

    @property
    def taken(self) -> float:
        return self.num_bytes / self.taken_s

    @property
    def durable(self) -> float:
        return self.num_bytes / (self.taken_s + self.flush_s)


def measure_bandwidth(
    scratch: Path, file_bytes: int, progress: ProgressCallback
) -> Bandwidth:
    """Measures by moving three times the file's length; blocks until done.

    Args:
      file_bytes: length of the temporary file; cut to an even number of blocks, of
        which each thread has at least two.

    Raises:
      ValueError: the file is too short to measure with.
      StoreError: no room, or the drive failed.
    """
    block_bytes = min(BLOCK_BYTES, file_bytes // (2 * NUM_THREADS))
    block_bytes -= block_bytes % PAGE_BYTES
    if block_bytes <= 0:
        raise ValueError(
            f"a file of {file_bytes} bytes is too short to measure with; give at least "
            f"{2 * NUM_THREADS * PAGE_BYTES} bytes"
        )
    half = file_bytes // (2 * block_bytes)
    run = _Run(block_bytes, total_bytes=6 * half * block_bytes, progress=progress)
    with _nameless_file(scratch, 2 * half * block_bytes) as file:

        def read(block: int, array: Array) -> int:
            read_into(file, array, block * block_bytes, block_bytes)
            return block_bytes

        def write(block: int, array: Array) -> int:
            write_from(file, array, block * block_bytes, block_bytes)
            return block_bytes

        def update(block: int, array: Array) -> int:
            return read(block, array) + write(half + block, array)

        written = run.timed(write, 2 * half, lambda: fsync_file(file))
        was_read = run.timed(read, 2 * half)
        mixed = run.timed(update, half, lambda: fsync_file(file))
    return Bandwidth(
        2 * half * block_bytes,
        was_read.durable,
        written.durable,
        mixed.durable,
        written.taken,
        mixed.taken,
        half * block_bytes / max(mixed.flush_s, _LEAST_S),
    )


@contextlib.contextmanager
def _nameless_file(scratch: Path, num_bytes: int) -> Iterator[str]:
    """Yields a path by which this process opens an unlinked file."""
    path = scratch / "data"
    allocate_file(path, num_bytes, num_bytes)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        path.unlink()
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


class _Run:
    """Phases over the blocks of one file, with a common progress."""

    def __init__(
        self, block_bytes: int, *, total_bytes: int, progress: ProgressCallback
    ) -> None:
        self._block_bytes = block_bytes
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._progress = progress
        self._lock = threading.Lock()

    def timed(
        self,
        transfer: _Transfer,
        num_blocks: int,
        finish: Callable[[], None] = lambda: None,
    ) -> _Phase:
        before = self._done_bytes
        blocks = iter(range(num_blocks))
        stop = threading.Event()
        pool = BufferPool(NUM_THREADS * self._block_bytes)
        with ThreadPoolExecutor(NUM_THREADS) as executor:
            arrays = [_random(pool, self._block_bytes) for _ in range(NUM_THREADS)]
            start = time.perf_counter()
            try:
                pending = {
                    executor.submit(self._work, transfer, blocks, array, stop)
                    for array in arrays
                }
                while pending:
                    done, pending = wait(pending, _POLL_S, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    self._progress(self._done_bytes, self._total_bytes)
                taken_s = time.perf_counter() - start
                finish()
            finally:
                stop.set()
        flush_s = time.perf_counter() - start - taken_s
        return _Phase(self._done_bytes - before, taken_s, flush_s)

    def _work(
        self,
        transfer: _Transfer,
        blocks: Iterator[int],
        array: Array,
        stop: threading.Event,
    ) -> None:
        while not stop.is_set():
            with self._lock:
                block = next(blocks, None)
            if block is None:
                return
            moved = transfer(block, array)
            with self._lock:
                self._done_bytes += moved


def _random(pool: BufferPool, num_bytes: int) -> Array:
    """Returns bytes that no drive can compress."""
    array = pool.acquire(num_bytes).array
    array.view(np.uint64)[:] = np.random.default_rng().integers(
        0, 2**64, num_bytes // 8, np.uint64
    )
    return array
