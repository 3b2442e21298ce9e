"""A run's scalars for TensorBoard, or for Weights & Biases.

Invariant: a step is sent when its line is complete; a resumed run sends what follows.
"""

import contextlib
import math
import os
import uuid
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxinf.command_line import UsageError
from jaxinf.train.config import TrainConfig

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check_tracker(config: TrainConfig) -> None:
    """Refuses a tracker whose package is missing."""
    if config.track is not None and find_spec(_PACKAGES[config.track]) is None:
        raise UsageError(
            f"--track {config.track}: expected the package {_PACKAGES[config.track]}, "
            f"found none; install it with: pip install 'jaxinf[{config.track}]'"
        )


def tracker(
    config: TrainConfig, logs: Path, step: int, stack: contextlib.ExitStack
) -> Callable[..., None]:
    """Returns what sends a line of ``metrics.jsonl``, and a prefix of its names.

    Args:
      step: the last step that was sent.
      stack: closes the tracker, which writes all.
    """
    if config.track == "tensorboard":
        from tensorboardX import SummaryWriter

        # Readers leave out what an earlier file has of steps that this one repeats.
        own = {"purge_step": step + 1, "filename_suffix": f".{step}.{os.getpid()}"}
        writer = SummaryWriter(str(logs), flush_secs=1, **own)
        stack.enter_context(writer)

        def send(line: Mapping[str, Any], before: str = "") -> None:
            for name, value in _scalars(line, before).items():
                writer.add_scalar(name, value, line["step"])

        return send
    if config.track == "wandb":
        import wandb  # pyright: ignore[reportMissingImports]

        if not (kept := logs / "wandb.id").exists():
            kept.write_text(uuid.uuid4().hex)
        own = {"id": kept.read_text(), "dir": str(logs), "config": config.to_json()}
        run = stack.enter_context(wandb.init(**own, resume="allow"))

        def log(line: Mapping[str, Any], before: str = "") -> None:
            run.log(_scalars(line, before), step=line["step"])

        return log
    return lambda line, before="": None


def _scalars(line: Mapping[str, Any], before: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            found |= _scalars(value, f"{before}{name}/")
        elif name in ("step", "committed") or not isinstance(value, int | float):
            continue
        elif math.isfinite(value):
            found[before + name] = float(value)
    return found
