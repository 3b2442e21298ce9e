"""Trains a model in the shape of Llama 2 7B in 6 GiB of memory and 54 GB of disk.

It has 6.7 billion params; with AdamW in float32 they would take 81 GB. Here params have
16 bits and are their own master (`--master none`), and the moments have 8 bits. The
trainer streams two steps under a limit of resident memory. Then, under the same limit,
a loss is computed of the store's params, the store gives the space of its spare slot
back, and the step is exported for transformers.
First a small model is trained both streamed and with all params in memory, and the
losses are compared.

    python scripts/bigger.py --store /mnt/nvme0/bigger

The limit holds for all processes of the run.
"""

import math
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from big_rig import (
    BYTES,
    Watcher,
    check_disk,
    check_losses,
    committed_step,
    losses,
    trainer,
)
from jaxinf_models import MODELS, num_params

from jaxinf.terminal import format_bytes

# Two slots of 16-bit params, and of two moments in 8 bits with a scale for each 256.
BYTES_A_PARAM = 2 * (2 + 2 * (1 + 4 / 256))
# Memory beside `--memory`: Python, JAX, the traced model and its programs.
OWN_BYTES = 1 << 30
CHECKED_STEPS = 5
# Params of 16 bits are rounded stochastically, and the two compute in another order.
TOLERANCE = 1e-2
# The loss of a model that knows nothing, within so many nats.
FIRST_LOSS = 1.0


@dataclass(frozen=True)
class Options:
    """Trains a model in the shape of Llama 2 7B in 6 GiB of memory and 54 GB of disk.

    Attributes:
      store: Directory on the drive, for all files; removed at the end.
      preset: Size of the Llama.
      small: Size of the Llama that is compared with one in memory.
      limit: Limit of resident memory.
      steps: Number of steps.
      seq_len: Tokens in a batch.
      keep: Whether the store and the export stay.
    """

    store: Path
    preset: str = "llama2-7b"
    small: str = "nano"
    limit: Annotated[int, BYTES] = 6 << 30
    steps: int = 2
    seq_len: int = 128
    keep: bool = False


class Run:
    """The commands of a run, each under the limit.

    Args:
      options: Of the program.
      root: Directory of the run's files.

    Attributes:
      peak_bytes: The most that was resident in any of them.
    """

    def __init__(self, options: Options, root: Path) -> None:
        self._options = options
        self._limit_bytes = options.limit
        self._root = root
        self._store = root / "big/store"
        self.peak_bytes = 0

    def check_small(self) -> None:
        """Compares a small model with one whose params are in memory.

        Raises:
          SystemExit: The losses differ.
        """
        small = replace(self._options, preset=self._options.small, steps=CHECKED_STEPS)
        places = self._root / "small", self._root / "memory"
        commands = (
            streamed(small, places[0]),
            adamw(small, places[1], "--mode", "update", "--sample-bytes", "0"),
        )
        for command in commands:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        check_losses(f"{small.preset} and params in memory", *places, TOLERANCE)
        for place in places:
            shutil.rmtree(place)

    def train(self) -> None:
        """Trains.

        Raises:
          SystemExit: The run failed, or its losses are not those of a new model.
        """
        options, place = self._options, self._root / "big"
        self._watch("trained", streamed(options, place))
        found = losses(place)
        print(f"losses  {' '.join(f'{loss:.4f}' for loss in found)}", flush=True)
        step = committed_step(self._store)
        if len(found) != options.steps or step != options.steps:
            raise SystemExit(f"expected step {options.steps} committed, found {step}")
        first = math.log(MODELS["llama"].presets[options.preset].vocab_size)
        if not abs(found[0] - first) < FIRST_LOSS:
            raise SystemExit(
                f"expected a first loss near {first:.2f}, that of a model that knows "
                f"nothing, found {found[0]:.4f}"
            )

    def infer(self) -> None:
        """Computes a loss of the params in the store.

        Raises:
          SystemExit: The command failed.
        """
        script = str(Path(__file__).with_name("store_loss.py"))
        options = self._options
        words = ("--store", str(self._store), "--preset", options.preset)
        words += ("--memory", str(options.limit - OWN_BYTES))
        words += ("--seq-len", str(options.seq_len))
        self._watch("inferred", [sys.executable, script, *words])

    def export(self) -> None:
        """Frees the spare slot, and exports the step.

        Raises:
          SystemExit: A command failed.
        """
        exported = self._root / "exported"
        export = (str(exported), "--format", "huggingface")
        self._watch("trimmed", _jaxinf("store", "trim", str(self._store)))
        checkpoint = _jaxinf("checkpoint", "export", str(self._store), *export)
        self._watch("export", checkpoint)
        files = [file for file in exported.rglob("*") if file.is_file()]
        num_bytes = sum(file.stat().st_size for file in files)
        expected = 2 * num_params(MODELS["llama"].presets[self._options.preset])
        if num_bytes < expected:
            raise SystemExit(
                f"expected at least {expected} bytes of params, exported {num_bytes}"
            )

    def _watch(self, name: str, command: Sequence[str]) -> None:
        began_s = time.monotonic()
        watcher = Watcher(command, self._limit_bytes)
        try:
            status = watcher.wait()
        finally:
            watcher.kill()
        if status:
            raise SystemExit(f"{name} failed with {status}")
        self.peak_bytes = max(self.peak_bytes, watcher.peak_bytes)
        print(
            f"{name:8} {time.monotonic() - began_s:.0f} s, "
            f"{format_bytes(watcher.peak_bytes)} resident at most",
            flush=True,
        )


def _jaxinf(*words: str) -> list[str]:
    return [sys.executable, "-m", "jaxinf", *words]


def adamw(options: Options, place: Path, *words: str) -> list[str]:
    """The command of a run whose store and log are in `place`."""
    model = ("--model", "llama", "--preset", options.preset)
    few_bits = ("--state", "int8", "--param-dtype", "bfloat16", "--master", "none")
    rate = ("--clip-norm", "0", "--learning-rate", "1e-6")
    run = ("--steps", str(options.steps), "--store", str(place / "store"))
    return trainer(place, options.seq_len, *model, *few_bits, *rate, *run, *words)


def streamed(options: Options, place: Path) -> list[str]:
    """The command of a streamed run."""
    memory_bytes = options.limit - OWN_BYTES
    return adamw(options, place, "--mode", "stream", "--memory", str(memory_bytes))


def main() -> None:
    """Checks, trains, infers, exports, prints."""
    options = tyro.cli(Options, description=__doc__)
    options.store.mkdir(parents=True, exist_ok=True)
    count = num_params(MODELS["llama"].presets[options.preset])
    print(f"model   llama {options.preset}: {count:,} params", flush=True)
    began_s = time.monotonic()
    root = options.store / "run"
    shutil.rmtree(root, ignore_errors=True)
    check_disk(options.store, int(BYTES_A_PARAM * count))
    run = Run(options, root)
    try:
        run.check_small()
        run.train()
        run.infer()
        run.export()
    finally:
        if not options.keep:
            shutil.rmtree(root, ignore_errors=True)
    print(
        f"peak    {format_bytes(run.peak_bytes)} resident, limit "
        f"{format_bytes(options.limit)}; {time.monotonic() - began_s:.0f} s in all"
    )


if __name__ == "__main__":
    main()
