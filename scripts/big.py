"""Trains a model that does not fit in memory, kills it, and trains on.

GPT-2 XL has 1.56 billion params; with AdamW they take 18.7 GB. The trainer streams them
under a limit of resident memory, gets SIGKILL in the middle of a step, resumes from the
last commit and trains on. First a smaller model is trained both streamed and in memory
by one jit, and the losses are compared.

    python scripts/big.py --store /mnt/nvme0/big

The limit holds for all processes of the run.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from jaxinf_models import PRESETS, num_params

from jaxinf.command_line import ByteSize
from jaxinf.terminal import format_bytes

# Two slots of params, mu and nu, and the gradients that wait for the norm.
BYTES_A_PARAM = 2 * 12 + 4
# Memory beside `--memory`: Python, JAX, the traced model and its programs. GPT-2 XL
# wants a `--memory` of 1,276 MiB: no part of its table of 307 MiB moves alone.
OWN_BYTES = 768 << 20
CHECKED_STEPS = 5
TOLERANCE = 1e-4


# RLIMIT_DATA counts stacks and arenas that nobody touches, too.
UNTOUCHED_BYTES = 1 << 30
_POLL_S = 0.05


@dataclass(frozen=True)
class Options:
    """Trains a model that does not fit in memory, kills it, and trains on.

    Attributes:
      store: Directory on the drive, for the store and the logs; removed at the end.
      preset: Size of the GPT-2.
      small: Size of the GPT-2 that is compared with one jit.
      limit: Limit of resident memory.
      steps: Number of steps in all.
      kill_after: Number of the step after whose commit the run is killed.
      kill_delay_s: Time from that commit to the kill, so that it falls into a step.
      seq_len: Tokens in a batch.
      keep: Whether the store stays.
    """

    store: Path
    preset: str = "xl"
    small: str = "nano"
    limit: Annotated[int, ByteSize] = 2 << 30
    steps: int = 4
    kill_after: int = 2
    kill_delay_s: float = 10.0
    seq_len: int = 64
    keep: bool = False


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


def adamw(options: Options, place: Path, *words: str) -> list[str]:
    """The command of a run whose log is in `place`."""
    program = [sys.executable, "-m", "jaxinf.train", "--optimizer", "adamw"]
    program += ["--batch-size", "1", "--seq-len", str(options.seq_len)]
    # At the preset's rate the losses of a few steps without warm-up go up and down.
    program += ["--warmup-steps", "0", "--clip-norm", "1", "--learning-rate", "2e-5"]
    return [*program, "--log-dir", str(place / "log"), *words]


def streamed(options: Options, place: Path, preset: str, steps: int) -> list[str]:
    """The command of a streamed run."""
    memory = ("--mode", "stream", "--memory", str(options.limit - OWN_BYTES))
    store = ("--store", str(place / "store"))
    words = ("--preset", preset, "--steps", str(steps))
    return adamw(options, place, *memory, *store, *words)


def check_small(options: Options, root: Path) -> None:
    """Compares the losses of a smaller model with those of one jit.

    Raises:
      SystemExit: They differ.
    """
    small, memory = root / "small", root / "memory"
    words = ("--preset", options.small, "--steps", str(CHECKED_STEPS))
    commands = (
        streamed(options, small, options.small, CHECKED_STEPS),
        adamw(options, memory, "--mode", "memory", *words),
    )
    for command in commands:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found, expected = losses(small), losses(memory)
    difference = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
    print(
        f"check   {options.small} and one jit: losses of {len(found)} steps differ by "
        f"at most {difference:.1e} of themselves",
        flush=True,
    )
    if not difference <= TOLERANCE:
        raise SystemExit(f"expected losses {expected}, found {found}")


def train(options: Options, root: Path) -> int:
    """Trains, kills, resumes; returns the peak of resident memory.

    Raises:
      SystemExit: The run failed, or resumed elsewhere.
    """
    big = root / "big"
    command = streamed(options, big, options.preset, options.steps)
    kill = options.kill_after, options.kill_delay_s
    first = killed_in_a_step(command, options.limit, big / "store", *kill)
    second = Watcher(command, options.limit)
    try:
        if second.wait():
            raise SystemExit("the resumed run failed")
    finally:
        second.kill()
    found = losses(big)
    print(f"losses  {' '.join(f'{loss:.4f}' for loss in found)}")
    if len(found) != options.steps or not found[-1] < found[0]:
        raise SystemExit(f"expected {options.steps} losses that fall")
    return max(first.peak_bytes, second.peak_bytes)


def main() -> None:
    """Checks, trains, prints."""
    options = tyro.cli(Options, description=__doc__)
    options.store.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    root = options.store / "run"
    shutil.rmtree(root, ignore_errors=True)
    check_disk(options.store, BYTES_A_PARAM * num_params(PRESETS[options.preset]))
    try:
        check_small(options, root)
        peak_bytes = train(options, root)
    finally:
        if not options.keep:
            shutil.rmtree(root, ignore_errors=True)
    print(
        f"peak    {format_bytes(peak_bytes)} resident, limit "
        f"{format_bytes(options.limit)}; {time.monotonic() - began_s:.0f} s in all"
    )


if __name__ == "__main__":
    main()
