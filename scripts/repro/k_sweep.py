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

prints the error of an iteration for each group of runs; then for runs that differ in
nothing but the interval k, the fastest k, as published and as modelled, and what the
model's choice costs in published seconds.
"""

import argparse
import csv
import functools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

HostMachine: TypeAlias = Literal["h100", "a100", "a100 small"]
"""Four devices and their host; the last is slower, and has others on a network."""

FITTED_PARAMS = (7e9, 20e9)
"""Models whose runs the rates are fitted to."""

_DEVICES = 4


class Seconds(NamedTuple):
    """Seconds of an iteration's phases."""

    forward: float
    backward: float
    update: float

    @property
    def total(self) -> float:
        """Of the iteration."""
        return sum(self)


class TrainingRun(NamedTuple):
    """A published run.

    Attributes:
      group: The folder of its log.
      num_params: Params of the model.
      tensor_parallel, data_parallel: Devices that share a layer, and a batch.
      num_micro_batches: Of each device in an iteration.
      micro_batch: Sequences of 2,048 tokens in each.
      host_share: Share of the optimizer's state that the host has; the devices keep the
        rest.
      interval: The device updates every so many subgroups of the host; 0: none.
      flushes_beside: Whether gradients go to the host beside the backward pass.
      found: The published times: medians from the third iteration on.
    """

    group: str
    num_params: float
    tensor_parallel: int
    data_parallel: int
    num_micro_batches: float
    micro_batch: int
    host_share: float
    interval: int
    flushes_beside: bool
    found: Seconds

    @property
    def machine(self) -> HostMachine:
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


@functools.cache
def published_runs() -> tuple[TrainingRun, ...]:
    """The 217 runs whose logs the authors have published."""
    file = Path(__file__).with_name("deep_optimizer_states_published.csv")
    return tuple(map(_read, csv.DictReader(file.read_text().splitlines())))


def _read(row: Mapping[str, str]) -> TrainingRun:
    data_parallel, micro_batch = int(row["data_parallel"]), int(row["micro_batch"])
    return TrainingRun(
        row["group"],
        1e9 * float(row["billion_params"]),
        int(row["tensor_parallel"]),
        data_parallel,
        int(row["global_batch"]) / data_parallel / micro_batch,
        micro_batch,
        float(row["host_share"]),
        int(row["interval"]),
        row["flushes_beside"] == "1",
        Seconds(*(float(row[f"{phase}_s"]) for phase in Seconds._fields)),
    )


class Rates(NamedTuple):
    """Rates of a machine: seconds for each param, or as named. All are fitted.

    Attributes:
      forward: For a sequence, on one device.
      micro_batch: Seconds of a micro-batch, beside its sequences.
      backward: Seconds for one of the forward pass.
      flush, flush_beside: Of gradients that go to the host, after or beside the
        backward pass.
      host, host_shared: Of the host's update: for a param of a device, and for one of
        all the devices that share the host.
      beside, beside_shared: The same with an interval.
      device: Seconds of the device's update and its copies, for one of the host's
        beside them.
      network: Of a forward pass over more than one machine, for each micro-batch.
      network_backward: Seconds of its backward pass for one of forward.
    """

    forward: float
    micro_batch: float
    backward: float
    flush: float
    flush_beside: float
    host: float
    host_shared: float
    beside: float
    beside_shared: float
    device: float
    network: float = 0.0
    network_backward: float = 0.0


def iteration(rates: Rates, one: TrainingRun) -> Seconds:
    """Computes the seconds of a run's phases, for one device; all do the same."""
    forward_s = float(np.dot(_forward(one), (rates.forward, rates.micro_batch)))
    backward_s = rates.backward * forward_s
    if one.num_devices > _DEVICES:
        network_s = rates.network * _network(one)[0]
        forward_s = max(forward_s, network_s)
        backward_s = max(backward_s, rates.network_backward * network_s)
    flush_s = float(np.dot(_flushed(one), (rates.flush, rates.flush_beside)))
    host = (rates.host, rates.host_shared, rates.beside, rates.beside_shared)
    host_s = float(np.dot(_updated(one, 1 - one.device_share), host))
    device_s = rates.device * float(np.dot(_updated(one, one.device_share), host))
    return Seconds(forward_s, backward_s + flush_s, host_s + device_s)


