"""Examines one directory for `jaxinf doctor`: its file system and bandwidth.

    write  ─►  fsync  ─►  read  ─►  mixed: each thread reads a block, then writes one

Invariant: a failure becomes a `Problem` of that directory and does not affect others;
tests run in a temporary directory that is removed at the end. The file that is measured
has no name, so it disappears however the process ends; each phase ends after a few
seconds, however slow the drive is.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxinf.errors import StoreError
from jaxinf.store import map_in_threads
from jaxinf.terminal import format_bytes, format_count
from jaxinf.transfer import (
    PAGE_BYTES,
    allocate_file,
    allocate_pages,
    read_into,
    supports_direct,
    write_from,
)
from jaxinf.typing import Array, ProgressCallback

_ADAM_STORED_BYTES = 24
"""Bytes of a param with Adam in fp32: three states of 4 bytes in two slots."""

_ADAM_STEP_BYTES = 20
"""Bytes that a step moves for each float32 param: 8 read, 12 written.

The params come with the gradients where they are in the host's memory, as on a CPU."""

_FREE_DIVISOR = 4  # the temporary file takes at most a quarter of the free space
_NUM_THREADS = 4
_BLOCK_BYTES = 16 << 20
_MIN_BYTES = 2 * _NUM_THREADS * PAGE_BYTES
_TRANSFERS = ("read", "write", "mixed")
_MAX_S = 20.0  # of all phases of a drive together


class Problem(NamedTuple):
    what: str
    remedy: str
    is_fatal: bool = False


@dataclass
class Finding:
    title: str
    facts: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def is_usable(self) -> bool:
        return not any(problem.is_fatal for problem in self.problems)


def examine_directory(
    path: Path, file_bytes: int, progress: ProgressCallback
) -> Finding:
    """Examines a directory; measures it with a file of that length, if any; blocks."""
    finding = Finding(str(path))
    try:
        _examine(path, finding, file_bytes, progress)
    except OSError as error:
        what = f"making a file here failed: {error.strerror}"
        remedy = "give a directory that this user can write, on a drive with free space"
        finding.problems.append(Problem(what, remedy, is_fatal=True))
    except StoreError as error:
        what, _, remedy = str(error).rpartition("; ")
        finding.problems.append(Problem(what, remedy, is_fatal=True))
    return finding


