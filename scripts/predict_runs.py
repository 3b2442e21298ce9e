"""What `jaxinf plan` predicts of runs, beside what they take.

    python scripts/predict_runs.py DIR [--only NAME] [--runs 5] [--measure] [--json]

Measures this machine with `jaxinf doctor --machine`, plans each configuration, and then
trains each of them a few steps in a process of its own, all in turns. A line for each
run is kept in DIR/runs.jsonl, so the same command goes on where it was stopped. Plans
are made anew each time: --no-run holds those of another version against the same runs.

Steps are those after the first ones. The time is the median of a run's steps, memory is
the most that the process had resident. A configuration does not count if the spread of
its runs, half of the difference between the slowest and the fastest, is more than
--bound of their median. Most drives are throttled, since this machine's own is shared;
params of a streamed step, and values that wait, pass at the drive's own speed.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MIB = 1 << 20
NUM_FIRST = 3
"""Steps that a run begins with, which read and plan anew."""

MIDDLE = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_positions": 256,
    "n_layer": 8,
    "n_head": 8,
    "n_embd": 512,
}

NANO = ("--preset", "nano", "--batch-size", "8", "--seq-len", "64")
MID = ("--model-config", "{dir}/middle.json", "--batch-size", "4", "--seq-len", "64")
SMALL = ("--preset", "small", "--batch-size", "1", "--seq-len", "64")
STREAM = ("--mode", "stream", "--memory")
TWO = ("--csd-root", "{run}/drive0", "--csd-root", "{run}/drive1")


def drive(megabytes: int) -> tuple[str, str]:
    """Flags of throttled drives."""
    return "--csd", f"host:drive={megabytes}MB/s"


CONFIGURATIONS: Mapping[str, Sequence[str]] = {
    "nano-memory": (*NANO, "--mode", "memory"),
    "nano-update": (*NANO, *drive(40)),
    "nano-stream": (*NANO, *STREAM, "96MiB", *drive(40)),
    "middle-memory": (*MID, "--mode", "memory"),
    "middle-update": (*MID, *drive(200)),
    "middle-update-unclipped": (*MID, "--clip-norm", "0", *drive(200)),
    "middle-update-int8": (*MID, "--state", "int8", *drive(100)),
    "middle-update-two-drives": (*MID, *TWO, *drive(150)),
    "middle-recompute": (*MID, *STREAM, "384MiB", *drive(200)),
    "middle-recompute-small-budget": (*MID, *STREAM, "192MiB", *drive(200)),
    "middle-keep": (*MID, *STREAM, "384MiB", "--policy", "keep", *drive(200)),
    "middle-offload": (*MID, *STREAM, "192MiB", "--policy", "offload", *drive(200)),
    "middle-stream-unclipped": (
        *MID,
        *STREAM,
        "384MiB",
        "--clip-norm",
        "0",
        *drive(200),
    ),
    "middle-resident": (*MID, *STREAM, "512MiB", "--resident", "params", *drive(200)),
    "middle-stream-int8": (*MID, *STREAM, "384MiB", "--state", "int8", *drive(100)),
    "middle-stream-two-drives": (*MID, *STREAM, "384MiB", *TWO, *drive(150)),
    "small-recompute": (*SMALL, *STREAM, "1GiB", *drive(400)),
}
"""Flags by name; {dir} is DIR and {run} a new folder in it."""

LONG = ("small-recompute",)
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


def plan(name: str, place: Path, *, measures: bool) -> dict[str, Any]:
    """Plans a configuration."""
    make_drives(place)
    words = [*words_of(name, place), "--machine", str(machine_of(place)), "--json"]
    words += ["--measure"] if measures else []
    done = run([sys.executable, "-m", "jaxinf", "plan", *words])
    return json.loads(done.stdout)


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


def read(results: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file, or none if it is missing."""
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines()]


def run_in_turns(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Trains what is missing, one configuration after another."""
    results: Path = arguments.place / "runs.jsonl"
    for turn in range(1, arguments.runs + 1):
        for name in names:
            if sum(one["name"] == name for one in read(results)) < turn:
                line = train(name, arguments.place, arguments.steps)
                with results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                shown = statistics.median(line["step_s"])
                print(f"{name}: {shown:.3f} s a step", file=sys.stderr, flush=True)


def compare(planned: Mapping[str, Any], runs: Sequence[Any]) -> dict[str, Any]:
    """Returns predicted and found of a configuration."""
    times = [statistics.median(one["step_s"]) for one in runs]
    sizes, found_s = planned["sizes"], statistics.median(times)
    predicted_s = planned["forecast"]["step_s"]
    found: dict[str, Any] = {
        "step_s": [predicted_s, found_s],
        "error": predicted_s / found_s - 1,
        "spread": (max(times) - min(times)) / 2 / found_s,
        "num_runs": len(times),
        "phases": planned["forecast"]["phases"],
    }
    for field in ("read_bytes", "written_bytes"):
        found[field] = [sizes[field], statistics.median(one[field] for one in runs)]
    peak = statistics.median(one["peak_bytes"] for one in runs)
    found["peak_bytes"] = [planned["forecast"]["peak_bytes"], peak]
    return found


def show(found: Mapping[str, Any], bound: float) -> None:
    """Prints a table, and what the errors are together."""
    print("| configuration | s a step | found | spread | error | bytes | peak, MiB |")
    print("|---|---|---|---|---|---|---|")
    errors = []
    for name, one in found.items():
        counts = one["spread"] <= bound
        errors += [abs(one["error"])] if counts else []
        cells = [name, *(f"{seconds:.3f}" for seconds in one["step_s"])]
        cells.append(f"{one['spread']:.0%}{'' if counts else ', does not count'}")
        cells += [f"{one['error']:+.0%}", _bytes_text(one), _peak_text(one)]
        print(f"| {' | '.join(cells)} |")
    if errors:
        print(
            f"\n{len(errors)} of {len(found)} count: median error "
            f"{statistics.median(errors):.1%}, worst {max(errors):.1%}"
        )


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
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="that count, of each run")
    parser.add_argument("--bound", type=float, default=0.2, help="spread that counts")
    parser.add_argument("--measure", action="store_true", help="plan with --measure")
    parser.add_argument("--no-run", action="store_true", help="only the runs there are")
    parser.add_argument("--no-plan", action="store_true", help="only train")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    place = arguments.place = arguments.place.absolute()
    place.mkdir(parents=True, exist_ok=True)
    (place / "middle.json").write_text(json.dumps(MIDDLE))
    names = arguments.only or [one for one in CONFIGURATIONS if one not in LONG]
    machine_of(place)  # before any run
    if not arguments.no_run:
        run_in_turns(arguments, names)
    if arguments.no_plan:
        return
    runs = read(place / "runs.jsonl")
    found = {}
    for name in names:
        if own := [one for one in runs if one["name"] == name]:
            planned = plan(name, place, measures=arguments.measure)
            found[name] = compare(planned, own)
    if arguments.json:
        print(json.dumps(found))
    else:
        show(found, arguments.bound)


if __name__ == "__main__":
    main()
