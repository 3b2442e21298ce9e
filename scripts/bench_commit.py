"""Measures the cost of safety: commits at each durability, checksums, checkpoints.

It runs steps of adamw on a new store below --store, each configuration in turn in every
repetition, and prints medians. `step_s` is a step with all its writes drained and, if
one is due, its commit. Checkpoints are timed on stores of 10 M and of --params params.
With --export it times steps beside an export to a directory there instead.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from update_rig import UpdateRig

CONFIGURATIONS = {
    "step": {"durability": "step"},
    "step, verify never": {"durability": "step", "verify": "never"},
    "8": {"durability": 8},
    "checkpoint": {"durability": "checkpoint"},
}
STEPS = 8


def run_steps(rig):
    """Returns seconds per step, with the writes of the last one drained."""
    began = time.perf_counter()
    for _ in range(STEPS):
        rig.step()
    rig.store._training.join()
    return (time.perf_counter() - began) / STEPS


def last_commit_s(rig):
    """Returns seconds from the last result of the last step to its commit."""
    metrics = rig.store.metrics_of(rig.step_number)
    assert metrics is not None
    return metrics.commit_s


def measure_steps(place, num_params, repetitions, names):
    """Measures a step's and a commit's seconds by configuration, the base first."""
    rigs = {
        name: UpdateRig(place / str(number), num_params, **CONFIGURATIONS[name])
        for number, name in enumerate(dict.fromkeys(["step", *names]))
    }
    times = {name: [] for name in rigs}
    commits = {name: [] for name in rigs}
    for repetition in range(repetitions + 1):
        for name, rig in rigs.items():
            seconds = run_steps(rig)
            if repetition:  # the first only warms up
                times[name].append(seconds)
                commits[name].append(last_commit_s(rig))
    for rig in rigs.values():
        rig.close()
    return {
        name: {
            "step_s": round(statistics.median(times[name]), 4),
            "spread_s": round(max(times[name]) - min(times[name]), 4),
            "last_commit_s": round(statistics.median(commits[name]), 4),
            "ratio_to_step": round(
                statistics.median(
                    a / b for a, b in zip(times[name], times["step"], strict=True)
                ),
                4,
            ),
        }
        for name in rigs
    }


def measure_checkpoints(place, num_params, repetitions):
    """Returns the seconds to make a checkpoint, and to remove it."""
    rig = UpdateRig(place / f"checkpoints-{num_params}", num_params)
    made, removed = [], []
    for _ in range(repetitions):
        rig.step()
        rig.store.wait()
        began = time.perf_counter()
        name = rig.store.checkpoint()
        made.append(time.perf_counter() - began)
        began = time.perf_counter()
        rig.store.remove_checkpoint(name)
        removed.append(time.perf_counter() - began)
    num_files = sum(
        len(leaf.csds) * len(leaf.states) for leaf in rig.store._manifest.leaves
    )
    rig.close()
    return {
        "files": num_files,
        "save_s": round(statistics.median(made), 4),
        "remove_s": round(statistics.median(removed), 4),
    }


def measure_export(place, num_params, num_steps, bytes_per_s):
    """Returns a step's seconds alone and beside an export, and its chunks' rate."""
    rig = UpdateRig(
        place / "exports",
        num_params,
        export_every=num_steps,
        export_to=f"file://{place}/exported",
        export_bandwidth=bytes_per_s,
    )

    def step_s():
        began = time.perf_counter()
        rig.step()
        rig.store._training.join()
        return time.perf_counter() - began

    step_s()  # warms up
    alone = [step_s() for _ in range(num_steps - 2)]
    step_s()
    beside = []
    while rig.store.exports()[0].outcome == "under way":
        beside.append(step_s())
    rig.store.end_export(waits=False)
    rig.close()
    chunks = [f for f in (place / f"exported/{num_steps}").rglob("c/*") if f.is_file()]
    ends, sizes = zip(
        *sorted((f.stat().st_mtime, f.stat().st_size) for f in chunks), strict=True
    )
    return {
        "step_s": round(statistics.median(alone), 4),
        "step_beside_s": round(statistics.median(beside), 4),
        "steps_beside": len(beside),
        "bytes": sum(sizes),
        "bytes_per_s": round(sum(sizes[1:]) / (ends[-1] - ends[0])),
        "asked_bytes_per_s": bytes_per_s,
    }


def measure(arguments, place):
    """Returns the figures of all configurations and checkpoints."""
    num_params = int(arguments.params)
    if arguments.export:
        found = measure_export(place, num_params, STEPS, int(arguments.export))
        return {"params": num_params, "export": found}
    result = {
        "params": num_params,
        "durability": measure_steps(
            place, num_params, arguments.reps, arguments.configurations
        ),
    }
    if not arguments.no_checkpoints:
        result["checkpoints"] = {
            size: measure_checkpoints(place, size, arguments.reps)
            for size in (10_000_000, 2 * num_params)
        }
    return result


def main():
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True, metavar="DIR")
    parser.add_argument("--params", type=float, default=100e6)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument(
        "--configurations",
        nargs="+",
        choices=[*CONFIGURATIONS],
        default=[*CONFIGURATIONS],
        metavar="NAME",
        help=f"beside step: {', '.join(list(CONFIGURATIONS)[1:])}",
    )
    parser.add_argument("--no-checkpoints", action="store_true")
    parser.add_argument(
        "--export",
        type=float,
        default=0,
        metavar="BYTES/s",
        help="measure steps beside an export of so many bytes a second, and no more",
    )
    arguments = parser.parse_args()
    arguments.store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=arguments.store, prefix="bench-commit-"
    ) as place:
        result = measure(arguments, Path(place))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
