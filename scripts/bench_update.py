"""Compares steps of adamw on a new store with the drive's floor, that is, bare I/O.

Each repetition runs a few steps, then the floor: loops that move the same bytes of the
same files, and fio with the same mix on the same file system. A step ends when its new
params are in the caller's arrays, its writes drained, its commit durable, and as much
prefetched as before it. Medians are printed.

    ratio_to_floor         the floor's seconds over the step's; the median of the
                           repetitions' own ratios
    ratio_to_durable_floor the same to the best loop and a flush of the drive after it,
                           which a commit waits for and a bare loop does not
    step_ms, commit_ms     the time of a step, and that from its last result to its
                           commit; also the commit's share of the step, and the step
                           without the commit's time above 2 ms
    cpu_user_ms, cpu_system_ms  CPU time of a step; it changes less than the step's time
                           when other programs run
    rss_over_caller_bytes  peak RSS during steps, less gradients, params, new params
    rss_over_base_bytes    the same, less the process's memory after a store of as many
                           leaves with hardly any params: Python, JAX and its compiler
                           (0.2 MB a leaf), and jaxinf's fixed memory
"""

import argparse
import gc
import json
import os
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import ml_dtypes
import numpy as np
from floor import (
    LOOPS,
    FioJob,
    Transfer,
    fio_bytes_per_s,
    fio_jobs,
    moved_bytes,
)
from update_rig import UpdateRig

import jaxinf
from jaxinf.engine import MasterChoice
from jaxinf.program import AverageFormat
from jaxinf.store import StateFormat
from jaxinf.transfer import sync_filesystem

NUM_WARM_UP = 4
NUM_SMALL_PARAMS = 100_000
DTYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
NUM_FIO_KEPT = 2
USUAL_COMMIT_S = 2e-3
"""Commit time that counts as part of a step; more counts separately."""


@dataclass
class Rep:
    """The results of one repetition.

    Attributes:
      step_s: seconds per step.
      user_s, system_s: CPU time per step, of the program and of the system for it.
      commit_s: seconds from the last result of each step to its commit.
      peak_rss_bytes: peak RSS during the steps.
      floor_s: seconds to move a step's bytes, by method.
      durable_s: the same by loop, until they are durable.
    """

    step_s: float
    user_s: float
    system_s: float
    commit_s: list[float]
    peak_rss_bytes: int
    floor_s: dict[str, float] = field(default_factory=dict)
    durable_s: dict[str, float] = field(default_factory=dict)


def run_steps(rig: UpdateRig, num_steps: int) -> Rep:
    """Runs steps, each committed before the next; returns when prefetches are done."""
    per_step_bytes = moved_bytes(rig.transfers())[0]
    expected = rig.store._engine.opened.meters.snapshot().drive_read_bytes
    expected += num_steps * per_step_bytes
    reset_peak_rss()
    commits = []
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(num_steps):
        rig.step()
        rig.store._engine.join()
        metrics = rig.store.metrics_of(rig.step_number)
        assert metrics is not None
        commits.append(metrics.commit_s)
    wait_read_ahead(rig, expected)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    return Rep(
        step_s=seconds / num_steps,
        user_s=(after.ru_utime - before.ru_utime) / num_steps,
        system_s=(after.ru_stime - before.ru_stime) / num_steps,
        commit_s=commits,
        peak_rss_bytes=status_bytes("VmHWM"),
    )


def warm_up(rig: UpdateRig) -> None:
    """Writes both slots for the first time, since they are only preallocated."""
    for _ in range(NUM_WARM_UP):
        rig.step()
    rig.store._engine.join()


def wait_read_ahead(rig: UpdateRig, expected_bytes: int) -> None:
    """Blocks until the expected bytes have been read, or no more bytes are read."""
    meters = rig.store._engine.opened.meters
    quiet_since, last = time.perf_counter(), -1
    while (found := meters.snapshot().drive_read_bytes) < expected_bytes:
        if found != last:
            quiet_since, last = time.perf_counter(), found
        elif time.perf_counter() - quiet_since > 1:
            raise SystemExit(
                f"bench_update: expected {expected_bytes} bytes read, found {found}"
            )
        time.sleep(0.0005)


def reset_peak_rss() -> None:
    """Resets the kernel's high-water mark to the present RSS."""
    Path("/proc/self/clear_refs").write_text("5")


