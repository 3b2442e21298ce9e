"""Measures what compressed gradients cost in fine-tuning, beside training from scratch.

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
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import finetune_tasks as tasks
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxinf_models import abstract_params, deferred_params, make_model, split

from jaxinf.cli import main as jaxinf_main
from jaxinf.compress import sparsify
from jaxinf.train.__main__ import main as train_main
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.loading import load, make_batches
from jaxinf.train.modes import held_params
from jaxinf.train.optimizers import make_clipping, make_optimizer
from jaxinf.train.step import compile_train_step

VERSION = 5  # of a line of the results; another one is of other runs
LAYERS = 4
RATE = 5e-4
FEEDBACK = ",error_feedback=true"
STARTS = ("pretrained", "scratch")
RATIOS = (0.1, 0.02, 0.01)
BATCH_SIZE = 16
EVALUATED_AT_ONCE = 64
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


@dataclass(frozen=True)
class Run:
    """One run of the table, and the key of its line.

    Attributes:
      task: of `finetune_tasks.TASKS`.
      variant: dense, or an argument of `--compress`.
      seed: of a new head, or of all params, and of the batches.
      steps: its steps.
      layers: of the model; 4 have 3.7 M params.
      start: pretrained or scratch.
    """

    task: str
    variant: str
    seed: int
    steps: int
    layers: int = LAYERS
    start: str = "pretrained"


def variants(more: str = FEEDBACK) -> tuple[str, ...]:
    """Returns dense, and top-k of so many bytes."""
    return ("dense", *(f"top_k:{ratio}{more}" for ratio in RATIOS))


def part(name: str, num_seeds: int, steps: int, layers: int) -> Iterator[Run]:
    """Yields the runs of a part, seed by seed: one that is stopped has whole pairs."""
    first = tasks.TASKS[0]
    chosen: dict[str, list[dict[str, Any]]] = {
        "tasks": [{"task": t, "variant": v} for t in tasks.TASKS for v in variants()],
        "scratch": [{"variant": v, "start": "scratch"} for v in variants()],
        "without-feedback": [
            {"variant": v, "start": s} for v in variants("") for s in STARTS
        ],
    }
    for seed in range(num_seeds):
        usual = Run(first, "dense", seed, steps, layers)
        yield from (replace(usual, **changes) for changes in chosen[name])


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
        learning_rate=RATE,
        optimizer_args=("weight_decay=0",),
        warmup_steps=min(30, run.steps // 10),
        schedule="linear",
        seed=run.seed,
        compress=None if run.variant == "dense" else run.variant,
    )


class Task:
    """The data of a task and the programs of its runs, which share compilations.

    Args:
      config: a dense run of it.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.data = load(check(config))
        self._graphdef, _ = abstract_params(self.config.model_config)
        held = self.data.validation
        self.rows = [held[number] for number in range(len(held))]
        self._steps: dict[Any, Any] = {}

        @jax.jit
        def is_right(params: Any, batch: Any) -> Any:
            inputs = {name: x for name, x in batch.items() if name != "labels"}
            logits = nnx.merge(self._graphdef, params)(**inputs)
            return jnp.argmax(logits, axis=-1) == batch["labels"]

        self._is_right = is_right

    def right(self, params: Any) -> np.ndarray:
        """Returns whether each row that is held out is right: bool [rows]."""
        found = []
        for start in range(0, len(self.rows), EVALUATED_AT_ONCE):
            rows = self.rows[start : start + EVALUATED_AT_ONCE]
            filled = [*rows, *rows[:1] * (EVALUATED_AT_ONCE - len(rows))]
            batch = {k: np.stack([row[k] for row in filled]) for k in rows[0]}
            found.append(np.asarray(self._is_right(params, batch))[: len(rows)])
        return np.concatenate(found)

    def in_order(self, held: Sequence[Any], right: np.ndarray) -> np.ndarray:
        """Returns what is said of rows in the order of their records."""
        tokenizer, found = self.data.tokenizer, {}
        assert tokenizer is not None
        for row, one in zip(self.rows, right, strict=True):
            tokens = np.asarray(row["tokens"])
            text = tokenizer.decode(tokens[tokens >= len(tasks.SPECIAL_TOKENS)])
            found[text] = one
        return np.array([found[tasks.key_of(record)] for record in held])

    def train(self, config: TrainConfig) -> Any:
        """Trains a run of the task as `--mode memory` does; returns the params."""
        config = replace(check(config), num_labels=self.config.num_labels)
        config = replace(config, seq_len=self.config.seq_len)
        params = _first_params(config)
        tx = make_optimizer(config)
        if config.compression is not None:
            tx = optax.chain(make_clipping(config), sparsify(config.compression), tx)
        state, batches = jax.jit(tx.init)(params), make_batches(config, self.data)
        key = config.compress, config.learning_rate, config.steps
        if key not in self._steps:
            made = (params, state, batches[0])
            self._steps[key] = compile_train_step(
                config, self._graphdef, tx, "halves", *made
            )
        step = self._steps[key]
        coming = batches.starting_at(batches.position_of(0))
        for _ in range(config.steps):
            params, state, _ = step(params, state, next(coming))
        coming.close()
        return params


