"""What `jaxinf plan` predicts of runs, beside what they take.

    python scripts/predict_runs.py DIR [--only NAME] [--runs 5] [--minutes 35] [--json]

Measures this machine with `jaxinf doctor --machine`, plans each configuration by its
operations and with `--measure`, and only then trains each of them a few steps in a
process of its own, all in turns. Machine, plans and runs are kept in DIR, so the same
command goes on where it was stopped. A configuration that had runs before its plan was
no blind test, and the table says so; --plan-again makes such plans, of another version.

Steps are those after the first ones. The time is the median of a run's steps, memory is
the most that the process had resident. A configuration whose runs spread by more than
--bound of their median (half of the difference between the slowest and the fastest)
runs again, up to three times while --minutes last; its last set is shown, and counts if
it spreads less. Drives are throttled, as this machine's own is shared.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MIB = 1 << 20
NUM_FIRST = 2
"""Steps that a run begins with, which read and plan anew."""

GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_positions": 256}
SIZES = {
    "little": {**GPT2, "n_layer": 6, "n_head": 6, "n_embd": 384},
    "middle": {**GPT2, "n_layer": 8, "n_head": 8, "n_embd": 512},
}
"""Of 11 and 25 million params."""

KINDS: Mapping[str, Sequence[str]] = {"operations": (), "measured": ("--measure",)}
"""How times of programs are predicted, with the flags of `jaxinf plan`."""

BOUNDS = {"operations": (0.20, 0.35), "measured": (0.10, 0.20)}
"""Errors that are allowed: the median, and the worst."""

NANO = ("--preset", "nano", "--batch-size", "8", "--seq-len", "64")
LITTLE = ("--model-config", "{dir}/little.json", "--batch-size", "4", "--seq-len", "64")
MID = ("--model-config", "{dir}/middle.json", "--batch-size", "4", "--seq-len", "64")
SMALL = ("--preset", "small", "--batch-size", "1", "--seq-len", "64")
NUM_REPEATS = 3
"""Sets of runs beside the first one."""

STREAM = ("--mode", "stream", "--memory")
TWO = ("--csd-root", "{run}/drive0", "--csd-root", "{run}/drive1")


def drive(megabytes: int) -> tuple[str, str]:
    """Flags of throttled drives."""
    return "--csd", f"host:drive={megabytes}MB/s"


CONFIGURATIONS: Mapping[str, Sequence[str]] = {
    "little-memory": (*LITTLE, "--mode", "memory"),
    "little-update": (*LITTLE, *drive(500)),
    "little-recompute": (*LITTLE, *STREAM, "192MiB", *drive(500)),
    "middle-memory": (*MID, "--mode", "memory"),
    "middle-update": (*MID, *drive(600)),
    "middle-update-int8": (*MID, "--state", "int8", *drive(300)),
    "middle-update-two-drives": (*MID, *TWO, *drive(300)),
    "middle-recompute": (*MID, *STREAM, "384MiB", *drive(600)),
    "middle-recompute-small-budget": (*MID, *STREAM, "192MiB", *drive(600)),
    "middle-keep": (*MID, *STREAM, "384MiB", "--policy", "keep", *drive(600)),
    "middle-offload": (*MID, *STREAM, "192MiB", "--policy", "offload", *drive(600)),
    "middle-resident": (*MID, *STREAM, "512MiB", "--resident", "params", *drive(600)),
    "middle-stream-int8": (*MID, *STREAM, "384MiB", "--state", "int8", *drive(300)),
    "middle-stream-two-drives": (*MID, *STREAM, "384MiB", *TWO, *drive(300)),
    "nano-update": (*NANO, *drive(40)),
    "nano-parts": (*NANO, *STREAM, "96MiB", "--micro-batches", "4"),
    "small-recompute": (*SMALL, *STREAM, "1GiB", *drive(400)),
}
"""Flags by name; {dir} is DIR and {run} a new folder in it."""

APART = ("nano-update", "nano-parts", "small-recompute")
"""Configurations that run only if --only names them."""


def words_of(name: str, place: Path) -> list[str]:
    """Returns the flags of a configuration that a plan of it takes, too."""
    words = CONFIGURATIONS[name]
    return [word.format(dir=place, run=place / "run") for word in words]


def machine_of(place: Path) -> Path:
    """Returns the file of this machine; measures it first if there is none."""
    file = place / "machine.json"
    if not file.exists():
        command = [sys.executable, "-m", "jaxinf", "doctor", str(place), "--json"]
        run([*command, "--machine", str(file)])
    return file


def plan(name: str, kind: str, place: Path) -> dict[str, Any]:
    """Plans a configuration."""
    make_drives(place)
    words = [*words_of(name, place), "--machine", str(machine_of(place)), "--json"]
    done = run([sys.executable, "-m", "jaxinf", "plan", *words, *KINDS[kind]])
    return json.loads(done.stdout)


def plan_all(place: Path, names: Sequence[str], *, again: bool) -> None:
    """Plans what has no plan; notes how many runs there were before."""
    file = place / "plans.jsonl"
    if again:
        file.unlink(missing_ok=True)
    for name in names:
        for kind in KINDS:
            if any(p["name"] == name and p["kind"] == kind for p in read(file)):
                continue
            before = sum(one["name"] == name for one in read(place / "runs.jsonl"))
            line = {"name": name, "kind": kind, "num_before": before}
            append(file, line | {"plan": plan(name, kind, place)})
            print(f"planned {name} by {kind}", file=sys.stderr, flush=True)


def make_drives(place: Path) -> None:
    """Makes the folders that stand for drives."""
    for number in range(2):
        (place / "run" / f"drive{number}").mkdir(parents=True, exist_ok=True)


def train(name: str, place: Path, num_steps: int) -> dict[str, Any]:
    """Trains a configuration; returns the figures of its run."""
    shutil.rmtree(place / "run", ignore_errors=True)
    make_drives(place)
    words = [*words_of(name, place), "--log-dir", str(place / "run" / "log")]
    if "memory" not in words:
        words += ["--store", str(place / "run" / "store")]
    words += ["--steps", str(num_steps + NUM_FIRST), "--sample-bytes", "0"]
    output = place / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxinf.train", *words],
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{name} failed:\n{output.read_text()}")
    lines = (place / "run" / "log" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][NUM_FIRST:]
    shutil.rmtree(place / "run")

    def mean(field: str) -> float:
        # The last step's commit may not have ended when its line was written.
        return statistics.fmean(step[field] for step in steps[:-1])

    return {
        "name": name,
        "step_s": [step["step_s"] for step in steps],
        "read_bytes": mean("drive_read_bytes"),
        "written_bytes": mean("drive_write_bytes"),
        "peak_bytes": 1024 * used.ru_maxrss,
        "load": os.getloadavg()[0],
    }


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; ends this program if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr}")
    return done


def read(file: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file, or none if it is missing."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def append(file: Path, line: Mapping[str, Any]) -> None:
    """Adds a line to a file."""
    with file.open("a") as output:
        output.write(json.dumps(line) + "\n")


def spread(runs: Sequence[Mapping[str, Any]]) -> float:
    """Half of the difference between the slowest and the fastest, of their median."""
    times = [statistics.median(one["step_s"]) for one in runs]
    return (max(times) - min(times)) / 2 / statistics.median(times)


def last_set(arguments: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Returns the runs of a configuration that count, if their spread allows it."""
    own = [one for one in read(arguments.place / "runs.jsonl") if one["name"] == name]
    num_sets = max(1, len(own) // arguments.runs)
    return own[(num_sets - 1) * arguments.runs : num_sets * arguments.runs]


def run_in_turns(
    arguments: argparse.Namespace, names: Sequence[str], num_sets: int
) -> None:
    """Trains what is missing of so many sets, one configuration after another."""
    results: Path = arguments.place / "runs.jsonl"
    for turn in range(1, num_sets * arguments.runs + 1):
        for name in names:
            if sum(one["name"] == name for one in read(results)) < turn:
                line = train(name, arguments.place, arguments.steps)
                append(results, line)
                shown = statistics.median(line["step_s"])
                print(f"{name}: {shown:.3f} s a step", file=sys.stderr, flush=True)


def run_all(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Trains all, and those again that spread too much, while there is time."""
    until_s = arguments.began_s + 60 * arguments.minutes
    run_in_turns(arguments, names, 1)
    for num_sets in range(2, 2 + NUM_REPEATS):
        for name in names:
            is_over = time.monotonic() > until_s
            if spread(last_set(arguments, name)) > arguments.bound and not is_over:
                run_in_turns(arguments, [name], num_sets)


def compare(line: Mapping[str, Any], runs: Sequence[Any]) -> dict[str, Any]:
    """Returns predicted and found of a configuration."""
    planned, times = line["plan"], [statistics.median(one["step_s"]) for one in runs]
    sizes, found_s = planned["sizes"], statistics.median(times)
    predicted_s = planned["forecast"]["step_s"]
    found: dict[str, Any] = {
        "step_s": [predicted_s, found_s],
        "error": predicted_s / found_s - 1,
        "spread": spread(runs),
        "num_runs": len(times),
        "is_blind": not line["num_before"],
        "phases": planned["forecast"]["phases"],
    }
    for field in ("read_bytes", "written_bytes"):
        found[field] = [sizes[field], statistics.median(one[field] for one in runs)]
    peak = statistics.median(one["peak_bytes"] for one in runs)
    found["peak_bytes"] = [planned["forecast"]["peak_bytes"], peak]
    return found


def show(kind: str, found: Mapping[str, Any], bound: float) -> None:
    """Prints a table of one kind of plans, and what the errors are together."""
    print(f"\n## Times of programs: {kind}\n")
    print("| configuration | s a step | found | spread | error | bytes | peak, MiB |")
    print("|---|---|---|---|---|---|---|")
    errors, apart = {}, []
    for name, one in found.items():
        notes = [f"{one['spread']:.0%} of {one['num_runs']}"]
        if one["spread"] > bound:
            apart.append(name)
            notes.append("does not count")
        else:
            errors[name] = abs(one["error"])
        notes += [] if one["is_blind"] else ["not blind"]
        cells = [name, *(f"{seconds:.3f}" for seconds in one["step_s"])]
        cells += [", ".join(notes), f"{one['error']:+.0%}"]
        cells += [_bytes_text(one), _peak_text(one)]
        print(f"| {' | '.join(cells)} |")
    if errors:
        median, worst = BOUNDS[kind]
        name = max(errors, key=lambda one: errors[one])
        print(
            f"\n{len(errors)} of {len(found)} count: median error "
            f"{statistics.median(errors.values()):.1%} (bound {median:.0%}), worst "
            f"{errors[name]:.1%} (bound {worst:.0%}) of {name}"
        )
    if apart:
        print(f"do not count: {', '.join(apart)}")


def _bytes_text(one: Mapping[str, Any]) -> str:
    pairs = [one["read_bytes"], one["written_bytes"]]
    if all(planned == found for planned, found in pairs):
        return "exact"
    return ", ".join(f"{planned - found:+.0f}" for planned, found in pairs)


def _peak_text(one: Mapping[str, Any]) -> str:
    planned, found = one["peak_bytes"]
    if planned is None:
        return f"- and {found / MIB:.0f}"
    is_near = abs(planned - found) <= max(0.05 * found, 32 * MIB)
    text = f"{planned / MIB:.0f} and {found / MIB:.0f}"
    return text if is_near else f"{text}: off"


def main() -> None:
    """Measures, plans, trains and compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("place", type=Path, metavar="DIR")
    parser.add_argument("--only", action="append", choices=[*CONFIGURATIONS])
    parser.add_argument("--runs", type=int, default=5, help="of each configuration")
    parser.add_argument("--steps", type=int, default=6, help="that count, of each run")
    parser.add_argument("--bound", type=float, default=0.1, help="spread that counts")
    parser.add_argument("--minutes", type=float, default=35, help="until no repeats")
    parser.add_argument("--no-run", action="store_true", help="only the runs there are")
    parser.add_argument("--plan-again", action="store_true", help="forget the plans")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arguments.began_s = time.monotonic()
    place = arguments.place = arguments.place.absolute()
    place.mkdir(parents=True, exist_ok=True)
    for size, fields in SIZES.items():
        (place / f"{size}.json").write_text(json.dumps(fields))
    names = arguments.only or [one for one in CONFIGURATIONS if one not in APART]
    machine_of(place)
    plan_all(place, names, again=arguments.plan_again)
    if not arguments.no_run:
        run_all(arguments, names)
    found = {
        kind: {
            line["name"]: compare(line, own)
            for line in read(place / "plans.jsonl")
            if line["kind"] == kind
            and line["name"] in names
            and (own := last_set(arguments, line["name"]))
        }
        for kind in KINDS
    }
    if arguments.json:
        print(json.dumps(found))
        return
    for kind, one in found.items():
        show(kind, one, arguments.bound)


if __name__ == "__main__":
    main()
