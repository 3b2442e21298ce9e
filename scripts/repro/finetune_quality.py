"""Measures the cost of compressed gradients in fine-tuning and in training anew.

A GPT-2 of 3.7 M params is pretrained on the library's own text and then fine-tuned on
the tasks of finetune_tasks.py, dense and with 10, 2 and 1 % of the bytes. This is no
replication of the paper's table: model, data and tasks are ours.

    python scripts/repro/finetune_quality.py run runs/finetune --part pretraining
    python scripts/repro/finetune_quality.py run runs/finetune --part tasks
    python scripts/repro/finetune_quality.py table runs/finetune

Runs are in memory, through the transformation that tests hold to a store's bits. A run
whose line is in PLACE/results.jsonl is not repeated. Differences to dense are paired by
seeds and files; their intervals of 95 % are by bootstrap over both, since the examples
of a file are not independent.
"""

import argparse
import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import finetune_tasks as tasks
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxinf_models import abstract_params
from tokenizers import Tokenizer

from jaxinf.cli import main as jaxinf_main
from jaxinf.train.__main__ import main as train_main
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import epoch_batches, iterate_from
from jaxinf.train.loading import load_data, make_batches
from jaxinf.train.modes import make_initial_params, materialize
from jaxinf.train.optimizers import make_memory_optimizer
from jaxinf.train.step import compile_train_step

FEEDBACK = ",error_feedback=true"
RATIOS = (0.1, 0.02, 0.01)
BATCH_SIZE = 16
PRETRAINING_SEQ_LEN = 64
MODEL: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": tasks.VOCAB_SIZE,
    "n_positions": PRETRAINING_SEQ_LEN,
    "n_head": 4,
    "n_embd": 256,
    "resid_pdrop": 0.0,
}
"""As config.json of Hugging Face: 3.7 M params, most in leaves of 64 Ki or more."""


class Run(NamedTuple):
    """One run of the table, and the key of its line.

    Variants are dense or arguments of `--compress`, starts pretrained or scratch.
    """

    task: str
    variant: str
    seed: int
    steps: int
    layers: int
    start: str = "pretrained"


def part(name: str, num_seeds: int, steps: int, layers: int) -> Iterator[Run]:
    """Yields the runs of a part, seed by seed: one that is stopped has whole pairs."""
    more = "" if name == "without-feedback" else FEEDBACK
    variants = ["dense", *(f"top_k:{ratio}{more}" for ratio in RATIOS)]
    starts = {"tasks": ["pretrained"], "scratch": ["scratch"]}
    for seed in range(num_seeds):
        for task in tasks.TASKS if name == "tasks" else tasks.TASKS[:1]:
            for variant in variants:
                for start in starts.get(name, ["pretrained", "scratch"]):
                    yield Run(task, variant, seed, steps, layers, start)


PARTS = ("pretraining", "tasks", "scratch", "without-feedback")


# --- runs --------------------------------------------------------------------------


def folder_of(place: Path, layers: int) -> Path:
    """Returns the folder of the model, with its config.json."""
    folder = place / f"gpt2-{layers}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | {"n_layer": layers}))
    return folder


def pretrain(place: Path, layers: int, steps: int) -> None:
    """Trains the model on the text of the files for training; exports its weights."""
    folder = folder_of(place, layers)
    if (folder / "weights").exists():
        return
    words = ["--preset", folder / "config.json", "--store", folder / "store"]
    words += ["--data", place / "tasks/pretraining.txt"]
    words += ["--tokenizer", place / "tasks/gpt2", "--seq-len", PRETRAINING_SEQ_LEN]
    words += ["--batch-size", BATCH_SIZE, "--steps", steps, "--learning-rate", 1e-3]
    words += ["--schedule", "linear", "--durability", 50]
    if train_main([str(word) for word in words]):
        raise SystemExit("pretraining has stopped; start it again to go on")
    export = ["checkpoint", "export", folder / "store", folder / "weights"]
    jaxinf_main([*map(str, export), "--format", "huggingface"])


