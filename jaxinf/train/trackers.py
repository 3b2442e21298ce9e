"""A run's scalars for TensorBoard and for Weights & Biases.

Invariant: a step is sent when its line is complete; a resumed run sends what follows.
"""

import contextlib
import math
import os
import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxinf.command_line import UsageError
from jaxinf.train.config import TrainConfig
from jaxinf.train.metrics import read_lines

_NUM_AGAIN = 1000  # steps that a killed process may not have written for TensorBoard


def check_trackers(config: TrainConfig) -> None:
    """Refuses a tracker whose package is missing."""
    for flag, package in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        if getattr(config, flag) is not None and find_spec(package) is None:
            raise UsageError(
                f"--{flag}: expected the package {package}, found none; install it "
                f"with: pip install 'jaxinf[{flag}]'"
            )


class Trackers(contextlib.ExitStack):
    """The trackers that a run asks for, none by default; `close` writes all."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self._config, self._sends = config, list[Any]()

    def begin(self, path: Path, step: int) -> None:
        """Opens them after the last step in `path`, ``metrics.jsonl``; blocks."""
        config, logs, again = self._config, self._config.logs, max(0, step - _NUM_AGAIN)
        begun = []
        if config.wandb is not None:
            import wandb  # pyright: ignore[reportMissingImports]

            if not (kept := logs / "wandb.id").exists():
                kept.write_text(uuid.uuid4().hex)
            one = {"project": config.wandb, "id": kept.read_text(), "dir": str(logs)}
            run = self.enter_context(
                wandb.init(**one, config=config.to_json(), resume="allow")
            )
            begun.append((step, lambda n, values: run.log(values, step=n)))
        if config.tensorboard is not None:
            from tensorboardX import SummaryWriter

            # Readers leave out what a file has of the steps that a later one begins at.
            place, name = config.tensorboard.expanduser(), f".{again}.{os.getpid()}"
            made = SummaryWriter(
                str(place), purge_step=again + 1, flush_secs=1, filename_suffix=name
            )
            writer = self.enter_context(made)
            begun.append(
                (again, lambda n, v: [writer.add_scalar(k, v[k], n) for k in v])
            )
        for file, before in ((path, ""), (logs / "validation.jsonl", "held_out/")):
            for line in read_lines(file) if begun else ():
                for since, send in begun:
                    if line["step"] > since:
                        send(line["step"], _scalars(line, before))
        self._sends = [send for _, send in begun]

    def send(self, line: Mapping[str, Any], before: str = "") -> None:
        """Takes a line of ``metrics.jsonl``, or ``held_out/`` one of an evaluation."""
        for send in self._sends:
            send(line["step"], _scalars(line, before))


def _scalars(line: Mapping[str, Any], before: str = "") -> dict[str, float]:
    fields = {n: v for n, v in line.items() if n not in ("step", "committed")}
    if fields.get("tokens") and fields.get("step_s"):
        fields["tokens_per_s"] = fields["tokens"] / fields["step_s"]
    found: dict[str, float] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found |= _scalars(value, f"{before}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            found[before + name] = float(value)
    return found
