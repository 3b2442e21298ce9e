"""``jaxinf plan``: what a training run would take, and better settings for it.

Invariant: nothing is trained, compiled or written. The exit status is 1 if the run, or
with ``--fit`` every setting of it, does not fit.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxinf.cli.options import FLAGS, option
from jaxinf.command_line import UsageError
from jaxinf.terminal import make_console, printable
from jaxinf.train.__main__ import config_of
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.data.rows import TrainingData
from jaxinf.train.help import check_names, help_of
from jaxinf.train.loading import load, make_batches
from jaxinf.train.optimizers import check_optimizer
from jaxinf.train.options import ProcessOptions
from jaxinf.train.plan import (
    fit,
    fit_table,
    plan_run,
    plan_text,
)
from jaxinf.train.progress import planning
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

    fit: Annotated[
        bool,
        option(
            "Count a list of settings, print them as a table, and the fastest that "
            "keeps all bits as a command line. Flags that are given stay as they are. "
            "Needs --machine."
        ),
    ] = False
    processes: Annotated[
        int,
        option(
            "Plan a run of --mode update in N processes, one on each host: what the "
            "one takes that takes the most.",
            "N",
        ),
    ] = 1
    machine: Annotated[
        Path | None,
        option(
            "Memory and rates of a machine, in a file that 'jaxinf doctor --json FILE' "
            "wrote, or that you write (docs/training.md). By default this one, without "
            "times.",
            "FILE",
        ),
    ] = None
    json: Annotated[bool, option("Print one JSON document instead.")] = False


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
    if own.fit and own.processes > 1:
        raise UsageError("--fit: not supported with --processes; leave one out")
    if rest and not rest[0].startswith("-"):
        rest = [_FILES.get(Path(rest[0]).suffix, "--from"), *rest]
    given = config_of(rest, _PROG)
    given = replace(given, machine=own.machine)
    config, data, batch = _loaded(given, own.processes)
    console = make_console(soft_wrap=True)
    if not own.fit and not own.json:
        say_config(console, config, data)
    if own.fit:
        with planning(make_console(sys.stderr)) as say:
            plans, refused = fit(config, batch, say=say)
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
        plan = plan_run(config, batch, num_processes=own.processes)
        fits, document = not plan.misfits, dict(plan.to_json())
        text = plan_text(plan, batch, num_processes=own.processes)
    if own.json:
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        text = printable(text, keep="\n")
        console.print(text, markup=False, highlight=False)
    return int(not fits)


def _loaded(
    config: TrainConfig, num_processes: int
) -> tuple[TrainConfig, TrainingData, Batch]:
    """Returns a run with what its data decides, and a batch, both of one process."""
    if config.store is None and config.mode != "memory":
        config = replace(config, store=Path("STORE"))
    is_sharded = config.fsdp
    if num_processes < 1:
        raise UsageError(f"--processes: expected at least 1, got {num_processes}")
    if num_processes > 1:
        if config.mode != "update":
            raise UsageError(
                f"--processes: expected --mode update, got {config.mode}, whose "
                "processes share params and values; plan it without --processes"
            )
        if config.batch_size % num_processes:
            raise UsageError(
                f"--batch-size: expected a multiple of the {num_processes} processes, "
                f"got {config.batch_size}"
            )
        alone = {one.name: one.default for one in fields(ProcessOptions)}
        share = config.batch_size // num_processes
        config = replace(config, **alone, batch_size=share)
    config = check(config)
    check_optimizer(config)
    config, data = load(config)
    batch = make_batches(config, data)[0]
    return replace(config, fsdp=is_sharded), data, batch
