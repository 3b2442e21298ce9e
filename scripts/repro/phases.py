"""Memory and link over a step, by phase, as the study 2406.10728 has it.

    python scripts/repro/phases.py --store DIR

A GPT-2 is streamed by the trainer with a trace. For forward, for backward and for what
is left after them, it prints a step's seconds, the share in which programs run, the
rates of the drives, and the least, mean and most memory of the process.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxinf.terminal import format_bytes
from jaxinf.train.__main__ import main as train_main

PHASES = ("forward", "backward", "after them")
Event = Mapping[str, Any]


def traced(place: Path, preset: str, steps: int) -> list[Event]:
    """Trains, and returns the events of the last steps."""
    words = ["--preset", preset, "--batch-size", 8, "--seq-len", 128]
    words += ["--mode", "stream", "--memory", "96MiB", "--policy", "keep"]
    words += ["--clip-norm", 0, "--sample-bytes", 0, "--steps", steps + 4]
    words += ["--trace", f"3:{steps + 2}", "--store", place / "store"]
    if train_main([*map(str, words), "--log-dir", str(place / "log")]):
        raise SystemExit("the run has failed")
    return json.loads((place / "log/trace.json").read_text())["traceEvents"]


def within(event: Event, begin: float, end: float) -> float:
    """Returns the microseconds of an event in a window."""
    return max(0.0, min(event["ts"] + event["dur"], end) - max(event["ts"], begin))


def windows(spans: Sequence[Event]) -> Mapping[str, list[tuple[float, float]]]:
    """Returns the time of each phase in each step; backward begins with its program."""
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    backward = [one for one in spans if one["name"].startswith("program backward")]
    for step in (one for one in spans if one.get("cat", "step") == "step"):
        begin, end = step["ts"], step["ts"] + step["dur"]
        own = [one for one in backward if within(one, begin, end)]
        if own:
            first = min(one["ts"] for one in own)
            last = max(one["ts"] + one["dur"] for one in own)
            times = pairwise((begin, first, last, end))
            for phase, part in zip(PHASES, times, strict=True):
                found[phase].append(part)
    return found


def rows(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Returns a row for each phase, in which bytes count by their span's time."""
    drives = {
        one["pid"]
        for one in events
        if one["name"] == "process_name" and "drives" in str(one["args"])
    }
    spans = [one for one in events if one.get("ph") == "X" and one.get("dur")]
    memory = [
        (one["ts"], one["args"]["process"]) for one in events if one["name"] == "memory"
    ]
    found = []
    for phase, parts in windows(spans).items():
        whole = sum(end - begin for begin, end in parts)

        def share(kind: str, amount: str = "", parts: Any = parts) -> float:
            return sum(
                within(one, *part) * (one["args"][amount] / one["dur"] if amount else 1)
                for one in spans
                for part in parts
                if one.get("cat") == kind and (not amount or one["pid"] in drives)
            )

        held = [m for at, m in memory if any(b <= at < e for b, e in parts)]
        row = {"phase": phase, "step_s": whole / 1e6 / len(parts)}
        row["programs_busy"] = share("program") / whole
        for kind in ("read", "write"):
            row[f"{kind}_bytes_per_s"] = share(kind, "bytes") * 1e6 / whole
        if held:
            row["memory_bytes"] = [min(held), statistics.mean(held), max(held)]
        found.append(row)
    return found


def main() -> None:
    """Prints a line for each phase, or one JSON document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--store", type=Path, required=True, help="a directory")
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--steps", type=int, default=10, help="that are traced")
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    arguments = parser.parse_args()
    said = contextlib.redirect_stdout(sys.stderr)
    with said, tempfile.TemporaryDirectory(dir=arguments.store) as place:
        found = rows(traced(Path(place), arguments.preset, arguments.steps))
    if arguments.json:
        print(json.dumps(found))
        return
    for row in found:
        rates = (row[f"{kind}_bytes_per_s"] for kind in ("read", "write"))
        moved = ", ".join(format_bytes(round(rate)) + "/s" for rate in rates)
        held = " / ".join(format_bytes(round(m)) for m in row.get("memory_bytes", ()))
        print(
            f"{row['phase']:10}  {row['step_s']:.3f} s, programs "
            f"{row['programs_busy']:.0%}; read, write {moved}; memory {held}"
        )


if __name__ == "__main__":
    main()
