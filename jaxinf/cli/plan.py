"""``jaxinf plan``: what a training run would take, and better settings for it.

Invariant: nothing is trained, compiled or written. The exit status is 1 if the run, or
with ``--fit`` every setting of it, does not fit.
"""

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.text import Text

from jaxinf.cli.options import FLAGS, Switch, option
from jaxinf.command_line import UsageError
from jaxinf.terminal import make_console, printable
from jaxinf.train.__main__ import config_of
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.count import num_processes
from jaxinf.train.data.loader import Batch
from jaxinf.train.data.rows import TrainingData
from jaxinf.train.help import check_names, help_of
from jaxinf.train.loading import load, make_batches
from jaxinf.train.optimizers import check_optimizer
from jaxinf.train.plan import fit, fit_table, plan_run, plan_text
from jaxinf.train.report import say_config

_PROG = "jaxinf plan"
_FILES = {".toml": "--config", ".json": "--model-config", "": "--from"}


@dataclass(frozen=True)
class Plan:
    """Count what a training run would take: memory at its peak, disk, bytes, and time.

    Takes the trainer's flags, or first the name of a run's file (.toml), of a model's
    config.json, or of a folder with one. Nothing is trained, compiled or written, and
    no weights are read. The exit status is 1 if the run does not fit.
    """

    # Count a list of settings, print them as a table, and the fastest that keeps all
    # bits as a command line. Flags that are given stay as they are. Needs --machine.
    fit: Switch = False
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
    given = replace(config_of(rest, _PROG), machine=own.machine)
    config, data, batch = _loaded(given)
    console = make_console(soft_wrap=True)
    if not own.fit and not own.json:
        say_config(console, config, data)
    if own.fit:
        with _planning(make_console(sys.stderr)) as say:
            plans, refused = fit(config, batch, say)
        fits = bool(plans) and not plans[0].misfits
        named = [] if given.store == config.store else ["--store", "STORE"]
        words = ["jaxinf", "train", *rest]
        line = shlex.join([*words, *plans[0].words, *named]) if fits else None
        found = f"the fastest that fits:\n  {line}" if fits else "nothing fits"
        text = "\n".join([*fit_table(plans), *refused, "", found])
        document: dict[str, Any] = {"best": line, "refused": [*refused]}
        document["settings"] = [
            {"flags": [*plan.words], "cost": plan.cost, "plan": plan.to_json()}
            for plan in plans
        ]
    else:
        plan = plan_run(config, batch)
        fits, document = not plan.misfits, dict(plan.to_json())
        text = plan_text(plan, batch)
    if own.json:
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        text = printable(text, keep="\n")
        console.print(text, markup=False, highlight=False)
    return int(not fits)


def _loaded(config: TrainConfig) -> tuple[TrainConfig, TrainingData, Batch]:
    """Returns a run with what its data decides, and a batch of one process."""
    if config.store is None and config.mode != "memory":
        config = replace(config, store=Path("STORE"))
    if config.distributed and config.distributed.num_processes is None:
        raise UsageError("--distributed: to plan a run of N, write HOST:PORT,N,0")
    config = check(config)
    check_optimizer(config)
    config, data = load(config)
    num, parts = num_processes(config), config.micro_batches
    rows = config.batch_size // num
    if config.batch_size % num or rows % parts:
        raise UsageError(
            f"--batch-size: expected a multiple of {num} processes x {parts} "
            f"micro-batches, got {config.batch_size}"
        )
    batch = jax.tree.map(lambda rows_of: rows_of[:rows], make_batches(config, data)[0])
    return config, data, batch


@contextlib.contextmanager
def _planning(console: Console) -> Iterator[Callable[[str], object]]:
    """Shows what is planned now in a transient line; in a pipe each in a line."""
    if not console.is_terminal:
        yield lambda text: console.print(printable(text), markup=False)
        return
    with console.status("planning", refresh_per_second=4) as status:
        yield lambda text: status.update(Text(printable(text)))
