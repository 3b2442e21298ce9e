"""The times that `jaxinf plan` says, beside those that runs take.

    python scripts/bench_plan.py --place /mnt/nvme0/tmp [--roots /mnt/a /mnt/b]

Measures the machine as `jaxinf doctor --json FILE` does, plans three runs of GPT-2 with
124 M params, and makes them: in mode update, in mode stream, and on two roots. A step's
time is the median of the last ones. Wants a quiet machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = ["--preset", "small", "--batch-size", "2", "--seq-len", "128"]
STREAM = ["--mode", "stream", "--memory", "1536MiB"]
NUM_FIRST = 3  # steps that compile and read anew


def run(*words: object) -> str:
    """Runs jaxinf; returns its output."""
    line = [sys.executable, "-m", "jaxinf", *map(str, words)]
    return subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout


def seconds(
    place: Path, machine: Path, steps: int, words: list[str]
) -> dict[str, object]:
    """Plans a run and makes it."""
    store, logs = place / "store", place / "log"
    run_words = [*MODEL, *words, "--store", store, "--steps", steps]
    told = json.loads(run("plan", *run_words, "--machine", machine, "--json"))
    run("train", *run_words, "--log-dir", logs)
    lines = [json.loads(x) for x in (logs / "metrics.jsonl").read_text().splitlines()]
    found_s = statistics.median(line["step_s"] for line in lines[NUM_FIRST:])
    most = max(line["rss_bytes"] for line in lines)
    return {
        "planned_s": round(told["time"]["step_s"], 3),
        "found_s": round(found_s, 3),
        "ratio": round(told["time"]["step_s"] / found_s, 2),
        "limit": told["time"]["limit"],
        "terms_s": {k: round(v, 3) for k, v in told["time"]["terms_s"].items()},
        "host_bytes": told["tiers"]["host"]["needed_bytes"],
        "rss_bytes": most,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", type=Path, default=Path())
    parser.add_argument("--roots", type=Path, nargs=2, help="of two drives")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--size", default="2GiB", help="that doctor moves")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.place) as folder:
        place = Path(folder)
        roots = given.roots or (place / "a", place / "b")
        for root in roots:
            root.mkdir(exist_ok=True)
        machine = place / "machine.json"
        run("doctor", place, "--size", given.size, "--json", machine)
        print(json.dumps(json.loads(machine.read_text())))
        two = [word for root in roots for word in ("--csd-root", str(root))]
        for name, words in (("update", []), ("stream", STREAM), ("two drives", two)):
            with tempfile.TemporaryDirectory(dir=place) as own:
                found = seconds(Path(own), machine, given.steps, words)
            print(json.dumps({"run": name, **found}), flush=True)
    print(f"load of the last minute: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
