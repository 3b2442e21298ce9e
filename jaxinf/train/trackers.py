"""A run's scalars for TensorBoard and for Weights & Biases.

Invariant: a step is sent when its line of ``metrics.jsonl`` is complete, and a resumed
run goes on after the last of them; so the logs have each step once.
"""

import dataclasses
import math
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from jaxinf.command_line import UsageError
from jaxinf.train.config import TrainConfig
from jaxinf.train.metrics import StepLine, read_lines

_Send: TypeAlias = Callable[[int, Mapping[str, float]], None]
_Close: TypeAlias = Callable[[], None]

_NUM_AGAIN = 1000  # steps that a resumed run writes again
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
_HELD_OUT = ("loss", "perplexity", "accuracy")


def check_trackers(config: TrainConfig) -> None:
    """Refuses what cannot be written.

    Raises:
      UsageError: a package is missing, or the directory is in the store.
    """
    for flag, package in _PACKAGES.items():
        if getattr(config, flag) is not None and not _is_there(package):
            raise UsageError(
                f"--{flag}: expected the package {package}, found none; install it "
                f"with: pip install 'jaxinf[{flag}]'"
            )
    if config.tensorboard is None or config.store is None:
        return
    if config.tensorboard.absolute().is_relative_to(config.store.absolute()):
        raise UsageError(
            f"--tensorboard {config.tensorboard}: expected a place outside the store "
            f"{config.store}, which holds nothing but the store's own files"
        )


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # a module that says nothing of where it is from
        return False


class Trackers:
    """The trackers that a run asks for; none by default.

    Args:
      config: the run. Its ``validation.jsonl`` has been cut to the last commit.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._trackers: list[tuple[_Send, _Close]] = []

    def begin(self, path: Path, step: int) -> None:
        """Opens them after the last step whose line is in ``metrics.jsonl``; blocks."""
        if self._config.wandb is not None:
            self._add(_wandb(self._config.wandb, self._config), (), step)
        if self._config.tensorboard is not None:
            # A killed process may not have written all. Readers leave out what a file
            # has of the steps with which a later one begins.
            first = max(0, step - _NUM_AGAIN)
            lines = (one for one in read_lines(path) if one["step"] > first)
            self._add(_tensorboard(self._config.tensorboard, first), lines, first)

    def _add(
        self,
        tracker: tuple[_Send, _Close],
        lines: Iterable[Mapping[str, Any]],
        step: int,
    ) -> None:
        self._trackers.append(tracker)
        send = tracker[0]
        for line in lines:
            send(line["step"], _scalars(StepLine(**line)))
        for found in read_lines(self._config.logs / "validation.jsonl"):
            if found["step"] > step:
                send(found["step"], _held_out(found))

    def wrote(self, line: StepLine) -> None:
        for send, _ in self._trackers:
            send(line.step, _scalars(line))

    def evaluated(self, step: int, found: Mapping[str, Any]) -> None:
        """Takes a line of ``validation.jsonl``."""
        for send, _ in self._trackers:
            send(step, _held_out(found))

    def close(self) -> None:
        """Writes what is left; idempotent."""
        while self._trackers:
            self._trackers.pop()[1]()


def _tensorboard(place: Path, step: int) -> tuple[_Send, _Close]:
    import tensorboardX

    writer = tensorboardX.SummaryWriter(
        str(place.expanduser()),
        purge_step=step + 1,
        flush_secs=1,
        filename_suffix=f".{step}.{os.getpid()}",
    )

    def send(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return send, writer.close


def _wandb(project: str, config: TrainConfig) -> tuple[_Send, _Close]:
    import wandb  # pyright: ignore[reportMissingImports]

    kept = config.logs / "wandb.id"
    if not kept.exists():
        kept.write_text(uuid.uuid4().hex)
    run = wandb.init(
        project=project,
        dir=str(config.logs),
        id=kept.read_text(),
        resume="allow",
        config=config.to_json(),
    )
    return lambda step, values: run.log(dict(values), step=step), run.finish


def _scalars(line: StepLine) -> dict[str, float]:
    fields = dataclasses.asdict(line)
    del fields["step"]
    if line.tokens is not None and line.step_s:
        fields["tokens_per_s"] = line.tokens / line.step_s
    return dict(_numbers(fields))


def _held_out(found: Mapping[str, Any]) -> dict[str, float]:
    return dict(_numbers({name: found.get(name) for name in _HELD_OUT}, "held_out/"))


def _numbers(
    fields: Mapping[str, Any], before: str = ""
) -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{before}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield before + name, float(value)