def _examine(
    path: Path, finding: Finding, file_bytes: int, progress: ProgressCallback
) -> None:
    facts, problems = finding.facts, finding.problems
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        remedy = "check the name" if path.exists() else f"mkdir -p {path}, or mount it"
        raise StoreError(f"{path}: expected a directory, found {found}; {remedy}")
    command = ["stat", "--file-system", "--format=%T", path]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    facts["file system"] = kind = result.stdout.strip() or "unknown"
    if kind in ("tmpfs", "ramfs"):
        what = f"{kind} is memory: state here is gone after a reboot"
        problems.append(Problem(what, "use a drive's file system"))
    total, _, free = shutil.disk_usage(path)
    params = format_count(free // _ADAM_STORED_BYTES)
    facts["free"] = f"{format_bytes(free)} of {format_bytes(total)}: {params} params "
    facts["free"] += "with Adam in fp32"
    with tempfile.TemporaryDirectory(prefix=".jaxinf-doctor-", dir=path) as name:
        scratch, num_bytes = Path(name), min(file_bytes, free // _FREE_DIVISOR)
        missing = _find_missing_features(scratch)
        problems += missing.values()
        if file_bytes and num_bytes < _MIN_BYTES:
            what = f"a file of {num_bytes} bytes is too short to measure with"
            remedy = f"free space, or give a --size of at least {_MIN_BYTES} bytes"
            problems.append(Problem(what, remedy))
        elif file_bytes:
            is_direct = "direct_io" not in missing
            how = "direct" if is_direct else "buffered, so partly memory's"
            moved_bytes, rates = measure_bandwidth(scratch, num_bytes, progress)
            formatted = [f"{k} {rates[k] / 1e6:,.0f} MB/s" for k in _TRANSFERS]
            moved = f"({how}, {format_bytes(moved_bytes)} moved)"
            facts["bandwidth"] = f"{', '.join(formatted)} {moved}"
            params = format_count(rates["mixed"] / _ADAM_STEP_BYTES)
            facts["means"] = f"{params} params/s with Adam in fp32"


def _find_missing_features(scratch: Path) -> dict[str, Problem]:
    missing: dict[str, Problem] = {}
    for name, (supports, what, is_needed) in _FEATURES.items():
        why = "the file system refuses it"
        try:
            if supports(scratch):
                continue
        except OSError as error:
            why = error.strerror or str(error)
        remedy = "use a local file system such as ext4 or xfs"
        missing[name] = Problem(f"no {what} ({why})", remedy, is_needed)
    return missing


def _can_replace_symlink(scratch: Path) -> bool:
    (scratch / "new").symlink_to("file")
    (scratch / "current").symlink_to("nowhere")
    os.replace(scratch / "new", scratch / "current")
    return os.readlink(scratch / "current") == "file"


def _can_link(scratch: Path) -> bool:
    (scratch / "one").touch()
    os.link(scratch / "one", scratch / "two")
    return True


def _can_lock(scratch: Path) -> bool:
    with (scratch / "file").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


_FEATURES: dict[str, tuple[Callable[[Path], bool], str, bool]] = {
    "direct_io": (
        supports_direct,
        "direct I/O: buffered I/O is used, slower, and it fills the page cache",
        False,
    ),
    "hard_links": (_can_link, "hard links: no step can be kept or pinned", True),
    "symlinks": (_can_replace_symlink, "symlinks: no step can be committed", True),
    "locks": (_can_lock, "file locks (flock): two runs could write at once", True),
}
"""The test of a feature, what is lost without it, and whether a store needs it."""


def measure_bandwidth(
    scratch: Path, file_bytes: int, progress: ProgressCallback
) -> tuple[int, dict[str, float]]:
    """Measures with direct I/O, by at most three times the file's length; blocks.

    Returns:
      The bytes moved, and bytes a second, until durable: `read`, `write`, and `mixed`,
      of both in equal parts.
    """
    block_bytes = min(_BLOCK_BYTES, file_bytes // (2 * _NUM_THREADS))
    block_bytes -= block_bytes % PAGE_BYTES
    half = file_bytes // (2 * block_bytes)
    file_bytes, moved_bytes, rates = 2 * half * block_bytes, 0, dict[str, float]()
    rng, path = np.random.default_rng(), scratch / "data"
    arrays = [allocate_pages(block_bytes) for _ in range(_NUM_THREADS)]
    for array in arrays:  # what no drive can compress
        array[:] = np.frombuffer(rng.bytes(array.size), np.uint8)
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
            for num_bytes in _transfer_blocks(transfer, num_blocks, arrays):
                moved_bytes += num_bytes
                progress(moved_bytes, 3 * file_bytes)
            if transfer is not read:
                os.fsync(nameless.fileno())
            took_s = time.perf_counter() - began_s
            rates[transfer.__name__] = (moved_bytes - before) / took_s
    return moved_bytes, rates


def _transfer_blocks(
    transfer: Callable[[int, Array], int], num_blocks: int, arrays: Sequence[Array]
) -> Iterator[int]:
    """Yields the bytes of each block that threads have moved, for seconds at most."""
    until_s, idle = time.perf_counter() + _MAX_S / 3, [*arrays]

    def transfer_block(block: int) -> int:
        if block >= _NUM_THREADS and time.perf_counter() > until_s:
            return 0
        array = idle.pop()
        num_bytes = transfer(block, array)
        idle.append(array)
        return num_bytes

    blocks = map_in_threads(range(num_blocks), transfer_block, _NUM_THREADS)
    yield from (num_bytes for _, num_bytes in blocks)
