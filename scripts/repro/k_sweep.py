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

import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.recfunctions import append_fields

sys.path.append(str(Path(__file__).parents[1]))
import bench

FITTED_SIZES = (7, 20)
"""Billions of params of the models whose runs the rates are fitted to."""

_DEVICES = 4  # of a machine

Runs: TypeAlias = Any
"""A record array, with a column for each of these:

    group                             the folder of the log
    tensor_parallel, data_parallel    devices that share a layer, and a batch
    micro_batch, global_batch         sequences of 2,048 tokens in a micro-batch of a
                                      device, and in an iteration of all
    host_share                        of the optimizer's state; devices have the rest
    interval                          the device updates every so many subgroups of the
                                      host; 0: none
    flushes_beside                    whether gradients go to the host beside backward
    forward_s, backward_s, update_s   published: medians from the third iteration on
    published_s                       of an iteration
    num_micro_batches                 of each device in an iteration
    host_params                       of a device, whose state the host has
    device_share                      of these, whose updates the device computes

and with billion_params, num_params, num_devices and machine. """

Terms: TypeAlias = list[Any]
"""Columns, each of which has a rate."""


def published_runs() -> Runs:
    """Returns the 217 runs whose logs the authors have published."""
    file = Path(__file__).with_name("deep_optimizer_states_published.csv")
    how: Any = {"delimiter": ",", "names": True, "dtype": None, "encoding": "utf-8"}
    runs = np.genfromtxt(file, **how).view(np.recarray)
    has_gaps = np.char.endswith(runs.group, "a100")
    is_twinflow = np.char.find(runs.group, "twinflow") >= 0
    num_devices = runs.tensor_parallel * runs.data_parallel
    more = {
        "num_params": 1e9 * runs.billion_params,
        "num_devices": num_devices,
        "num_micro_batches": runs.global_batch / runs.data_parallel / runs.micro_batch,
        "host_params": 1e9 * runs.billion_params / num_devices * runs.host_share,
        "device_share": np.where(runs.interval, 1 / np.maximum(runs.interval, 1), 0.0),
        # Inferred, from folders' names and the times of forward.
        "machine": np.select([has_gaps, is_twinflow], ["a100", "h100"], "a100 small"),
        "published_s": runs.forward_s + runs.backward_s + runs.update_s,
    }
    columns: Any = (list(more), list(more.values()))
    return append_fields(runs, *columns, usemask=False, asrecarray=True)


# --- what each rate is of, and the fit ---------------------------------------------


def _forward(runs: Runs) -> Terms:
    """Of one device's sequences, and of each micro-batch beside them."""
    count, params = runs.num_micro_batches, runs.num_params / runs.tensor_parallel
    return [params * runs.micro_batch * count, count]


def _flushed(runs: Runs) -> Terms:
    """Gradients that go to the host after the backward pass, or beside it."""
    num, is_beside = runs.host_params * (1 - runs.device_share), runs.flushes_beside
    return [num * (1 - is_beside), num * is_beside]


def _updated(runs: Runs, device: float) -> Terms:
    """The host's update without and with an interval.

    Each for the params of a device, and of all the devices that share the host.

    Args:
      device: seconds of the device's update and its copies, for one of the host's
        beside them.
    """
    share, is_shared = runs.device_share, runs.interval > 0
    num = runs.host_params * (1 - share + device * share)
    both = [num, num * np.minimum(_DEVICES, runs.num_devices)]
    return [own * way for way in (~is_shared, is_shared) for own in both]


def _network(runs: Runs) -> Terms:
    """Each machine gathers the whole model, whichever devices share its layers."""
    return [runs.num_params * runs.num_micro_batches]


