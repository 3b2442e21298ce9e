"""Validation losses of the trainer by the format of its state, over several seeds.

    python scripts/convergence.py run results.jsonl --store DIR [--steps 1000]
    python scripts/convergence.py table results.jsonl
    python scripts/convergence.py plot results.jsonl docs/img/convergence.png

`run` trains the preset nano on Python's own sources once for each format and seed, with
the trainer's defaults, and appends a JSON line for each run. Finished runs are skipped
and stopped runs continue, so you can run it several times (`--limit`).
"""

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BF16_PARAMS = ("--param-dtype", "bfloat16")
FORMATS = {
    "fp32": (),
    "state bf16": ("--state", "bf16"),
    "state int8": ("--state", "int8"),
    "bf16 params, split master, int8": (*BF16_PARAMS, "--state", "int8"),
}
COLOURS = ("#333333", "#2a78b5", "#3d9a50", "#b8433f")


def train(place: Path, words: Sequence[str]) -> list[dict[str, Any]]:
    """Trains a run; returns its validation losses from step 0: `step` and `loss`."""
    store = ["--store", str(place / "store"), "--log-dir", str(place / "log")]
    command = [sys.executable, "-m", "jaxinf.train", *store, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [{"step": 0}, *read(place / "log" / "validation.jsonl")]


def run(arguments: argparse.Namespace) -> None:
    """Trains missing runs, at most `limit` of them."""
    known = {(line["format"], line["seed"]) for line in read(arguments.results)}
    wanted = itertools.product(range(arguments.seeds), FORMATS)
    todo = [(name, seed) for seed, name in wanted if (name, seed) not in known]
    for name, seed in todo[: arguments.limit]:
        words = ["--preset", "nano", "--steps", str(arguments.steps)]
        words += ["--eval-every", str(max(1, arguments.steps // 10))]
        words += ["--sample-bytes", "0", "--seed", str(seed), *FORMATS[name]]
        place = arguments.store / f"{name.replace(' ', '-')}-{seed}"
        losses = train(place, words)
        if losses[-1]["step"] < arguments.steps:
            raise SystemExit(f"{place}: stopped; the same command goes on with it")
        shutil.rmtree(place)
        line = {"format": name, "seed": seed, "steps": arguments.steps}
        line |= {"validation": losses[1:]}
        with arguments.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{name}, seed {seed}: {losses[-1]['loss']:.4f}", flush=True)


def read(results: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file, or none if it is missing."""
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines()]


def last_losses(lines: list[dict[str, Any]], name: str) -> list[float]:
    """Returns the last losses of a format's runs, in the order of their seeds."""
    own = sorted(
        (s["seed"], s["validation"][-1]["loss"]) for s in lines if s["format"] == name
    )
    return [loss for _, loss in own]


def table(arguments: argparse.Namespace) -> None:
    """Prints the last losses as Markdown, each beside the one of fp32 with its seed."""
    lines = read(arguments.results)
    base = last_losses(lines, "fp32")
    print(
        f"| format | {' | '.join(f'seed {n}' for n in range(len(base)))} | mean |",
        end="",
    )
    print(" difference to fp32, seed by seed |")
    print("|---|" + "---|" * (len(base) + 2))
    for name in FORMATS:
        losses = last_losses(lines, name)
        differences = [a - b for a, b in zip(losses, base, strict=True)]
        cells = [f"{loss:.4f}" for loss in (*losses, statistics.mean(losses))]
        shown = ", ".join(f"{d:+.4f}" for d in differences)
        print(f"| {name} | {' | '.join(cells)} | {shown} |")


def plot(arguments: argparse.Namespace) -> None:
    """Draws each run's curve, and the difference of its last loss to fp32's."""
    import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]: an extra

    lines = read(arguments.results)
    base = {s["seed"]: s["validation"] for s in lines if s["format"] == "fp32"}
    figure, (curves, differences) = plt.subplots(
        1, 2, figsize=(9, 3.4), layout="constrained"
    )
    for colour, name in zip(COLOURS, FORMATS, strict=True):
        label = name
        for line in (s for s in lines if s["format"] == name):
            steps = [point["step"] for point in line["validation"]]
            losses = [point["loss"] for point in line["validation"]]
            curves.plot(steps, losses, color=colour, linewidth=0.9, label=label)
            gaps = [
                a - b["loss"] for a, b in zip(losses, base[line["seed"]], strict=True)
            ]
            differences.plot(steps, gaps, color=colour, linewidth=0.9)
            label = None
    curves.set_ylabel("validation loss, nats a byte")
    differences.set_ylabel("less fp32's with the same seed")
    for axes in (curves, differences):
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    curves.legend(frameon=False, fontsize=8)
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.picture, dpi=150)


def main() -> None:
    """Trains, prints or draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(required=True)
    for action in (run, table, plot):
        words = actions.add_parser(action.__name__, help=action.__doc__)
        words.add_argument("results", type=Path)
        words.set_defaults(action=action)
        if action is run:
            words.add_argument("--store", type=Path, required=True, metavar="DIR")
            words.add_argument("--steps", type=int, default=1000)
            words.add_argument("--seeds", type=int, default=3)
            words.add_argument("--limit", type=int, help="end after so many runs")
        if action is plot:
            words.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    arguments.action(arguments)


if __name__ == "__main__":
    main()
