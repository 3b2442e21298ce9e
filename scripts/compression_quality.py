"""Measures the cost of compressed gradients in quality: dense, 10 %, 2 % and 1 %.

Two tasks, every variant with three seeds: the nano GPT-2 on Python's standard library
(validation loss in nats a byte, the trainer itself) and the digits MLP of
scripts/digits.py (test accuracy). Both run in memory, through the transformation that
tests hold to a store's bits. Results go line by line into a file. A run in the file is
not repeated, so you can run the script several times:

    python scripts/compression_quality.py --results results.jsonl --minutes 6
    python scripts/compression_quality.py --results results.jsonl --plot quality.png
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from jaxinf.compress import parse_compression, sparsify

RATIOS = (0.1, 0.02, 0.01)
SEEDS = (0, 1, 2)
FEEDBACK = ",error_feedback=true"
VARIANTS = (
    "dense",
    *(f"top_k:{ratio}{more}" for ratio in RATIOS for more in ("", FEEDBACK)),
)
TASKS = {
    "nano": "validation loss, nats a byte",
    "digits": "test accuracy, %",
}


def nano(variant: str, seed: int, num_steps: int) -> float:
    """Returns the validation loss of a training run."""
    with tempfile.TemporaryDirectory() as logs:
        words = [
            *("--mode", "memory", "--preset", "nano", "--steps", str(num_steps)),
            *("--seed", str(seed), "--log-dir", logs, "--sample-bytes", "0"),
        ]
        if variant != "dense":
            words += ["--compress", variant]
        subprocess.run(
            [sys.executable, "-m", "jaxinf.train", *words],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        lines = (Path(logs) / "validation.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["loss"]


def digits_mlp(variant: str, seed: int, num_steps: int) -> float:
    """Returns the test accuracy in percent."""
    images, labels = load_digits(return_X_y=True)
    x, y = jnp.asarray(images / 16.0, jnp.float32), jnp.asarray(labels)
    tx = optax.adam(1e-3)
    if variant != "dense":
        tx = optax.chain(sparsify(parse_compression(variant)), tx)
    params = digits.init_params(jax.random.key(seed))
    state = tx.init(params)

    @jax.jit
    def step(params, state, x, y):
        updates, state = tx.update(jax.grad(digits.loss_of)(params, x, y), state)
        return optax.apply_updates(params, updates), state

    batches = np.random.default_rng(seed).integers(0, 1400, (num_steps, 64))
    for rows in batches:
        params, state = step(params, state, x[rows], y[rows])
    hits = digits.logits_of(params, x[1400:]).argmax(1) == y[1400:]
    return 100 * float(hits.mean())


RUN = {"nano": nano, "digits": digits_mlp}


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measure(path: Path, tasks: dict[str, int], minutes: float) -> None:
    """Appends results that the file lacks, until the time is over."""
    path.touch()
    done = {(r["task"], r["steps"], r["variant"], r["seed"]) for r in read(path)}
    end_s = time.monotonic() + 60 * minutes
    for seed in SEEDS:
        for task, num_steps in tasks.items():
            for variant in VARIANTS:
                if (task, num_steps, variant, seed) in done:
                    continue
                if time.monotonic() > end_s:
                    return
                started_s = time.monotonic()
                line = {
                    "task": task,
                    "steps": num_steps,
                    "variant": variant,
                    "seed": seed,
                    "result": RUN[task](variant, seed, num_steps),
                    "seconds": round(time.monotonic() - started_s, 1),
                }
                with path.open("a") as file:
                    file.write(json.dumps(line) + "\n")


def summary(results: list[dict]) -> dict[str, dict[str, tuple[float, float, int]]]:
    """Returns mean, half of the range and number of the seeds, by task and variant."""
    table: dict[str, dict[str, tuple[float, float, int]]] = {}
    for task in TASKS:
        for variant in VARIANTS:
            found = [
                r["result"]
                for r in results
                if (r["task"], r["variant"]) == (task, variant)
            ]
            if found:
                spread = (max(found) - min(found)) / 2
                entry = (statistics.mean(found), spread, len(found))
                table.setdefault(task, {})[variant] = entry
    return table


def say(results: list[dict]) -> None:
    steps = {r["task"]: r["steps"] for r in results}
    for task, rows in summary(results).items():
        print(f"\n{task}, {steps[task]} steps: {TASKS[task]}")
        print("| link volume | without error feedback | with error feedback |")
        print("|---|---|---|")
        for variant in ("dense", *(f"top_k:{ratio}" for ratio in RATIOS)):
            cells = [rows.get(variant), rows.get(variant + FEEDBACK)]
            shown = [
                f"{mean:.3f} ± {spread:.3f} ({count})" if cell else ""
                for cell in cells
                for mean, spread, count in [cell or (0.0, 0.0, 0)]
            ]
            name = variant.removeprefix("top_k:")
            name = name if name == "dense" else f"{100 * float(name):g} %"
            print(f"| {name} | {' | '.join(shown)} |")


def plot(results: list[dict], path: Path) -> None:
    import matplotlib  # pyright: ignore[reportMissingImports]: an extra

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]: an extra

    table = summary(results)
    figure, axes = plt.subplots(1, len(table), figsize=(4.5 * len(table), 3.2))
    for axis, (task, rows) in zip(np.atleast_1d(axes), table.items(), strict=True):
        dense, spread, _ = rows["dense"]
        axis.axhspan(dense - spread, dense + spread, color="0.85")
        axis.axhline(dense, color="0.4", linewidth=1, label="dense")
        for more, label in (("", "top_k"), (FEEDBACK, "top_k, error feedback")):
            points = [(r, rows.get(f"top_k:{r}{more}")) for r in RATIOS]
            known = [(100 * r, *entry) for r, entry in points if entry]
            volumes, means, spreads, _ = zip(*known, strict=True)
            axis.errorbar(volumes, means, spreads, marker="o", capsize=3, label=label)
        axis.set_xscale("log")
        axis.set_xticks([100 * r for r in RATIOS], [f"{100 * r:g} %" for r in RATIOS])
        axis.minorticks_off()
        axis.set_xlabel("link volume of the gradients")
        axis.set_ylabel(TASKS[task])
        axis.set_title(task)
    np.atleast_1d(axes)[-1].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="JSON lines")
    parser.add_argument("--nano-steps", type=int, default=500)
    parser.add_argument("--digits-steps", type=int, default=400)
    parser.add_argument("--minutes", type=float, default=0, help="to measure for")
    parser.add_argument("--plot", type=Path, help="write a picture here")
    arguments = parser.parse_args()
    steps = {"nano": arguments.nano_steps, "digits": arguments.digits_steps}
    measure(arguments.results, steps, arguments.minutes)
    results = read(arguments.results)
    say(results)
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