def model(known: Runs, runs: Runs, device: float | None = None) -> tuple[Any, float]:
    """Computes the seconds of iterations, for one device; all do the same.

    All rates are fitted to the published times of runs on the same machine: least
    squares of relative errors, phase by phase; none is below 0.

    Args:
      known: the runs that rates are fitted to.
      device: the rate of the device's updates; by default it is fitted, too, which
        takes runs with several intervals.

    Returns:
      The seconds of `runs`, and the rate of the device's updates.
    """
    is_near = known.num_devices <= _DEVICES
    near, far = known[is_near], known[~is_near]
    _, forward = _solved(near.forward_s, _forward(near))
    _, (back, *flush) = _solved(near.backward_s, [near.forward_s, *_flushed(near)])
    tried = [n / 20 for n in range(61)] if device is None else [device]
    _, update, device = min(
        (*_solved(near.update_s, _updated(near, one)), one) for one in tried
    )
    forward_s = np.dot(forward, _forward(runs))
    backward_s = back * forward_s
    if len(far):
        _, network = _solved(far.forward_s, _network(far))
        _, (network_back,) = _solved(far.backward_s, [far.forward_s])
        network_s = np.dot(network, _network(runs)) * (runs.num_devices > _DEVICES)
        forward_s = np.maximum(forward_s, network_s)
        backward_s = np.maximum(backward_s, network_back * network_s)
    flush_s, update_s = np.dot(flush, _flushed(runs)), _updated(runs, device)
    return forward_s + backward_s + flush_s + np.dot(update, update_s), device


def _solved(seconds: Any, terms: Terms) -> tuple[float, list[float]]:
    """Returns the sum of the errors' squares, and the rates of the terms."""
    matrix: Any = np.stack(terms, -1) / seconds[:, None]
    kept = list(range(matrix.shape[1]))
    while True:
        scale = np.abs(matrix[:, kept]).max(0)
        scale[scale == 0] = 1.0
        ones = np.ones(len(seconds))
        rates = np.linalg.lstsq(matrix[:, kept] / scale, ones)[0] / scale
        if (rates >= 0).all():
            break
        kept = [n for n, rate in zip(kept, rates, strict=True) if rate >= 0]
    solved = np.zeros(matrix.shape[1])
    solved[kept] = rates
    return float(np.square(matrix @ solved - 1).sum()), solved.tolist()


def modelled_s(runs: Runs) -> Any:
    """Computes iterations by the rates of each machine, fitted to its `FITTED_SIZES`.

    On two machines these have one interval, so that the rate of the device's updates is
    that of the third.
    """
    found, device = np.zeros(len(runs)), None
    is_fitted = np.isin(runs.billion_params, FITTED_SIZES)
    for machine in ("a100", "a100 small", "h100"):
        own = runs.machine == machine
        found[own], device = model(runs[is_fitted & own], runs[own], device)
    return found


# --- the tables ---------------------------------------------------------------------


def measure(*_: Any) -> dict[str, list[dict[str, Any]]]:
    """Returns errors of fitted and other sizes, and choices of k."""
    runs = published_runs()
    modelled, found = modelled_s(runs), runs.published_s
    errors = np.abs(modelled / found - 1)
    is_fitted = np.isin(runs.billion_params, FITTED_SIZES)
    rows = []
    for name, own in (("fitted", errors[is_fitted]), ("others", errors[~is_fitted])):
        row = {"sizes": name, "runs": len(own), "median": statistics.median(own)}
        row |= {"worst": max(own), "within 25 %": int(sum(own <= 0.25))}
        rows.append(row)
    series = defaultdict(list)
    for number, one in enumerate(runs):
        if one.interval:
            own = one.tolist()[: runs.dtype.names.index("interval")]
            series[*own, one.flushes_beside].append(number)
    choices = []
    for own in [own for own in series.values() if len(own) > 2]:
        published = min(own, key=found.__getitem__)
        fastest = min(own, key=modelled.__getitem__)
        row: dict[str, Any] = {"logs": str(runs.group[published])}
        row["devices"] = int(runs.num_devices[published])
        row["published"] = int(runs.interval[published])
        row["modelled"] = int(runs.interval[fastest])
        row["cost"] = float(found[fastest] / found[published])
        choices.append(row)
    return {"groups": rows, "intervals": choices}


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    """Prints both tables."""
    for rows in found.values():
        bench.print_table(rows, 24, ".3f")


if __name__ == "__main__":
    bench.run(__doc__, measure, show, needs_store=False)
