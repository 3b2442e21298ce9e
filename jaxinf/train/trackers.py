"""A run's scalars for TensorBoard.

Invariant: a step is sent when its line is complete; a resumed run sends what follows.
"""

import contextlib
import math
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxinf.command_line import UsageError
from jaxinf.train.config import TrainConfig


def check_tracker(config: TrainConfig) -> None:
    """Refuses a tracker whose package is missing."""
    if config.track is not None and find_spec("tensorboardX") is None:
        raise UsageError(
            "--track tensorboard: expected the package tensorboardX, found none; "
            "install it with: pip install 'jaxinf[tensorboard]'"
        )


def tracker(
    logs: Path, step: int, stack: contextlib.ExitStack
) -> Callable[[Mapping[str, Any], str], None]:
    """Returns what sends a line of ``metrics.jsonl``, and a prefix of its names.

    Args:
      step: the last step that was sent.
      stack: closes the tracker, which writes all.
    """
    from tensorboardX import SummaryWriter

    # Readers leave out what an earlier file has of steps that this one repeats.
    own = {"purge_step": step + 1, "filename_suffix": f".{step}.{os.getpid()}"}
    writer = stack.enter_context(SummaryWriter(str(logs), flush_secs=1, **own))

    def send(line: Mapping[str, Any], before: str) -> None:
        for name, value in line.items():
            if isinstance(value, Mapping):
                send({"step": line["step"], **value}, f"{before}{name}/")
            elif name in ("step", "committed") or not isinstance(value, int | float):
                continue
            elif math.isfinite(value):
                writer.add_scalar(before + name, float(value), line["step"])

    return send
