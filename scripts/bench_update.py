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
import itertools
import resource
import statistics
import time
from pathlib import Path
from typing import Any, TypeAlias, get_args

import bench
from floor import LOOPS, fio_s, moved_bytes
from update_rig import UpdateRig

from jaxinf.store import StateFormat
from jaxinf.transfer import sync_filesystem

NUM_WARM_UP = 4


Rep: TypeAlias = dict[str, Any]
"""Figures of a repetition, per step. `floor_s` and `durable_s` are the seconds to move
its bytes, by way, without a flush and with one."""


def run_steps(rig: UpdateRig, num_steps: int) -> Rep:
    """Runs steps, each committed before the next; returns when prefetches are done."""
    engine = rig.engine
    expected = engine.files.meters.snapshot().drive_read_bytes
    expected += num_steps * moved_bytes(rig.transfers())[0]
    bench.reset_peak()
    commits = []
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(num_steps):
        rig.step()
        engine.steps.join()
        metrics = rig.store.metrics_of(rig.step_number)
        assert metrics is not None
        commits.append(metrics.commit_s)
    wait_read_ahead(rig, expected)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    user_s, system_s = (after[n] - before[n] for n in (0, 1))
    return {
        "step_s": seconds / num_steps,
        "user_s": user_s / num_steps,
        "system_s": system_s / num_steps,
        "cpu_cores": (user_s + system_s) / seconds,
        "commit_s": commits,
        "peak_rss_bytes": bench.resident_bytes("VmHWM"),
    }


def wait_read_ahead(rig: UpdateRig, expected_bytes: int) -> None:
    """Blocks until the expected bytes have been read, or no more bytes are read."""
    meters = rig.engine.files.meters
    quiet_since, last = time.perf_counter(), -1
    while (found := meters.snapshot().drive_read_bytes) < expected_bytes:
        if found != last:
            quiet_since, last = time.perf_counter(), found
        elif time.perf_counter() - quiet_since > 1:
            raise SystemExit(
                f"bench_update: expected {expected_bytes} bytes read, found {found}"
            )
        time.sleep(0.0005)


def measure_floor(rig: UpdateRig, place: Path, fio_seconds: float) -> Rep:
    """Measures the seconds to move a step's bytes, by way."""
    transfers, files = rig.transfers(), rig.engine.files
    workers = files.options.num_workers_for(len(files.csds))
    floor_s, durable_s = {}, {}
    for name, loop in LOOPS.items():
        began = time.perf_counter()
        floor_s[name] = loop(transfers, workers)
        sync_filesystem(place)
        durable_s[name] = time.perf_counter() - began
    floor_s |= fio_s(place / "fio", transfers, fio_seconds)
    return {"floor_s": floor_s, "durable_s": durable_s}


def summary(rig: UpdateRig, reps: list[Rep]) -> dict[str, Any]:
    """Summarises all repetitions."""
    median, mparams = statistics.median, sum(leaf.size for leaf in rig.params) / 1e6
    columns = {name: [rep[name] for rep in reps] for name in reps[0]}
    step_s, floors, fastest = columns["step_s"], {}, {}
    for kind in ("floor_s", "durable_s"):
        ways = {way: [one[way] for one in columns[kind]] for way in columns[kind][0]}
        floors[kind] = {way: median(seconds) for way, seconds in ways.items()}
        way = min(ways, key=floors[kind].__getitem__)
        fastest[kind] = way, ways[way]
    way, floor_s = fastest["floor_s"]
    return bench.rounded(
        {
            "mparam_per_s": mparams / median(step_s),
            "step_s": median(step_s),
            "step_s_spread": [min(step_s), max(step_s)],
            "floor_mparam_per_s": mparams / median(floor_s),
            "floor": way,
            "floors_s": bench.rounded(floors["floor_s"]),
            **bench.ratios("ratio_to_floor", floor_s, step_s),
            "durable_floors_s": bench.rounded(floors["durable_s"]),
            **bench.ratios("ratio_to_durable_floor", fastest["durable_s"][1], step_s),
            "cpu_cores": median(columns["cpu_cores"]),
            "cpu_user_ms": 1e3 * median(columns["user_s"]),
            "cpu_system_ms": 1e3 * median(columns["system_s"]),
            "commit_s": median(itertools.chain(*columns["commit_s"])),
            "memory_bytes": rig.engine.options.memory_bytes,
            "rss_over_caller_bytes": max(columns["peak_rss_bytes"]) - rig.caller_bytes,
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
    rig.engine.steps.join()
    reps = []
    for _ in range(arguments.reps):
        rep = run_steps(rig, arguments.steps)
        reps.append(rep | measure_floor(rig, place, arguments.fio_seconds))
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
