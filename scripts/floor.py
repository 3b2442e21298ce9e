"""The floor under an update: its reads and writes alone, by bare loops and by fio.

Invariant: a loop moves the same bytes as a step: the same files and subgroups, with as
  many threads, by direct I/O. It computes, checks and commits nothing, and may reorder
  reads and writes.
"""

import contextlib
import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ENGINES = ("libaio", "io_uring")
DEPTHS = (4, 8, 16, 32)
BLOCKS_MIB = (4, 16)
HUGE_BYTES = 2 << 20


@dataclass(frozen=True)
class Piece:
    """A run of whole pages of a file, to be read or written."""

    file: Path
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True)
class Transfer:
    """The reads and writes of a step for a subgroup."""

    reads: tuple[Piece, ...]
    writes: tuple[Piece, ...]


def moved_bytes(transfers: Sequence[Transfer]) -> tuple[int, int]:
    """Returns bytes read and bytes written."""
    return (
        sum(piece.num_bytes for t in transfers for piece in t.reads),
        sum(piece.num_bytes for t in transfers for piece in t.writes),
    )


def carried_s(transfers: Sequence[Transfer], num_workers: int) -> float:
    """Returns seconds if each worker reads a subgroup and then writes it."""
    return _run([_Lane(transfers)] * num_workers)


def split_s(transfers: Sequence[Transfer], num_workers: int) -> float:
    """Returns seconds if half of the workers read and the others write."""
    readers = _Lane([Transfer(t.reads, ()) for t in transfers])
    writers = _Lane([Transfer((), t.writes) for t in transfers])
    half = max(1, num_workers // 2)
    return _run([readers] * half + [writers] * max(1, num_workers - half))


LOOPS = {"loop, carried": carried_s, "loop, split": split_s}


class _Lane:
    """Transfers that some workers take in turn."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self._left = iter(transfers)
        self._lock = threading.Lock()
        pieces = [p.num_bytes for t in transfers for p in (*t.reads, *t.writes)]
        self.longest_bytes = max(pieces, default=mmap.PAGESIZE)

    def next(self) -> Transfer | None:
        """Returns a transfer that no worker has taken."""
        with self._lock:
            return next(self._left, None)


def _run(lanes: Sequence[_Lane]) -> float:
    """Runs one worker for each lane; returns the seconds until all are done."""
    errors: list[BaseException] = []

    def work(lane: _Lane, buffer: mmap.mmap) -> None:
        try:
            while (transfer := lane.next()) is not None:
                for piece in transfer.reads:
                    _move(piece, buffer, writes=False)
                for piece in transfer.writes:
                    _move(piece, buffer, writes=True)
        except BaseException as error:
            errors.append(error)

    buffers = [_buffer(lane.longest_bytes) for lane in lanes]
    workers = [
        threading.Thread(target=work, args=pair)
        for pair in zip(lanes, buffers, strict=True)
    ]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - began
    for buffer in buffers:
        buffer.close()
    if errors:
        raise errors[0]
    return seconds


def _buffer(num_bytes: int) -> mmap.mmap:
    """Returns huge pages, like the engine's, and touches them: no fault is timed."""
    rounded = -(-num_bytes // HUGE_BYTES) * HUGE_BYTES  # so it starts on a huge page
    buffer = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    for offset in range(0, num_bytes, mmap.PAGESIZE):
        buffer[offset] = 1
    return buffer


def _move(piece: Piece, buffer: mmap.mmap, *, writes: bool) -> None:
    flags = os.O_WRONLY if writes else os.O_RDONLY
    call = os.pwritev if writes else os.preadv
    fd = os.open(piece.file, flags | os.O_DIRECT | os.O_CLOEXEC)
    try:
        with memoryview(buffer) as view:
            done = 0
            while done < piece.num_bytes:
                part = view[done : piece.num_bytes]
                moved = call(fd, [part], piece.offset_bytes + done)
                part.release()
                if moved <= 0:
                    raise OSError(f"{piece.file}: ended at {piece.offset_bytes + done}")
                done += moved
    finally:
        os.close(fd)


@dataclass(frozen=True)
class FioJob:
    """One way to let fio move a step's mix of reads and writes."""

    engine: str
    depth: int
    block_mib: int

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"fio {self.engine}, depth {self.depth}, {self.block_mib} MiB"


def fio_jobs() -> list[FioJob]:
    """Returns all jobs to try; none if fio is not installed."""
    if shutil.which("fio") is None:
        return []
    return [
        FioJob(engine, depth, block)
        for engine in ENGINES
        for depth in DEPTHS
        for block in BLOCKS_MIB
    ]


def fio_bytes_per_s(
    job: FioJob, file: Path, file_bytes: int, read_share: float, seconds: float
) -> float | None:
    """Returns bytes a second, reads and writes together; None if fio cannot run it.

    Args:
      job: the job.
      file: its file; fio lays it out the first time, and it is kept.
      file_bytes: length of the file.
      read_share: share of reads in the bytes, from 0 to 1.
      seconds: duration, without the layout.
    """
    command = [
        "fio", "--name=floor", f"--filename={file}", f"--size={file_bytes}",
        "--direct=1", "--rw=rw", f"--rwmixread={round(100 * read_share)}",
        f"--ioengine={job.engine}", f"--iodepth={job.depth}",
        f"--bs={job.block_mib}m", "--time_based", f"--runtime={seconds}",
        "--fallocate=none", "--overwrite=1", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(found["read"]["bw_bytes"] + found["write"]["bw_bytes"])