# --- what each rate is of, and the fit ---------------------------------------------


def _forward(one: TrainingRun) -> list[float]:
    sequences = one.micro_batch * one.num_micro_batches
    return [one.num_params * sequences / one.tensor_parallel, one.num_micro_batches]


def _flushed(one: TrainingRun) -> list[float]:
    """The device's gradients stay there."""
    num = one.host_params * (1 - one.device_share)
    return [0.0, num] if one.flushes_beside else [num, 0.0]


def _updated(one: TrainingRun, share: float) -> list[float]:
    num = one.host_params * share
    own = [num, num * min(_DEVICES, one.num_devices)]
    return [0.0, 0.0, *own] if one.interval else [*own, 0.0, 0.0]


def _network(one: TrainingRun) -> list[float]:
    """Each machine gathers the whole model, whichever devices share its layers."""
    return [one.num_params * one.num_micro_batches]


def fit(runs: Sequence[TrainingRun], device: float | None = None) -> Rates:
    """Fits rates to the published times of runs on one machine.

    Least squares of relative errors, phase by phase; no rate is below 0.

    Args:
      runs: The runs.
      device: See `Rates`; by default it is fitted, too, which takes runs with several
        intervals.

    Raises:
      ValueError: There is no run on up to four devices, or runs have one interval.
    """
    near = [one for one in runs if one.num_devices <= _DEVICES]
    far = [one for one in runs if one.num_devices > _DEVICES]
    if not near:
        raise ValueError(f"expected runs on up to {_DEVICES} devices, found none")
    if device is None and len({one.interval for one in near} - {0}) < 2:
        raise ValueError("device: expected for runs that have one interval, got None")
    _, forward = _solved(near, _forward, lambda one: one.found.forward)
    _, backward = _solved(
        near,
        lambda one: [one.found.forward, *_flushed(one)],
        lambda one: one.found.backward,
    )
    tried = [n / 20 for n in range(61)] if device is None else [device]
    _, update, device = min(
        (*_solved(near, _update(share), lambda one: one.found.update), share)
        for share in tried
    )
    network = [0.0, 0.0]
    if far:
        _, (network_s,) = _solved(far, _network, lambda one: one.found.forward)
        _, (share,) = _solved(
            far, lambda one: [one.found.forward], lambda one: one.found.backward
        )
        network = [network_s, share]
    return Rates._make([*forward, *backward, *update, device, *network])


def _update(device: float) -> Callable[[TrainingRun], list[float]]:
    def terms(one: TrainingRun) -> list[float]:
        return _updated(one, 1 - one.device_share + device * one.device_share)

    return terms


def _solved(
    runs: Sequence[TrainingRun],
    terms: Callable[[TrainingRun], list[float]],
    found: Callable[[TrainingRun], float],
) -> tuple[float, list[float]]:
    """Returns the sum of the errors' squares, and the rates of the terms."""
    seconds = np.array([found(one) for one in runs])
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


@functools.cache
def fitted_rates() -> Mapping[HostMachine, Rates]:
    """The rates of each machine, fitted to the runs of `FITTED_PARAMS` on it.

    On two machines these have one interval, so that the rate of the device's updates is
    that of the third.
    """
    runs: dict[HostMachine, list[TrainingRun]] = {}
    for one in published_runs():
        if one.num_params in FITTED_PARAMS:
            runs.setdefault(one.machine, []).append(one)
    several = fit(runs.pop("a100"))
    found: dict[HostMachine, Rates] = {"a100": several}
    found |= {machine: fit(own, several.device) for machine, own in runs.items()}
    return found


# --- the tables ---------------------------------------------------------------------


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
