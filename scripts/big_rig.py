"""What the programs of large models share: limits of memory and disk, logs."""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tyro

from jaxinf.terminal import format_bytes, parse_bytes

__all__ = [
    "BYTES",
    "UNTOUCHED_BYTES",
    "Watcher",
    "check_disk",
    "check_losses",
    "committed_step",
    "killed_in_a_step",
    "losses",
    "trainer",
]

# RLIMIT_DATA counts stacks and arenas that nobody touches, too.
UNTOUCHED_BYTES = 1 << 30
_POLL_S = 0.05

BYTES = tyro.constructors.PrimitiveConstructorSpec[int](
    nargs=1,
    metavar="BYTES",
    instance_from_str=lambda words: parse_bytes(words[0]),
    is_instance=lambda value: isinstance(value, int),
    str_from_instance=lambda value: [format_bytes(value).replace(" ", "")],
)
"""An option of bytes, such as 2GiB."""


class Watcher:
    """Runs a command in a process group whose resident memory stays below a limit.

    RLIMIT_DATA stops an allocation that would exceed it, as far as it counts (private
    writable memory, touched or not). In addition, the group is killed when its resident
    memory passes the limit.

    Args:
      command: The command; its output is passed on.
      limit_bytes: The limit.

    Attributes:
      peak_bytes: The most that was resident.
    """

    def __init__(self, command: Sequence[str], limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._process = subprocess.Popen(command, start_new_session=True)
        data_bytes = limit_bytes + UNTOUCHED_BYTES
        limits = (data_bytes, data_bytes)
        resource.prlimit(self._process.pid, resource.RLIMIT_DATA, limits)

    def wait(self, until: Callable[[], bool] = lambda: False) -> int | None:
        """Waits until the command ends or `until` holds; returns its exit status.

        Raises:
          SystemExit: Resident memory passed the limit; the group was killed.
        """
        while (status := self._process.poll()) is None and not until():
            resident = sum(_resident_bytes(self._process.pid))
            self.peak_bytes = max(self.peak_bytes, resident)
            if self.peak_bytes > self._limit_bytes:
                self.kill()
                raise SystemExit(
                    f"{format_bytes(self.peak_bytes)} resident, expected at most "
                    f"{format_bytes(self._limit_bytes)}; the run was killed"
                )
            time.sleep(_POLL_S)
        return status

    def kill(self) -> None:
        """Kills the group, and waits for its end; idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def killed_in_a_step(
    command: Sequence[str],
    limit_bytes: int,
    store: Path,
    num_steps: int,
    delay_s: float,
) -> Watcher:
    """Runs a command, and kills it so long after the commit of a step; returns it.

    Raises:
      SystemExit: The run ended before, or passed the limit.
    """
    watcher = Watcher(command, limit_bytes)
    try:
        watcher.wait(lambda: committed_step(store) >= num_steps)
        late_s = time.monotonic() + delay_s
        status = watcher.wait(lambda: time.monotonic() > late_s)
        if status is not None:
            raise SystemExit(f"the run ended with {status} before it was killed")
    finally:
        watcher.kill()
    step = committed_step(store)
    print(
        f"killed  with SIGKILL in step {step + 1}; step {step} is committed", flush=True
    )
    return watcher


def _resident_bytes(group: int) -> Iterator[int]:
    """Resident memory of each process of a group; its peak, as the kernel keeps it."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError, ValueError, StopIteration):
            if os.getpgid(int(folder.name)) != group:
                continue
            lines = (folder / "status").read_text().splitlines()
            peak = next(line for line in lines if line.startswith("VmHWM"))
            yield int(peak.split()[1]) << 10


def check_disk(place: Path, needed_bytes: int) -> None:
    """Prints what a drive needs and has; refuses one without room.

    Raises:
      SystemExit: Says how many bytes are missing.
    """
    free_bytes = shutil.disk_usage(place).free
    needed, free = f"{needed_bytes / 1e9:.1f} GB", f"{free_bytes / 1e9:.1f} GB"
    print(f"disk    {needed} needed, {free} free", flush=True)
    if free_bytes < needed_bytes:
        raise SystemExit(
            f"{place}: expected {needed} free, found {free}; name a directory on a "
            "larger drive with --store, or a smaller model with --preset"
        )


def trainer(place: Path, seq_len: int, *words: str) -> list[str]:
    """The command of a run with batches of one sequence, whose log is in `place`."""
    program = [sys.executable, "-m", "jaxinf.train", "--optimizer", "adamw"]
    program += ["--batch-size", "1", "--seq-len", str(seq_len), "--warmup-steps", "0"]
    return [*program, "--log-dir", str(place / "log"), *words]


def losses(place: Path) -> list[float]:
    """The losses of a run's steps; each step has one line."""
    lines = (place / "log/metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [entry["step"] for entry in entries] == list(range(1, len(entries) + 1))
    return [entry["loss"] for entry in entries]


def check_losses(name: str, found: Path, expected: Path, tolerance: float) -> None:
    """Compares the losses of two runs.

    Args:
      name: The name of the model and the reference.
      found, expected: Places of the runs.
      tolerance: The greatest difference, as a share.

    Raises:
      SystemExit: They differ by more.
    """
    pairs = list(zip(losses(found), losses(expected), strict=True))
    difference = max(abs(a - b) / b for a, b in pairs)
    print(
        f"check   {name}: losses of {len(pairs)} steps differ by at most "
        f"{difference:.1e} of themselves",
        flush=True,
    )
    if not difference <= tolerance:
        raise SystemExit(
            f"expected losses {[b for _, b in pairs]}, found {[a for a, _ in pairs]}"
        )


def committed_step(store: Path) -> int:
    """The step that a store has committed; -1 if none."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((store / "current/commit.json").read_text())["step"]
    return -1
