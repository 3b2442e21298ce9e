"""A model of Deep Optimizer States' machines (Middleware 2024): seconds of iterations.

    forward ─► backward, which flushes gradients to the host ─► update ─► forward

    interval 0      the host updates all subgroups whose state it has
    interval k      the device updates every k-th, whose state comes over the link

Updates of the host and copies for the device's take turns, because the published times
require it: an update with interval k lasts the sum of both, for each k from 2 to 10. If
one hid behind the other, the larger would count. They share the host's memory, which
this model has as their server. The host's own updates are faster with an interval, as
their results are cast to 16 bits beside them.

Invariant: seconds are linear in params and tokens. Rates are fitted to the runs of 7
and 20 billion params, and none depends on the size of a model.

    python scripts/repro/k_sweep.py

prints the error of an iteration, for the sizes that rates are fitted to and others;
then for runs that differ in nothing but the interval k, the fastest k, as published and
as modelled, and what the model's choice costs in published seconds.
"""

import csv
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
import bench

FITTED_PARAMS = (7e9, 20e9)
"""Models whose runs the rates are fitted to."""

_DEVICES = 4  # of a machine


class TrainingRun(NamedTuple):
    """A published run.

    Attributes:
      group: the folder of its log.
      num_params: params of the model.
      tensor_parallel, data_parallel: devices that share a layer, and a batch.
      micro_batch: sequences of 2,048 tokens in each of a device's micro-batches.
      num_micro_batches: of each device in an iteration.
      host_share: share of the optimizer's state that the host has; the devices keep the
        rest.
      interval: the device updates every so many subgroups of the host; 0: none.
      flushes_beside: whether gradients go to the host beside the backward pass.
      found: the published seconds of forward, backward and update: medians from the
        third iteration on.
    """

    group: str
    num_params: float
    tensor_parallel: int
    data_parallel: int
    micro_batch: int
    num_micro_batches: float
    host_share: float
    interval: int
    flushes_beside: bool
    found: tuple[float, float, float]

    @property
    def machine(self) -> str:
        """Where it ran, which is inferred: by the folder's name and forward times."""
        if self.group.endswith("a100"):
            return "a100"
        return "h100" if "twinflow" in self.group else "a100 small"

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.tensor_parallel * self.data_parallel

    @property
    def host_params(self) -> float:
        """Params of a device whose state the host has."""
        return self.num_params / self.num_devices * self.host_share

    @property
    def device_share(self) -> float:
        """Share of these that the device updates."""
        return 1 / self.interval if self.interval else 0.0


def published_runs() -> list[TrainingRun]:
    """The 217 runs whose logs the authors have published."""
    file = Path(__file__).with_name("deep_optimizer_states_published.csv")
    runs = []
    for row in csv.DictReader(file.read_text().splitlines()):
        data_parallel, micro_batch = int(row["data_parallel"]), int(row["micro_batch"])
        phases = (float(row[f"{name}_s"]) for name in ("forward", "backward", "update"))
        one = TrainingRun(
            row["group"],
            1e9 * float(row["billion_params"]),
            int(row["tensor_parallel"]),
            data_parallel,
            micro_batch,
            int(row["global_batch"]) / data_parallel / micro_batch,
            float(row["host_share"]),
            int(row["interval"]),
            row["flushes_beside"] == "1",
            tuple(phases),  # type: ignore[arg-type]
        )
        runs.append(one)
    return runs


# --- what each rate is of, and the fit ---------------------------------------------

Terms = Sequence[float]


def _forward(one: TrainingRun) -> Terms:
    """Of one device's sequences, and of each micro-batch beside them."""
    sequences = one.micro_batch * one.num_micro_batches
    return [one.num_params * sequences / one.tensor_parallel, one.num_micro_batches]


def _flushed(one: TrainingRun) -> Terms:
    """Gradients that go to the host after the backward pass, or beside it."""
    num = one.host_params * (1 - one.device_share)
    return [0.0, num] if one.flushes_beside else [num, 0.0]


def _updated(one: TrainingRun, device: float) -> Terms:
    """The host's update without and with an interval.

    Each for the params of a device, and of all the devices that share the host.

    Args:
      device: seconds of the device's update and its copies, for one of the host's
        beside them.
    """
    num = one.host_params * (1 - one.device_share + device * one.device_share)
    own = [num, num * min(_DEVICES, one.num_devices)]
    return [0.0, 0.0, *own] if one.interval else [*own, 0.0, 0.0]


def _network(one: TrainingRun) -> Terms:
    """Each machine gathers the whole model, whichever devices share its layers."""
    return [one.num_params * one.num_micro_batches]


class Rates(NamedTuple):
    """Seconds for each of the terms above. All are fitted; no other is known."""

    forward: Terms
    backward: Terms  # for a second of forward, and of what is flushed
    update: Terms
    device: float
    network: Terms = (0.0,)
    network_backward: Terms = (0.0,)


