"""One short run of each model and task, and their losses as a picture.

    python scripts/training_curves.py run runs/curves [--steps 300] [--only bert]
    python scripts/training_curves.py plot runs/curves docs/img/training.png

`run` makes data from Python's own sources and the digits of scikit-learn, which every
machine has, and trains the preset nano on it near storage. Stopped runs continue, and
finished runs are skipped.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from finetune_tasks import functions

PACKAGES = ("asyncio", "email", "json", "tkinter")
RUNS: dict[str, tuple[str, ...]] = {
    "gpt2: text": ("--model", "gpt2"),
    "llama: text": ("--model", "llama"),
    "bloom: text": ("--model", "bloom"),
    "bert: hidden bytes of text": ("--model", "bert", "--learning-rate", "1e-3"),
    "gpt2: answers": ("--model", "gpt2", "--data", "pairs.jsonl", "--seq-len", "128"),
    "t5: answers": ("--model", "t5", "--data", "pairs.jsonl"),
    "bert: classes of text": (
        *("--model", "bert", "--task", "classification", "--data", "functions.jsonl"),
        *("--learning-rate", "5e-4"),
    ),
    "vit: digits": (
        *("--model", "vit", "--data", "digits.npz", "--batch-size", "32"),
        *("--learning-rate", "5e-4"),
    ),
}


def make_data(place: Path) -> None:
    """Writes the data of all runs, unless it is there."""
    from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]

    if (place / "digits.npz").exists():
        return
    place.mkdir(parents=True, exist_ok=True)
    pairs, classes = [], []
    for function in functions():
        package, source = Path(function.file).parent.name, function.text
        head, line = source.splitlines()[0], function.doc.strip().partition("\n")[0]
        if line and len(head) < 64 and len(line) < 64:
            pairs.append({"prompt": head + "\n", "response": line})
        if package in PACKAGES:
            label = PACKAGES.index(package)
            classes.append({"text": source[:64], "label": label})
    write_lines(place / "pairs.jsonl", pairs)
    write_lines(place / "functions.jsonl", classes)
    digits: Any = load_digits()
    images = (digits.images * (255 / 16)).astype(np.uint8)
    np.savez(place / "digits.npz", images=images, labels=digits.target)


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def run(arguments: argparse.Namespace) -> None:
    """Trains the requested models, one after another."""
    place: Path = arguments.place
    make_data(place)
    for name, words in RUNS.items():
        if arguments.only not in name:
            continue
        folder = place / name.replace(": ", "-").replace(" ", "-")
        words = [str(place / w) if w.endswith((".jsonl", ".npz")) else w for w in words]
        steps = str(arguments.steps)
        every = str(max(1, arguments.steps // 6))
        command = [sys.executable, "-m", "jaxinf.train", *words, "--steps", steps]
        command += ["--eval-every", every, "--sample-bytes", "0"]
        command += ["--store", str(folder / "store"), "--log-dir", str(folder)]
        print(f"{name}: {' '.join(command[1:])}", flush=True)
        subprocess.run(command, check=True)


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def plot(arguments: argparse.Namespace) -> None:
    """Draws training losses, smoothed, and validation losses."""
    import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]: an extra

    figure, panels = plt.subplots(2, 4, figsize=(11, 5), layout="constrained")
    for name, axes in zip(RUNS, panels.flat, strict=True):
        folder = arguments.place / name.replace(": ", "-").replace(" ", "-")
        lines = read(folder / "metrics.jsonl")
        losses = np.array([line["loss"] for line in lines])
        width = min(10, len(losses))
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        axes.plot(np.arange(width, len(losses) + 1), smooth, color="#2a78b5")
        held = read(folder / "validation.jsonl")
        steps = [line["step"] for line in held]
        axes.plot(steps, [line["loss"] for line in held], "o", color="#d1662f")
        share = f"{100 * held[-1]['accuracy']:.0f} % right"
        axes.set_title(f"{name}\n{held[-1]['loss']:.2f}, {share}", fontsize=9)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=7)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("loss, nats a token or label", fontsize=9)
    figure.savefig(arguments.picture, dpi=110)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Short runs of all models.")
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("place", type=Path)
    runs.add_argument("--steps", type=int, default=150)
    runs.add_argument("--only", default="", help="a part of the names of those to run")
    runs.set_defaults(call=run)
    picture = commands.add_parser("plot")
    picture.add_argument("place", type=Path)
    picture.add_argument("picture", type=Path)
    picture.set_defaults(call=plot)
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
