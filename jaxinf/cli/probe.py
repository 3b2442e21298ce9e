"""Measures the bandwidth of a drive, for `jaxinf doctor`.

    write  ─►  fsync  ─►  read  ─►  mixed: each thread reads a block, then writes one

Invariant: a drive's file has no name while it is measured, so it disappears however the
  process ends; each phase ends after a few seconds, however slow the drive is.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxinf.store import over
from jaxinf.transfer import (
    PAGE_BYTES,
    BufferPool,
    allocate_file,
    fsync_file,
    read_into,
    write_from,
)
from jaxinf.typing import Array, ProgressCallback

NUM_THREADS = 4
BLOCK_BYTES = 16 << 20
_MOST_S = 20.0  # of all phases of a drive together


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second of a file system, until durable.

    Attributes:
      moved_bytes: that it moved, in all phases.
      mixed: of reads and writes in equal parts.
    """

    moved_bytes: int
    read: float
    write: float
    mixed: float


def measure_bandwidth(
    scratch: Path, file_bytes: int, progress: ProgressCallback
) -> Bandwidth:
    """Measures with direct I/O, by at most three times the file's length; blocks.

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
    file_bytes, moved_bytes, rates = 2 * half * block_bytes, 0, dict[str, float]()
    arrays, path = _random_arrays(block_bytes), scratch / "data"
    allocate_file(path, file_bytes, file_bytes)
    with path.open("rb") as nameless:
        path.unlink()
        file = f"/proc/self/fd/{nameless.fileno()}"

        def read(block: int, array: Array) -> int:
            read_into(file, array, block * block_bytes, block_bytes)
            return block_bytes

        def write(block: int, array: Array) -> int:
            write_from(file, array, block * block_bytes, block_bytes)
            return block_bytes

        def mixed(block: int, array: Array) -> int:
            return read(block, array) + write(half + block, array)

        for transfer, num_blocks in (write, 2 * half), (read, 2 * half), (mixed, half):
            began_s, before = time.perf_counter(), moved_bytes
            for done in _moved(transfer, num_blocks, arrays):
                moved_bytes += done
                progress(moved_bytes, 3 * file_bytes)
            if transfer is not read:
                fsync_file(file)
            took_s = time.perf_counter() - began_s
            rates[transfer.__name__] = (moved_bytes - before) / took_s
    return Bandwidth(moved_bytes, **rates)


def _random_arrays(block_bytes: int) -> list[Array]:
    """Returns an array for each thread, of bytes that no drive can compress."""
    pool, rng = BufferPool(NUM_THREADS * block_bytes), np.random.default_rng()
    arrays = [pool.acquire(block_bytes).array for _ in range(NUM_THREADS)]
    for array in arrays:
        array[:] = np.frombuffer(rng.bytes(block_bytes), np.uint8)
    return arrays


def _moved(
    transfer: Callable[[int, Array], int], num_blocks: int, arrays: Sequence[Array]
) -> Iterator[int]:
    """Yields the bytes of each block that threads have moved, for seconds at most."""
    until_s, idle = time.perf_counter() + _MOST_S / 3, [*arrays]

    def one(block: int) -> int:
        if block >= NUM_THREADS and time.perf_counter() > until_s:
            return 0
        array = idle.pop()
        num_bytes = transfer(block, array)
        idle.append(array)
        return num_bytes

    yield from (done for _, done in over(range(num_blocks), one, NUM_THREADS))
