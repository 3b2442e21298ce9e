"""Trains a model that does not fit in memory, kills it, and trains on.

GPT-2 XL has 1.56 billion params; with AdamW they take 18.7 GB. The trainer streams them
under a limit of resident memory, gets SIGKILL in the middle of a step, resumes from the
last commit and trains on. First a smaller model is trained both streamed and in memory
by one jit, and the losses are compared.

    python scripts/big.py --store /mnt/nvme0/big

The limit holds for all processes of the run.
"""

import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from big_rig import (
    BYTES,
    Watcher,
    check_disk,
    check_losses,
    killed_in_a_step,
    losses,
    trainer,
)
from jaxinf_models import PRESETS, num_params

from jaxinf.terminal import format_bytes

# Two slots of params, mu and nu, and the gradients that wait for the norm.
BYTES_A_PARAM = 2 * 12 + 4
# Memory beside `--memory`: Python, JAX, the traced model and its programs.
OWN_BYTES = 768 << 20
CHECKED_STEPS = 5
TOLERANCE = 1e-4


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
    limit: Annotated[int, BYTES] = 1536 << 20
    steps: int = 4
    kill_after: int = 2
    kill_delay_s: float = 10.0
    seq_len: int = 64
    keep: bool = False


def adamw(options: Options, place: Path, *words: str) -> list[str]:
    """The command of a run whose log is in `place`."""
    # At the preset's rate the losses of a few steps without warm-up go up and down.
    clipped = ("--clip-norm", "1", "--learning-rate", "2e-5")
    return trainer(place, options.seq_len, *clipped, *words)


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
        adamw(options, memory, "--mode", "memory", "--sample-bytes", "0", *words),
    )
    for command in commands:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    check_losses(f"{options.small} and one jit", small, memory, TOLERANCE)


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
