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
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

FIO = [("libaio", 16, "16m"), ("io_uring", 16, "16m"), ("io_uring", 32, "4m")]
"""Engine, depth and block size."""

HUGE_BYTES = 2 << 20


class Piece(NamedTuple):
    """A run of whole pages of a file, to be read or written."""

    file: Path
    offset_bytes: int
    num_bytes: int


class Transfer(NamedTuple):
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
    return _run([deque(transfers)] * num_workers)


def split_s(transfers: Sequence[Transfer], num_workers: int) -> float:
    """Returns seconds if half of the workers read and the others write."""
    readers = deque(Transfer(t.reads, ()) for t in transfers)
    writers = deque(Transfer((), t.writes) for t in transfers)
    half = max(1, num_workers // 2)
    return _run([readers] * half + [writers] * max(1, num_workers - half))


LOOPS = {"loop, carried": carried_s, "loop, split": split_s}


def _run(lanes: Sequence[deque[Transfer]]) -> float:
    """Runs one worker for each lane; returns the seconds until all are done."""
    pieces = [p.num_bytes for lane in lanes for t in lane for way in t for p in way]
    longest = max(pieces, default=mmap.PAGESIZE)
    with contextlib.ExitStack() as stack:
        buffers = [stack.enter_context(_buffer(longest)) for _ in lanes]
        workers = stack.enter_context(ThreadPoolExecutor(len(lanes)))
        began = time.perf_counter()
        for _ in workers.map(_move_all, lanes, buffers):
            pass
        return time.perf_counter() - began


def _buffer(num_bytes: int) -> mmap.mmap:
    """Returns huge pages, like the engine's, and touches them: no fault is timed."""
    rounded = -(-num_bytes // HUGE_BYTES) * HUGE_BYTES  # so it starts on a huge page
    buffer = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    for offset in range(0, num_bytes, mmap.PAGESIZE):
        buffer[offset] = 1
    return buffer


def _move_all(lane: deque[Transfer], buffer: mmap.mmap) -> None:
    """Moves what no other worker of the lane has taken."""
    with contextlib.suppress(IndexError):
        while True:
            reads, writes = lane.popleft()
            for piece in reads:
                _move(piece, buffer, os.O_RDONLY)
            for piece in writes:
                _move(piece, buffer, os.O_WRONLY)


def _move(piece: Piece, buffer: mmap.mmap, flags: int) -> None:
    call = os.pwritev if flags == os.O_WRONLY else os.preadv
    fd = os.open(piece.file, flags | os.O_DIRECT | os.O_CLOEXEC)
    try:
        with memoryview(buffer) as view:
            done = 0
            while done < piece.num_bytes:
                with view[done : piece.num_bytes] as part:
                    moved = call(fd, [part], piece.offset_bytes + done)
                if moved <= 0:
                    raise OSError(f"{piece.file}: ended at {piece.offset_bytes + done}")
                done += moved
    finally:
        os.close(fd)


def fio_s(
    file: Path, transfers: Sequence[Transfer], seconds: float
) -> dict[str, float]:
    """Returns the seconds of a step's bytes with fio, by way; empty without fio.

    Args:
      file: its file; fio lays it out the first time, and it is kept.
      transfers: those of a step.
      seconds: duration of each run, without the layout; 0 for none.
    """
    read, written = moved_bytes(transfers)
    found = {}
    for engine, depth, block in FIO if seconds and shutil.which("fio") else ():
        command = [
            "fio", "--name=floor", f"--filename={file}",
            f"--size={min(2 << 30, max(64 << 20, read + written))}", "--direct=1",
            "--rw=rw", f"--rwmixread={round(100 * read / (read + written))}",
            f"--ioengine={engine}", f"--iodepth={depth}", f"--bs={block}",
            "--time_based", f"--runtime={seconds}", "--fallocate=none",
            "--overwrite=1", "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:  # some systems have no io_uring
            one = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
            rate = one["read"]["bw_bytes"] + one["write"]["bw_bytes"]
            if rate:
                name = f"fio {engine}, depth {depth}, {block}"
                found[name] = (read + written) / rate
    return found
