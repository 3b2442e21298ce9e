"""Compares steps of adamw on a new store with the drive's floor, that is, bare I/O.

Each repetition runs a few steps, then the floor: loops that move the same bytes of the
same files, and fio with the same mix on the same file system. A step ends when its new
params are in the caller's arrays, its writes drained, its commit durable, and as much
prefetched as before it. Medians are printed.

    ratio_to_floor         the floor's seconds over the step's; the median of the
                           repetitions' own ratios, and an interval that has it
    ratio_to_durable_floor the same to the best loop and a flush of the drive after it,
                           which a commit waits for and a bare loop does not
    commit_s               from a step's last result to its commit
    cpu_user_ms, cpu_system_ms  CPU time of a step; it changes less than the step's time
                           when other programs run
    rss_over_caller_bytes  peak RSS during steps, less gradients, params, new params
"""

import argparse
import resource
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import bench
from floor import LOOPS, fio_s, moved_bytes
from update_rig import UpdateRig

from jaxinf.store import StateFormat
from jaxinf.transfer import sync_filesystem

NUM_WARM_UP = 4


@dataclass
class Rep:
    """The seconds of a repetition, per step, and its peak of memory.

    Attributes:
      floor_s: seconds to move a step's bytes, by way.
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
    engine = rig.engine
    expected = engine.opened.meters.snapshot().drive_read_bytes
    expected += num_steps * moved_bytes(rig.transfers())[0]
    bench.reset_peak()
    commits = []
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(num_steps):
        rig.step()
        engine.join()
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
        peak_rss_bytes=bench.resident_bytes("VmHWM"),
    )


def wait_read_ahead(rig: UpdateRig, expected_bytes: int) -> None:
    """Blocks until the expected bytes have been read, or no more bytes are read."""
    meters = rig.engine.opened.meters
    quiet_since, last = time.perf_counter(), -1
    while (found := meters.snapshot().drive_read_bytes) < expected_bytes:
        if found != last:
            quiet_since, last = time.perf_counter(), found
        elif time.perf_counter() - quiet_since > 1:
            raise SystemExit(
                f"bench_update: expected {expected_bytes} bytes read, found {found}"
            )
        time.sleep(0.0005)


def measure_floor(rig: UpdateRig, rep: Rep, place: Path, fio_seconds: float) -> None:
    """Measures the seconds to move a step's bytes, by way."""
    transfers, opened = rig.transfers(), rig.engine.opened
    workers = opened.options.workers_of(len(opened.csds))
    for name, loop in LOOPS.items():
        began = time.perf_counter()
        rep.floor_s[name] = loop(transfers, workers)
        sync_filesystem(place)
        rep.durable_s[name] = time.perf_counter() - began
    rep.floor_s |= fio_s(place / "fio", transfers, fio_seconds)


def best(found: list[dict[str, float]]) -> tuple[str, dict[str, float]]:
    """Returns the fastest way of several, and the medians of all."""
    medians = {way: statistics.median(rep[way] for rep in found) for way in found[0]}
    return min(medians, key=lambda way: medians[way]), medians


def summary(rig: UpdateRig, reps: list[Rep]) -> dict[str, Any]:
    """Summarises all repetitions."""
    mparams = sum(leaf.size for leaf in rig.params) / 1e6
    floor, floors = best([rep.floor_s for rep in reps])
    loop, loops = best([rep.durable_s for rep in reps])
    step_s = [rep.step_s for rep in reps]
    middle_s, median = statistics.median(step_s), statistics.median
    cores = [(rep.user_s + rep.system_s) / rep.step_s for rep in reps]
    peak = max(rep.peak_rss_bytes for rep in reps)
    return bench.rounded(
        {
            "mparam_per_s": mparams / middle_s,
            "step_s": middle_s,
            "step_s_spread": [min(step_s), max(step_s)],
            "floor_mparam_per_s": mparams / floors[floor],
            "floor": floor,
            "floors_s": bench.rounded(floors),
            **bench.ratios("ratio_to_floor", [r.floor_s[floor] for r in reps], step_s),
            "durable_floors_s": bench.rounded(loops),
            **bench.ratios(
                "ratio_to_durable_floor", [r.durable_s[loop] for r in reps], step_s
            ),
            "cpu_cores": median(cores),
            "cpu_user_ms": 1e3 * median(rep.user_s for rep in reps),
            "cpu_system_ms": 1e3 * median(rep.system_s for rep in reps),
            "commit_s": median(seconds for rep in reps for seconds in rep.commit_s),
            "memory_bytes": rig.engine.opened.options.memory_bytes,
            "rss_over_caller_bytes": peak - rig.caller_bytes,
        }
    )


def measure(arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Runs all repetitions and summarises them."""
    options = {"csd": arguments.csd, "state": arguments.state}
    if arguments.memory is not None:
        options["memory_bytes"] = arguments.memory
    num_params = int(arguments.params)
    rig = UpdateRig(place / "store", num_params, arguments.leaves, **options)
    read, written = moved_bytes(rig.transfers())
    for _ in range(NUM_WARM_UP):  # both slots are only preallocated before
        rig.step()
    rig.engine.join()
    reps = []
    for _ in range(arguments.reps):
        reps.append(run_steps(rig, arguments.steps))
        measure_floor(rig, reps[-1], place, arguments.fio_seconds)
    found = {
        "params": num_params,
        "leaves": len(rig.params),
        "csd": arguments.csd,
        "state": arguments.state,
        "load_average": bench.load_average(),
        "drive_read_bytes_per_param": round(read / num_params, 3),
        "drive_write_bytes_per_param": round(written / num_params, 3),
        **summary(rig, reps),
    }
    rig.close()
    return found


if __name__ == "__main__":
    bench.run(
        __doc__,
        measure,
        params=200e6,
        leaves={"type": int, "help": "default: one for each 16 Mi params"},
        state={"choices": get_args(StateFormat), "default": "fp32"},
        csd="host",
        reps=5,
        steps={"type": int, "default": 3, "help": "in a repetition"},
        memory=bench.SIZE,
        fio_seconds={"type": float, "default": 2.0, "help": "0: no fio"},
    )
