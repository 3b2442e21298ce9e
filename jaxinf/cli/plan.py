"""``jaxinf plan``: what a training run would take.

Invariant: nothing is trained or written.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from jaxinf.cli.arguments import FLAGS, Switch, option
from jaxinf.command_line import UsageError
from jaxinf.terminal import make_console, printable
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.data.rows import TrainingData
from jaxinf.train.help import check_names, help_of
from jaxinf.train.loading import load, make_batches
from jaxinf.train.messages import say_config
from jaxinf.train.optimizers import check_optimizer
from jaxinf.train.run_file import config_of
from jaxinf.train.run_plan import plan_run, plan_text

_PROG = "jaxinf plan"
_FILES = {".toml": "--config", ".json": "--preset", "": "--from"}


@dataclass(frozen=True)
class Plan:
    """Count what a training run would take: memory at its peak, disk, bytes, and time.

    Takes the trainer's flags, or first the name of a run's file (.toml), of a model's
    config.json, or of a folder with one. Nothing is trained or written, and
    no weights are read. The exit status is 1 if the run does not fit.
    """

    # Memory and rates of a machine, in a file that 'jaxinf doctor --json FILE' wrote,
    # or that you write (docs/training.md). By default this one, without times.
    machine: Annotated[Path | None, option("FILE")] = None
    # Print one JSON document instead.
    json: Switch = False


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit status.

    Raises:
      UsageError: the run is impossible, or a flag has no meaning.
      JaxinfError: the run is refused.
    """
    if text := help_of(words, _PROG, Plan):
        print(text, end="")
        return 0
    check_names(words)
    own, rest = tyro.cli(
        Plan, prog=_PROG, args=words, return_unknown_args=True, config=FLAGS
    )
    if rest and not rest[0].startswith("-"):
        rest = [_FILES.get(Path(rest[0]).suffix, "--from"), *rest]
    given, said = config_of(rest, _PROG)
    if said:
        print(printable(said), file=sys.stderr)
    given = replace(given, machine=own.machine)
    config, data, batch = _loaded(given)
    console = make_console(soft_wrap=True)
    if not own.json:
        say_config(console, config, data)
    plan = plan_run(config, batch)
    if own.json:
        print(json.dumps(plan.to_json(), indent=1, allow_nan=False))
    else:
        text = printable(plan_text(plan), keep="\n")
        console.print(text, markup=False, highlight=False)
    return int(not plan.fits)


def _loaded(config: TrainConfig) -> tuple[TrainConfig, TrainingData, Batch]:
    """Returns a run with what its data decides, and a batch."""
    if config.store is None and config.mode != "memory":
        config = replace(config, store=Path("STORE"))
    if config.distributed is not None:
        raise UsageError("--distributed: one process is planned; leave it out")
    config = check(config)
    check_optimizer(config)
    config, data = load(config)
    return config, data, make_batches(config, data)[0]