def status_bytes(name: str) -> int:
    """Returns a figure of this process, such as VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(name + ":")]
    return int(line.split()[1]) * 1024


class Fio:
    """Runs the fastest of fio's ways, chosen once, in every repetition.

    Args:
      place: a directory of the store's file system.
      transfers: the transfers of a step.
      seconds: duration of each run.
    """

    def __init__(self, place: Path, transfers: list[Transfer], seconds: float) -> None:
        read, written = moved_bytes(transfers)
        self._step_bytes = read + written
        self._read_share = read / self._step_bytes
        self._file = place / "fio"
        self._file_bytes = min(2 << 30, max(64 << 20, self._step_bytes))
        self._seconds = seconds
        jobs = fio_jobs() if seconds else []
        if jobs:  # the first run lays the file out
            self._step_s(jobs[0], 0.1)
        found = [(self._step_s(job, seconds / 2), job) for job in jobs]
        ranked = sorted((s, job.name, job) for s, job in found if s is not None)
        self.screened = {name: round(s, 4) for s, name, _ in ranked}
        self._kept = [job for _, _, job in ranked[:NUM_FIO_KEPT]]

    def _step_s(self, job: FioJob, seconds: float) -> float | None:
        rate = fio_bytes_per_s(
            job, self._file, self._file_bytes, self._read_share, seconds
        )
        return self._step_bytes / rate if rate else None

    def run(self) -> dict[str, float]:
        """Returns the seconds that a step's bytes would take, by way."""
        found = {job.name: self._step_s(job, self._seconds) for job in self._kept}
        return {name: s for name, s in found.items() if s is not None}


def num_workers(rig: UpdateRig) -> int:
    opened = rig.store._engine.opened
    return opened.options.workers_of(len(opened.csds))


def measure_floor(rig: UpdateRig, rep: Rep, place: Path, fio: Fio) -> None:
    """Measures the seconds to move a step's bytes, by way."""
    transfers, workers = rig.transfers(), num_workers(rig)
    for name, loop in LOOPS.items():
        began = time.perf_counter()
        rep.floor_s[name] = loop(transfers, workers)
        sync_filesystem(place)
        rep.durable_s[name] = time.perf_counter() - began
    rep.floor_s |= fio.run()


def spread(values: list[float]) -> list[float]:
    """Returns the least and the greatest value."""
    return [round(min(values), 4), round(max(values), 4)]


def summary(rig: UpdateRig, reps: list[Rep], base_rss_bytes: int) -> dict[str, Any]:
    """Summarises all repetitions."""
    num_params = sum(leaf.size for leaf in rig.params)
    by_way: dict[str, list[float]] = defaultdict(list)
    for rep in reps:
        for name, seconds in rep.floor_s.items():
            by_way[name].append(seconds)
    best = min(by_way, key=lambda name: statistics.median(by_way[name]))
    step_s = [rep.step_s for rep in reps]
    ratios = [rep.floor_s[best] / rep.step_s for rep in reps]
    return {
        "mparam_per_s": round(num_params / statistics.median(step_s) / 1e6, 2),
        "step_s": round(statistics.median(step_s), 4),
        **_step_ms(reps),
        "step_s_spread": spread(step_s),
        "floor_mparam_per_s": round(
            num_params / statistics.median(by_way[best]) / 1e6, 2
        ),
        "floor_s_spread": spread(by_way[best]),
        "floor": best,
        "floors_s": {n: round(statistics.median(v), 4) for n, v in by_way.items()},
        "ratio_to_floor": round(statistics.median(ratios), 4),
        "ratio_to_floor_spread": spread(ratios),
        **_loops("durable_floor", reps, [rep.durable_s for rep in reps]),
        **_cpu(reps),
        "commit_s": round(
            statistics.median(seconds for rep in reps for seconds in rep.commit_s), 4
        ),
        **_memory(rig, reps, base_rss_bytes),
    }


def _step_ms(reps: list[Rep]) -> dict[str, float]:
    """Returns the times of a step, of its commit, and of a step with a 2 ms commit."""
    commits = [statistics.mean(rep.commit_s) for rep in reps]
    beside = [
        rep.step_s - max(0.0, commit_s - USUAL_COMMIT_S)
        for rep, commit_s in zip(reps, commits, strict=True)
    ]
    share = [commit_s / rep.step_s for rep, commit_s in zip(reps, commits, strict=True)]
    return {
        "step_ms": round(1e3 * statistics.median(rep.step_s for rep in reps), 2),
        "commit_ms": round(1e3 * statistics.median(commits), 2),
        "commit_share": round(statistics.median(share), 3),
        "step_ms_with_usual_commit": round(1e3 * statistics.median(beside), 2),
    }


def _cpu(reps: list[Rep]) -> dict[str, float]:
    """Returns the CPU time of a step, and the cores that it keeps busy."""
    cores = [(rep.user_s + rep.system_s) / rep.step_s for rep in reps]
    return {
        "cpu_cores": round(statistics.median(cores), 3),
        "cpu_user_ms": round(1e3 * statistics.median(rep.user_s for rep in reps), 2),
        "cpu_system_ms": round(
            1e3 * statistics.median(rep.system_s for rep in reps), 2
        ),
    }


