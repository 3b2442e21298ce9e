"""A run's scalars for TensorBoard and for Weights & Biases.

Invariant: a step is sent when its line of ``metrics.jsonl`` is complete, and a resumed
run goes on after the last of them; so the logs have each step once.
"""

import dataclasses
import importlib.util
import math
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxinf.command_line import UsageError
from jaxinf.train.config import TrainConfig
from jaxinf.train.metrics import StepLine, read_lines

_NUM_AGAIN = 1000  # steps that a resumed run writes again
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


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
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module that says nothing of where it is from
        return False


def scalars_of(line: StepLine) -> dict[str, float]:
    """Returns the numbers of a step by name, such as ``phases/read``."""
    fields = dataclasses.asdict(line)
    del fields["step"]
    if line.tokens is not None and line.step_s:
        fields["tokens_per_s"] = line.tokens / line.step_s
    return dict(_numbers(fields))


def _numbers(
    fields: Mapping[str, Any], before: str = ""
) -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{before}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield before + name, float(value)


class Trackers:
    """The trackers that a run asks for; none by default.

    Args:
      config: the run. Its ``validation.jsonl`` has been cut to the last commit.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._trackers: list[_Tracker] = []

    def begin(self, path: Path, step: int) -> None:
        """Opens them after the last step whose line is in ``metrics.jsonl``; blocks."""
        if self._config.wandb is not None:
            self._trackers.append(_Wandb(self._config.wandb, self._config))
            self._evaluated_after(step)
        if self._config.tensorboard is None:
            return
        # A killed process may not have written all. Readers leave out what a file has
        # of the steps with which a later one begins.
        first = max(0, step - _NUM_AGAIN)
        board = _TensorBoard(self._config.tensorboard, first)
        for line in read_lines(path):
            if line["step"] > first:
                board.send(line["step"], scalars_of(StepLine(**line)))
        others, self._trackers = self._trackers, list[_Tracker]([board])
        self._evaluated_after(first)
        self._trackers += others

    def _evaluated_after(self, step: int) -> None:
        for line in read_lines(self._config.logs / "validation.jsonl"):
            if line["step"] > step:
                self.evaluated(line["step"], line)

    def wrote(self, line: StepLine) -> None:
        for tracker in self._trackers:
            tracker.send(line.step, scalars_of(line))

    def evaluated(self, step: int, found: Mapping[str, Any]) -> None:
        """Takes a line of ``validation.jsonl``."""
        names = ("loss", "perplexity", "accuracy")
        values = dict(_numbers({name: found.get(name) for name in names}, "held_out/"))
        for tracker in self._trackers:
            tracker.send(step, values)

    def close(self) -> None:
        """Writes what is left; idempotent."""
        while self._trackers:
            self._trackers.pop().close()


class _Tracker(ABC):
    @abstractmethod
    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Takes numbers by name."""

    @abstractmethod
    def close(self) -> None:
        """Ends the log."""


class _TensorBoard(_Tracker):
    def __init__(self, place: Path, step: int) -> None:
        import tensorboardX

        self._writer = tensorboardX.SummaryWriter(
            str(place.expanduser()),
            purge_step=step + 1,
            flush_secs=1,
            filename_suffix=f".{step}.{os.getpid()}",
        )

    def send(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb(_Tracker):
    def __init__(self, project: str, config: TrainConfig) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        kept = config.logs / "wandb.id"
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex)
        self._run = wandb.init(
            project=project,
            dir=str(config.logs),
            id=kept.read_text(),
            resume="allow",
            config=config.to_json(),
        )

    def send(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
