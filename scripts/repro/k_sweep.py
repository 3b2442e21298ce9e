"""Deep Optimizer States' published iterations beside a model of its machines.

The model's rates are fitted to the runs of 7 and 20 billion params. The error of an
iteration is printed for each group of runs; then for runs that differ in nothing but
the interval k of subgroups that the device updates, the fastest k, as published and as
modelled, and what the model's choice costs in published seconds.

    python scripts/repro/k_sweep.py
"""

import argparse
import json
import statistics
from typing import Any

from deep_optimizer_states import (
    FITTED_PARAMS,
    TrainingRun,
    fitted_rates,
    iteration,
    published_runs,
)


def modelled_s(one: TrainingRun) -> float:
    """Returns the model's seconds of an iteration."""
    return iteration(fitted_rates()[one.machine], one).total


def error(one: TrainingRun) -> float:
    """Returns the relative error of an iteration."""
    return abs(modelled_s(one) / one.found.total - 1)


def groups() -> list[dict[str, Any]]:
    """Returns the errors of the runs of each folder of logs."""
    found: dict[str, list[TrainingRun]] = {}
    for one in published_runs():
        found.setdefault(one.group, []).append(one)
    return [
        {
            "logs": name,
            "machine": runs[0].machine,
            "runs": len(runs),
            "fitted": sum(one.num_params in FITTED_PARAMS for one in runs),
            "median": statistics.median(map(error, runs)),
            "worst": max(map(error, runs)),
        }
        for name, runs in found.items()
    ]


def choices() -> list[dict[str, Any]]:
    """Returns the fastest k where more than two were tried."""
    found: dict[tuple[object, ...], list[TrainingRun]] = {}
    for one in published_runs():
        if one.interval:
            rest = one._asdict() | {"interval": None, "found": None}
            found.setdefault(tuple(rest.values()), []).append(one)
    rows = []
    for runs in found.values():
        published = min(runs, key=lambda one: one.found.total)
        modelled = min(runs, key=modelled_s)
        row = {"logs": published.group, "devices": published.num_devices}
        row |= {"published": published.interval, "modelled": modelled.interval}
        row["cost"] = modelled.found.total / published.found.total
        if len(runs) > 2:
            rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Prints rows in columns."""
    print("  ".join(f"{name:>16}" for name in rows[0]))
    for row in rows:
        cells = (f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values())
        print("  ".join(f"{cell:>16}" for cell in cells))


def main() -> None:
    """Prints both tables, or one JSON document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    if parser.parse_args().json:
        print(json.dumps({"groups": groups(), "intervals": choices()}, indent=1))
        return
    show(groups())
    print()
    show(choices())
    others = [one for one in published_runs() if one.num_params not in FITTED_PARAMS]
    errors = list(map(error, others))
    within = sum(one <= 0.25 for one in errors)
    print(
        f"runs of other sizes: median {statistics.median(errors):.1%}; {within} of "
        f"{len(errors)} within 25 %"
    )


if __name__ == "__main__":
    main()
