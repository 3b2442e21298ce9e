"""Deep Optimizer States' published iterations beside a model of its machines.

The model's rates are fitted to the runs of 7 and 20 billion params. The
error of an iteration is printed for each group of runs; then for runs that differ in
nothing but the interval of subgroups that the device updates, the fastest interval, as
published and as modelled, and what the model's choice costs in published seconds.

    python scripts/repro/k_sweep.py
"""

import argparse
import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass

from deep_optimizer_states import (
    FITTED_PARAMS,
    TrainingRun,
    fitted_rates,
    iteration,
    published_runs,
)
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Group:
    """Errors of a group of runs.

    Attributes:
      name: The folder of the logs.
      machine: Where they ran.
      runs: Number of runs.
      fitted: How many of them the rates are fitted to.
      median, worst: Relative errors of an iteration.
      update: Median relative error of the update.
    """

    name: str
    machine: str
    runs: int
    fitted: int
    median: float
    worst: float
    update: float


@dataclass(frozen=True)
class Choice:
    """The fastest interval of runs that differ in nothing else.

    Attributes:
      name: The folder of the logs.
      devices: Number of devices.
      tried: The published intervals above 0.
      published, modelled: The fastest.
      cost: Published seconds of the model's choice over those of the fastest.
    """

    name: str
    devices: int
    tried: tuple[int, ...]
    published: int
    modelled: int
    cost: float


def modelled_s(one: TrainingRun) -> float:
    """Returns the model's seconds of an iteration."""
    return iteration(fitted_rates()[one.machine], one).total


def groups() -> list[Group]:
    """Returns the errors of each group."""
    found: dict[str, list[TrainingRun]] = {}
    for one in published_runs():
        found.setdefault(one.group, []).append(one)
    return [_group(name, runs) for name, runs in found.items()]


def _group(name: str, runs: list[TrainingRun]) -> Group:
    rates = fitted_rates()[runs[0].machine]
    pairs = [(iteration(rates, one), one.found) for one in runs]
    errors = [abs(found.total / known.total - 1) for found, known in pairs]
    return Group(
        name,
        runs[0].machine,
        len(runs),
        sum(one.num_params in FITTED_PARAMS for one in runs),
        statistics.median(errors),
        max(errors),
        statistics.median(abs(f.update / known.update - 1) for f, known in pairs),
    )


def choices() -> list[Choice]:
    """Returns the fastest interval where more than two were tried."""
    found: dict[tuple[object, ...], list[TrainingRun]] = {}
    for one in published_runs():
        if one.interval:
            rest = one._asdict() | {"interval": None, "found": None}
            found.setdefault(tuple(rest.values()), []).append(one)
    return [_choice(runs) for runs in found.values() if len(runs) > 2]


def _choice(runs: list[TrainingRun]) -> Choice:
    published = min(runs, key=lambda one: one.found.total)
    modelled = min(runs, key=modelled_s)
    return Choice(
        published.group,
        published.num_devices,
        tuple(sorted(one.interval for one in runs)),
        published.interval,
        modelled.interval,
        modelled.found.total / published.found.total,
    )


def _table(title: str, names: str, rows: Iterable[Iterable[object]]) -> Table:
    table = Table(*names.split("|"), title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(str, row))
    return table


def main() -> None:
    """Prints both tables, or one JSON document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    arguments = parser.parse_args()
    found, fastest = groups(), choices()
    if arguments.json:
        document = {
            "groups": [asdict(one) for one in found],
            "intervals": [asdict(one) for one in fastest],
        }
        print(json.dumps(document, indent=1))
        return
    errors = [
        [f"{value:.1%}" if isinstance(value, float) else value for value in row]
        for row in map(astuple, found)
    ]
    intervals = [
        [name, devices, " ".join(map(str, tried)), *best, f"{cost:.3f}"]
        for name, devices, tried, *best, cost in map(astuple, fastest)
    ]
    console = Console()
    names = "logs|machine|runs|fitted|median|worst|update, median"
    console.print(_table("Errors of an iteration", names, errors))
    names = "logs|devices|intervals|fastest|model's|its cost"
    console.print(_table("The fastest interval", names, intervals))
    others = [
        abs(modelled_s(one) / one.found.total - 1)
        for one in published_runs()
        if one.num_params not in FITTED_PARAMS
    ]
    within = sum(error <= 0.25 for error in others)
    console.print(
        f"runs of other sizes: median {statistics.median(others):.1%}; {within} of "
        f"{len(others)} within 25 %"
    )


if __name__ == "__main__":
    main()
