"""Trains a model that does not fit in memory, kills it, and trains on.

GPT-2 XL has 1.56 billion params; with AdamW they take 18.7 GB. The trainer streams them
under a limit of resident memory, gets SIGKILL in the middle of a step, resumes from the
last commit and trains on.

    python scripts/big.py --store /mnt/nvme0/big

The limit holds for all processes of the run.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bench

from jaxinf.terminal import format_bytes

# Memory beside `--memory`: Python, JAX, the traced model and its programs. GPT-2 XL
# wants a `--memory` of 1,276 MiB: no part of its table of 307 MiB moves alone.
OWN_BYTES = 768 << 20
# RLIMIT_DATA counts stacks and arenas that nobody touches, too.
UNTOUCHED_BYTES = 1 << 30
_POLL_S = 0.05


class Watcher:
    """Runs a command in a process group whose resident memory stays below a limit.

    RLIMIT_DATA stops an allocation that would exceed it, as far as it counts (private
    writable memory, touched or not). In addition, the group is killed when its resident
    memory passes the limit.

    Attributes:
      peak_bytes: The most that was resident.
    """

    def __init__(self, command: Sequence[str], limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.peak_bytes = 0
        data_kib = (limit_bytes + UNTOUCHED_BYTES) // 1024
        limited = ["sh", "-c", f'ulimit -d {data_kib}; exec "$@"', "sh", *command]
        self._process = subprocess.Popen(limited, start_new_session=True)

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


def _resident_bytes(group: int) -> Iterator[int]:
    """Peaks of resident memory of each process of a group, as the kernel keeps them."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(folder.name)) == group:
                yield bench.resident_bytes("VmHWM", folder.name)


def losses(place: Path) -> list[float]:
    """The losses of a run's steps; each step has one line."""
    lines = (place / "log/metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [entry["step"] for entry in entries] == list(range(1, len(entries) + 1))
    return [entry["loss"] for entry in entries]


def committed_step(store: Path) -> int:
    """The step that a store has committed; -1 if none."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((store / "current/commit.json").read_text())["step"]
    return -1


def command(options: Namespace, place: Path) -> list[str]:
    """The command of the run, whose store and log are in `place`."""
    words = ["--optimizer", "adamw", "--batch-size", 1, "--seq-len", 64]
    # At the preset's rate the losses of a few steps without warm-up go up and down.
    words += ["--warmup-steps", 0, "--clip-norm", 1, "--learning-rate", 2e-5]
    words += ["--preset", options.preset, "--steps", options.steps]
    words += ["--mode", "stream", "--memory", options.limit - OWN_BYTES]
    words += ["--store", place / "store", "--log-dir", place / "log"]
    return [sys.executable, "-m", "jaxinf.train", *map(str, words)]


def measure(options: Namespace, place: Path) -> dict[str, float]:
    """Trains, kills, resumes; returns what it has taken.

    Raises:
      SystemExit: The run failed, passed the limit, or resumed elsewhere.
    """
    words, began_s = command(options, place), time.monotonic()
    first = Watcher(words, options.limit)
    try:
        first.wait(lambda: committed_step(place / "store") >= options.kill_after)
        late_s = time.monotonic() + options.kill_delay_s
        status = first.wait(lambda: time.monotonic() > late_s)
        if status is not None:
            raise SystemExit(f"the run ended with {status} before it was killed")
    finally:
        first.kill()
    step = committed_step(place / "store")
    text = f"killed  with SIGKILL in step {step + 1}; step {step} is committed"
    print(text, flush=True)
    second = Watcher(words, options.limit)
    try:
        if second.wait():
            raise SystemExit("the resumed run failed")
    finally:
        second.kill()
    found = losses(place)
    print(f"losses  {' '.join(f'{loss:.4f}' for loss in found)}")
    if len(found) != options.steps or not found[-1] < found[0]:
        raise SystemExit(f"expected {options.steps} losses that fall")
    peak_bytes = max(first.peak_bytes, second.peak_bytes)
    seconds = time.monotonic() - began_s
    return {"peak": peak_bytes, "limit": options.limit, "seconds": seconds}


def show(found: dict[str, Any]) -> None:
    """Prints the peak of memory, and the time."""
    peak, limit = map(format_bytes, (found["peak"], found["limit"]))
    print(f"peak    {peak} resident, limit {limit}; {found['seconds']:.0f} s in all")


if __name__ == "__main__":
    bench.run(
        __doc__,
        measure,
        show,
        preset={"default": "xl", "help": "of the GPT-2"},
        limit=bench.SIZE | {"default": 2 << 30, "help": "of resident memory"},
        steps={"type": int, "default": 4, "help": "in all"},
        kill_after={"type": int, "default": 2, "help": "step, once it is committed"},
        kill_delay_s={"type": float, "default": 10.0, "help": "into the next step"},
    )