def _memory(rig: UpdateRig, reps: list[Rep], base_rss_bytes: int) -> dict[str, int]:
    caller_bytes = rig.caller_bytes
    over = max(rep.peak_rss_bytes for rep in reps) - caller_bytes
    return {
        "memory_bytes": rig.store._engine.opened.options.memory_bytes,
        "rss_over_caller_bytes": over,
        "rss_over_base_bytes": over - base_rss_bytes,
    }


def _loops(name: str, reps: list[Rep], found: list[dict[str, float]]) -> dict[str, Any]:
    """Returns the medians of loops, and the ratio of the fastest to the steps."""
    if not found[0]:
        return {}
    medians = {way: statistics.median(rep[way] for rep in found) for way in found[0]}
    best = min(medians, key=lambda way: medians[way])
    ratios = [own[best] / rep.step_s for own, rep in zip(found, reps, strict=True)]
    return {
        f"{name}s_s": {way: round(s, 4) for way, s in medians.items()},
        f"ratio_to_{name}": round(statistics.median(ratios), 4),
        f"ratio_to_{name}_spread": spread(ratios),
    }


def made_csds(place: Path, number: int) -> list[Path]:
    """Makes a directory in the place of each drive."""
    found = [place / f"csd{n}" for n in range(number)]
    for root in found:
        root.mkdir()
    return found


def measure(arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Runs all repetitions and summarises them."""
    options = {name: getattr(arguments, name) for name in ("master", "state", "csd")}
    if arguments.memory is not None:
        options["memory_bytes"] = arguments.memory
    if arguments.csds:
        options["csds"] = made_csds(place, arguments.csds)
    dtype = DTYPES[arguments.params_dtype]
    num_leaves = arguments.leaves
    small_params = max(NUM_SMALL_PARAMS, num_leaves or 0)
    small = UpdateRig(place / "small", small_params, num_leaves, dtype=dtype, **options)
    warm_up(small)
    small.close()
    base_rss_bytes = status_bytes("VmRSS") - small.caller_bytes
    del small  # XLA's memory for its programs is free for reuse, too
    gc.collect()
    num_params = int(arguments.params)
    average = None
    if arguments.average is not None:
        average = jaxinf.ema(0.999, form=arguments.average)
    rig = UpdateRig(
        place / "store", num_params, num_leaves, dtype=dtype, average=average, **options
    )
    try:
        transfers = rig.transfers()
        warm_up(rig)
        fio = Fio(place, transfers, arguments.fio_seconds)
        reps = []
        for _ in range(arguments.reps):
            rep = run_steps(rig, arguments.steps)
            measure_floor(rig, rep, place, fio)
            reps.append(rep)
        read, written = moved_bytes(transfers)
        return {
            "params": num_params,
            "leaves": len(rig.params),
            "csd": arguments.csd,
            "state": arguments.state,
            "master": arguments.master,
            "params_dtype": arguments.params_dtype,
            "load_average": round(os.getloadavg()[0], 2),
            "drive_read_bytes_per_param": round(read / num_params, 3),
            "drive_write_bytes_per_param": round(written / num_params, 3),
            **summary(rig, reps, base_rss_bytes),
            "fio": fio.screened or "not installed, or not asked for",
        }
    finally:
        rig.close()


def main() -> None:
    """Prints the figures, or with --json one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, required=True, metavar="DIR")
    parser.add_argument("--params", type=float, default=200e6)
    parser.add_argument("--leaves", type=int, help="default: one for each 16 Mi params")
    parser.add_argument("--state", choices=get_args(StateFormat), default="fp32")
    parser.add_argument("--master", choices=get_args(MasterChoice), default="auto")
    parser.add_argument(
        "--average", choices=get_args(AverageFormat), help="keep an average, too"
    )
    parser.add_argument("--params-dtype", choices=[*DTYPES], default="fp32")
    parser.add_argument("--csd", default="host")
    parser.add_argument("--csds", type=int, default=0, help="number of CSD roots")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in a repetition")
    parser.add_argument("--memory", type=int)
    parser.add_argument("--fio-seconds", type=float, default=2.0, help="0: no fio")
    parser.add_argument("--json", action="store_true", help="one line")
    arguments = parser.parse_args()
    check_offered(parser, arguments)
    arguments.store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=arguments.store, prefix="bench-update-"
    ) as place:
        result = measure(arguments, Path(place))
    print(json.dumps(result, indent=None if arguments.json else 1))


def check_offered(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> None:
    """Ends the program if the store does not support the settings."""
    if arguments.master == "none" and arguments.params_dtype != "bf16":
        parser.error(
            "--master none: expected with --params-dtype bf16; fp32 params are their "
            "own master"
        )


if __name__ == "__main__":
    main()