def config_of(place: Path, run: Run) -> TrainConfig:
    """Returns the trainer's config of a run."""
    folder, is_new = folder_of(place, run.layers), run.start == "scratch"
    return TrainConfig(
        mode="memory",
        task="classification",
        source=None if is_new else folder / "weights",
        preset=str(folder / "config.json") if is_new else TrainConfig.preset,
        data=(str(place / f"tasks/{run.task}-train.jsonl"),),
        validation=(str(place / f"tasks/{run.task}-validation.jsonl"),),
        tokenizer=place / "tasks/gpt2",
        seq_len=tasks.SEQ_LEN,
        batch_size=BATCH_SIZE,
        steps=run.steps,
        learning_rate=5e-4,
        optimizer_args=("weight_decay=0",),
        warmup_steps=min(30, run.steps // 10),
        schedule="linear",
        seed=run.seed,
        compress=None if run.variant == "dense" else run.variant,
    )


class Task:
    """The data of a task and what its runs share."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.data = load_data(check(config))
        self._graphdef, _ = abstract_params(self.config.model_config)
        folder = self.config.tokenizer
        assert isinstance(folder, Path), "each run is given the task's tokenizer"
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

        @jax.jit
        def is_right(params: Any, batch: Any) -> Any:
            inputs = {name: x for name, x in batch.items() if name != "labels"}
            logits = nnx.merge(self._graphdef, params)(**inputs)
            return jnp.argmax(logits, axis=-1) == batch["labels"]

        self._is_right = is_right

    def right(self, params: Any) -> dict[bytes, bool]:
        """Returns whether each example that is held out is right, by its text."""
        found = {}
        batches = epoch_batches(self.data.validation, batch_size=64, seed=0)
        for batch in (batches[number] for number in range(len(batches))):
            right = self._is_right(params, batch)
            for tokens, one in zip(batch["tokens"], right, strict=True):
                ids = tokens[tokens >= len(tasks.SPECIAL_TOKENS)].tolist()
                found[self._tokenizer.decode(ids).encode()] = bool(one)
        return found

    def train(self, config: TrainConfig) -> Any:
        """Trains a run of the task as `--mode memory` does; returns the params."""
        config = replace(check(config), num_labels=self.config.num_labels)
        config = replace(config, seq_len=self.config.seq_len)
        params = materialize(make_initial_params(config))
        tx = make_memory_optimizer(config)
        state, batches = jax.jit(tx.init)(params), make_batches(config, self.data)
        made = (params, state, batches[0])
        step = compile_train_step(config, self._graphdef, tx, *made)
        with contextlib.closing(iterate_from(batches, 0)) as coming:
            for _ in range(config.steps):
                params, state, _ = step(params, state, next(coming))
        return params


def measure(arguments: argparse.Namespace) -> None:
    """Does the runs of a part that the results lack."""
    place: Path = arguments.place
    place.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(place / "programs"))
    results = place / "results.jsonl"
    done = [Run(**line["run"]) for line in read(results)]
    tasks.make(place / "tasks", arguments.most)
    if arguments.part == "pretraining":
        pretrain(place, arguments.layers, arguments.pretraining_steps)
        return
    made: dict[tuple[str, str], Task] = {}
    for run in part(arguments.part, arguments.seeds, arguments.steps, arguments.layers):
        if run in done:
            continue
        key = run.task, run.start
        if key not in made:
            made[key] = Task(config_of(place, run._replace(variant="dense")))
        began_s = time.monotonic()
        found = made[key].right(made[key].train(config_of(place, run)))
        right: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for record in tasks.read_task(place / "tasks", run.task, "validation"):
            right[record["file"]][0] += found[tasks.key_of(record)]
            right[record["file"]][1] += 1
        seconds = round(time.monotonic() - began_s, 1)
        line = {"run": run._asdict(), "right": right, "seconds": seconds}
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        share = 100 * sum(found.values()) / len(found)
        print(f"{run}: {share:.2f} % right, {seconds} s", flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a results file."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


# --- the table ---------------------------------------------------------------------

Counts = dict[tuple[int, str], Any]
"""Right and all examples, by seed and file."""


def difference(found: Counts, base: Counts) -> Counts:
    """Returns how many more are right, by the seeds and files that both have."""
    both = found.keys() & base.keys()
    return {key: found[key] - np.array([base[key][0], 0]) for key in both}


def together(several: Sequence[Counts]) -> Counts:
    """Returns the sums of several tasks, by the seeds that all have."""
    seeds = set.intersection(*({seed for seed, _ in one} for one in several))
    sums: Counts = defaultdict(lambda: np.zeros(2, int))
    for (seed, file), cell in [item for one in several for item in one.items()]:
        if seed in seeds:
            sums[seed, file] = sums[seed, file] + cell
    return sums


def interval(counts: Counts, num_draws: int = 2000) -> tuple[float, float, float]:
    """Returns a mean in percent, and its 95 % interval, by bootstrap."""
    seeds, files = (sorted(set(one)) for one in zip(*counts, strict=True))
    cells = np.array([[counts[s, f] for f in files] for s in seeds], float)
    right, sizes = cells[..., 0], cells[0, :, 1]
    rng = np.random.default_rng(0)
    own, some = (  # how often each is drawn
        rng.multinomial(count, [1 / count] * count, num_draws) for count in right.shape
    )
    drawn = np.sum((own @ right) * some, axis=1) / (len(seeds) * (some @ sizes))
    mean = right.sum() / (len(seeds) * sizes.sum())
    low, high = np.percentile(drawn, [2.5, 97.5])
    return 100 * float(mean), 100 * float(low), 100 * float(high)


def say(arguments: argparse.Namespace) -> None:
    """Prints what is right, the differences to dense, and those of all tasks."""
    lines = read(arguments.place / "results.jsonl")
    found: dict[tuple[Any, ...], dict[str, Counts]] = {}
    for line in lines:
        run = Run(**line["run"])
        own = found.setdefault((run.task, run.layers, run.start, run.steps), {})
        cells = {(run.seed, f): np.array(v) for f, v in line["right"].items()}
        own[run.variant] = own.get(run.variant, {}) | cells
    print("| task | layers, start, steps | variant | seeds | right, % | less dense |")
    print("|---|---|---|---|---|---|")
    less: dict[str, list[Counts]] = {}
    for (task, *setting), own in found.items():
        for variant, counts in own.items():
            mean, low, high = interval(counts)
            cells = [f"{mean:.2f} [{low:.2f}, {high:.2f}]", ""]
            points = difference(counts, own.get("dense", {}))
            where = ", ".join(map(str, setting))
            if variant != "dense" and points:
                cells[1] = _less(points)
                less.setdefault(f"{where}, {variant}", []).append(points)
            num_seeds = len({seed for seed, _ in counts})
            named = (task, where, variant, num_seeds, *cells)
            print(f"| {' | '.join(map(str, named))} |")
    for named, several in less.items():
        if len(several) > 1 and (counts := together(several)):
            print(f"{len(several)} tasks, {named}: less dense {_less(counts)}")
    seconds = sum(line["seconds"] for line in lines)
    print(f"{len(lines)} runs, {seconds / 60:.0f} minutes")


def _less(points: Counts) -> str:
    mean, low, high = interval(points)
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def main(words: Sequence[str] | None = None) -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("place", type=Path)
    runs.add_argument("--part", choices=PARTS, required=True)
    runs.add_argument("--seeds", type=int, default=3)
    runs.add_argument("--steps", type=int, default=300)
    runs.add_argument("--layers", type=int, default=4, help="4 are 3.7 M params")
    runs.add_argument("--pretraining-steps", type=int, default=2500)
    runs.add_argument("--most", type=int, help="examples of each side of a task")
    runs.set_defaults(call=measure)
    table = commands.add_parser("table")
    table.add_argument("place", type=Path)
    table.set_defaults(call=say)
    arguments = parser.parse_args(words)
    arguments.call(arguments)


if __name__ == "__main__":
    main()