def by_file(held: Sequence[Any], right: np.ndarray) -> dict[str, list[int]]:
    """Returns numbers of right and of all examples, by file.

    Args:
      held: the records that are held out.
      right: bool, whether each of them is right.
    """
    found: dict[str, list[int]] = {}
    for record, one in zip(held, right, strict=True):
        counts = found.setdefault(record["file"], [0, 0])
        counts[0], counts[1] = counts[0] + int(one), counts[1] + 1
    return found


def _first_params(config: TrainConfig) -> Any:
    if config.source is not None:
        assert config.files is not None
        return held_params(
            deferred_params(config.files, config.model_config, config.seed)
        )
    return split(make_model(config.model_config, rngs=nnx.Rngs(config.seed)))[1]


def measure(arguments: argparse.Namespace) -> None:
    """Does the runs of a part that the results lack, until the time is over."""
    place: Path = arguments.place
    place.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(place / "programs"))
    results = place / "results.jsonl"
    done = [line["run"] for line in read(results)]
    tasks.make(place / "tasks", arguments.most)
    end_s = time.monotonic() + 60 * arguments.minutes
    if arguments.part == "pretraining":
        pretrain(place, arguments.layers, arguments.pretraining_steps)
        return
    made: dict[tuple[str, str], Task] = {}
    for run in part(arguments.part, arguments.seeds, arguments.steps, arguments.layers):
        if asdict(run) in done:
            continue
        if time.monotonic() > end_s:
            return
        key = run.task, run.start
        dense = config_of(place, replace(run, variant="dense"))
        task = made[key] = made.get(key) or Task(dense)
        began_s = time.monotonic()
        found = task.right(task.train(config_of(place, run)))
        held = tasks.read_task(place / "tasks", run.task, "validation")
        right = by_file(held, task.in_order(held, found))
        seconds = round(time.monotonic() - began_s, 1)
        line = {"version": VERSION, "run": asdict(run), "right": right}
        with results.open("a") as file:
            file.write(json.dumps(line | {"seconds": seconds}) + "\n")
        share = sum(r for r, _ in right.values()) / sum(n for _, n in right.values())
        print(f"{run}: {100 * share:.2f} % right, {seconds} s", flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a results file.

    Raises:
      SystemExit: a line is cut, or of another version of this script.
    """
    found = []
    text = path.read_text() if path.exists() else ""
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found.append(json.loads(line))
            is_known = found[-1]["version"] == VERSION
        except (ValueError, KeyError, TypeError):
            is_known = False
        if not is_known:
            raise SystemExit(
                f"{path}:{number}: expected a line of version {VERSION} of this "
                "script, found another or one that is cut; delete it, and its run is "
                "done again"
            )
    return found


# --- the table ---------------------------------------------------------------------

Counts = dict[int, dict[str, list[int]]]
"""Right and all examples by file, by seed."""


def difference(found: Counts, base: Counts) -> Counts:
    """Returns how many more are right, by the seeds and files that both have."""
    return {
        seed: {
            file: [right - base[seed][file][0], size]
            for file, (right, size) in found[seed].items()
        }
        for seed in found.keys() & base.keys()
    }


def together(several: Sequence[Counts]) -> Counts:
    """Returns the sums of several tasks, by the seeds that all have."""
    seeds = set.intersection(*(set(counts) for counts in several))
    files = {file for counts in several for own in counts.values() for file in own}
    return {
        seed: {
            file: [sum(pair) for pair in zip(*found, strict=True)]
            for file in files
            if (found := [c[seed][file] for c in several if file in c[seed]])
        }
        for seed in seeds
    }


def interval(counts: Counts, num_draws: int = 2000) -> tuple[float, float, float]:
    """Returns a mean in percent, and its 95 % interval.

    Args:
      counts: those of a variant, or a difference.
      num_draws: of the bootstrap over seeds and files.
    """
    seeds, files = sorted(counts), sorted(next(iter(counts.values())))
    right = np.array([[counts[s][f][0] for f in files] for s in seeds], float)
    sizes = np.array([counts[seeds[0]][f][1] for f in files], float)
    rng = np.random.default_rng(0)
    own, some = (  # how often each is drawn
        rng.multinomial(count, [1 / count] * count, num_draws) for count in right.shape
    )
    drawn = np.sum((own @ right) * some, axis=1) / (len(seeds) * (some @ sizes))
    mean = right.sum() / (len(seeds) * sizes.sum())
    low, high = np.percentile(drawn, [2.5, 97.5])
    return 100 * float(mean), 100 * float(low), 100 * float(high)


def shown(variant: str) -> str:
    """Returns a variant's name for people."""
    if variant == "dense":
        return variant
    ratio = float(variant.removeprefix("top_k:").removesuffix(FEEDBACK))
    without = "" if variant.endswith(FEEDBACK) else ", no feedback"
    return f"{100 * ratio:g} %{without}"


def say(arguments: argparse.Namespace) -> None:
    """Prints what is right, the differences to dense, and those of all tasks."""
    lines = read(arguments.place / "results.jsonl")
    found: dict[tuple[Any, ...], dict[str, Counts]] = {}
    for line in lines:
        run = Run(**line["run"])
        own = found.setdefault((run.task, run.layers, run.start, run.steps), {})
        own.setdefault(run.variant, {})[run.seed] = line["right"]
    print("| task | layers, start, steps | variant | seeds | right, % | less dense |")
    print("|---|---|---|---|---|---|")
    less: dict[tuple[Any, ...], list[Counts]] = {}
    for (task, *setting), own in found.items():
        for variant, counts in own.items():
            mean, low, high = interval(counts)
            cells = [f"{mean:.2f} [{low:.2f}, {high:.2f}]", ""]
            points = difference(counts, own.get("dense", {}))
            if variant != "dense" and points:
                cells[1] = _less(points)
                less.setdefault((*setting, variant), []).append(points)
            named = (task, ", ".join(map(str, setting)), shown(variant), len(counts))
            print(f"| {' | '.join(map(str, (*named, *cells)))} |")
    print()
    for (*setting, variant), several in less.items():
        if len(several) > 1 and (counts := together(several)):
            named = ", ".join(map(str, (*setting, shown(variant))))
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
    runs.add_argument("--minutes", type=float, default=80, help="to begin runs in")
    runs.add_argument("--seeds", type=int, default=3)
    runs.add_argument("--steps", type=int, default=300)
    runs.add_argument("--layers", type=int, default=LAYERS, help="4 are 3.7 M params")
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