def iteration(rates: Rates, one: TrainingRun) -> float:
    """Computes the seconds of an iteration, for one device; all do the same."""
    forward_s = np.dot(_forward(one), rates.forward)
    backward_s = rates.backward[0] * forward_s
    if one.num_devices > _DEVICES:
        network_s = np.dot(_network(one), rates.network)
        forward_s = max(forward_s, network_s)
        backward_s = max(backward_s, rates.network_backward[0] * network_s)
    flush_s = np.dot(_flushed(one), rates.backward[1:])
    update_s = np.dot(_updated(one, rates.device), rates.update)
    return float(forward_s + backward_s + flush_s + update_s)


def fit(runs: Sequence[TrainingRun], device: float | None = None) -> Rates:
    """Fits rates to the published times of runs on one machine.

    Least squares of relative errors, phase by phase; no rate is below 0.

    Args:
      runs: the runs.
      device: the rate of that name; by default it is fitted, too, which takes runs with
        several intervals.
    """
    near = [one for one in runs if one.num_devices <= _DEVICES]
    far = [one for one in runs if one.num_devices > _DEVICES]
    _, forward = _solved(near, 0, _forward)
    _, backward = _solved(near, 1, lambda one: [one.found[0], *_flushed(one)])
    tried = [n / 20 for n in range(61)] if device is None else [device]
    _, update, device = min(
        (*_solved(near, 2, lambda one, d=d: _updated(one, d)), d) for d in tried
    )
    if not far:
        return Rates(forward, backward, update, device)
    _, network = _solved(far, 0, _network)
    _, of_forward = _solved(far, 1, lambda one: [one.found[0]])
    return Rates(forward, backward, update, device, network, of_forward)


def _solved(
    runs: Sequence[TrainingRun], phase: int, terms: Callable[[TrainingRun], Terms]
) -> tuple[float, list[float]]:
    """Returns the sum of the errors' squares, and the rates of the terms."""
    seconds = np.array([one.found[phase] for one in runs])
    matrix: Any = np.array([terms(one) for one in runs]) / seconds[:, None]
    kept = list(range(matrix.shape[1]))
    while True:
        scale = np.abs(matrix[:, kept]).max(0)
        scale[scale == 0] = 1.0
        rates = np.linalg.lstsq(matrix[:, kept] / scale, np.ones(len(runs)))[0] / scale
        if (rates >= 0).all():
            break
        kept = [n for n, rate in zip(kept, rates, strict=True) if rate >= 0]
    solved = np.zeros(matrix.shape[1])
    solved[kept] = rates
    return float(np.square(matrix @ solved - 1).sum()), solved.tolist()


def fitted_rates(published: Sequence[TrainingRun]) -> dict[str, Rates]:
    """The rates of each machine, fitted to the runs of `FITTED_PARAMS` on it.

    On two machines these have one interval, so that the rate of the device's updates is
    that of the third.
    """
    runs = defaultdict(list)
    for one in published:
        if one.num_params in FITTED_PARAMS:
            runs[one.machine].append(one)
    several = fit(runs["a100"])
    others = {machine: fit(own, several.device) for machine, own in runs.items()}
    return others | {"a100": several}


# --- the tables ---------------------------------------------------------------------


def measure(*_: Any) -> dict[str, list[dict[str, Any]]]:
    """Returns errors of fitted and other sizes, and choices of k."""
    runs = published_runs()
    rates = fitted_rates(runs)
    modelled_s = {one: iteration(rates[one.machine], one) for one in runs}
    groups: dict[Any, list[TrainingRun]] = defaultdict(list)
    series: dict[Any, list[TrainingRun]] = defaultdict(list)
    for one in runs:
        groups["fitted" if one.num_params in FITTED_PARAMS else "others"].append(one)
        if one.interval:
            series[one._replace(interval=0, found=(0, 0, 0))].append(one)
    rows, choices = [], []
    for name, own in groups.items():
        errors = [abs(modelled_s[one] / sum(one.found) - 1) for one in own]
        row = {"sizes": name, "runs": len(own), "median": statistics.median(errors)}
        row |= {"worst": max(errors), "within 25 %": sum(e <= 0.25 for e in errors)}
        rows.append(row)
    for own in series.values():
        published = min(own, key=lambda one: sum(one.found))
        modelled = min(own, key=modelled_s.__getitem__)
        row = {"logs": published.group, "devices": published.num_devices}
        row |= {"published": published.interval, "modelled": modelled.interval}
        row["cost"] = sum(modelled.found) / sum(published.found)
        if len(own) > 2:
            choices.append(row)
    return {"groups": rows, "intervals": choices}


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    """Prints both tables."""
    for rows in found.values():
        bench.print_table(rows, 24, ".3f")


if __name__ == "__main__":
    bench.run(__doc__, measure, show, needs_store=False)
