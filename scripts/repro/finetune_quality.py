"""Measures what compressed gradients cost in fine-tuning, beside training from scratch.

A GPT-2 of 3.7 M params is pretrained on the library's own text and then fine-tuned on
the tasks of finetune_tasks.py, dense and with 10, 2 and 1 % of the bytes; a BERT of its
size on one of them. GPT-2 is the usual one, because every token of its pretraining has
a target, not three in ten. This is no replication of the paper's table: models, data
and tasks are ours.

    python scripts/repro/finetune_quality.py run runs/finetune --part pretraining-gpt2
    python scripts/repro/finetune_quality.py run runs/finetune --part contrast
    python scripts/repro/finetune_quality.py table runs/finetune

Runs are in memory, through the transformation that tests hold to a store's bits. A run
whose line is in PLACE/results.jsonl is not repeated. Tables: finetune_results.py.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import finetune_tasks as tasks
import jax
import jax.numpy as jnp
import numpy as np
import optax
from finetune_results import (
    FEEDBACK,
    LAYERS,
    RATE,
    RATIOS,
    STARTS,
    VERSION,
    Run,
    read,
    say,
)
from flax import nnx
from jaxinf_models import abstract_params, deferred_params, make_model, split

from jaxinf.cli import main as jaxinf_main
from jaxinf.compress import sparsify
from jaxinf.train.__main__ import main as train_main
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.in_memory import held_params
from jaxinf.train.loading import load, make_batches
from jaxinf.train.optimizers import make_clipping, make_optimizer
from jaxinf.train.step import compile_train_step

BATCH_SIZE = 16
EVALUATED_AT_ONCE = 64
PRETRAINING_SEQ_LEN = 64
MODELS: dict[str, dict[str, Any]] = {
    "bert": {
        "model_type": "bert",
        "vocab_size": tasks.VOCAB_SIZE,
        "type_vocab_size": 2,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "max_position_embeddings": PRETRAINING_SEQ_LEN,
        "hidden_dropout_prob": 0.0,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": tasks.VOCAB_SIZE,
        "n_positions": PRETRAINING_SEQ_LEN,
        "n_layer": LAYERS,
        "n_head": 4,
        "n_embd": 256,
        "resid_pdrop": 0.0,
    },
}
"""As config.json of Hugging Face: 3.7 M params, most in leaves of 64 Ki or more."""

TOKENIZERS = {"bert": "bert", "gpt2": "gpt2"}
PRETRAINING: dict[str, tuple[Any, ...]] = {
    "bert": ("--learning-rate", 5e-4, "--warmup-steps", 500, "--mask-rate", 0.3),
    "gpt2": ("--learning-rate", 1e-3),
}
"""At 1e-3, with 15 % masked, BERT's loss stays near that of frequencies for long."""


def variants(*ratios: float, more: str = FEEDBACK) -> tuple[str, ...]:
    """Returns dense, and top-k of so many bytes."""
    return ("dense", *(f"top_k:{ratio}{more}" for ratio in ratios))


def part(name: str, num_seeds: int, steps: int, layers: int) -> Iterator[Run]:
    """Yields the runs of a part, seed by seed: one that is stopped has whole pairs."""
    two, everything = variants(0.02), variants(*RATIOS)
    without = variants(*RATIOS, more="")
    chosen: dict[str, list[dict[str, Any]]] = {
        **{t: [{"task": t, "variant": v} for v in everything] for t in tasks.TASKS},
        "without-feedback": [{"variant": v} for v in without],
        "contrast": [{"variant": v, "start": s} for v in two for s in STARTS],
        "ratios": [{"variant": v, "start": s} for v in everything for s in STARTS],
        "scratch-without-feedback": [
            {"variant": v, "start": "scratch"} for v in without
        ],
        "starts": [{"task": t, "start": s} for t in tasks.TASKS for s in STARTS],
        "bert": [
            {"variant": v, "model": "bert", "start": s} for v in two for s in STARTS
        ],
        "rates": [{"variant": v, "factor": f} for v in two for f in (1 / 3, 3.0)],
    }
    for seed in range(num_seeds):
        usual = Run(tasks.TASKS[0], "dense", seed, steps, layers)
        yield from (replace(usual, **changes) for changes in chosen[name])


PARTS = (
    *(f"pretraining-{m}" for m in MODELS),
    *tasks.TASKS,
    *("contrast", "ratios", "without-feedback", "scratch-without-feedback"),
    *("starts", "bert", "rates", "bytes", "baselines"),
)


# --- runs --------------------------------------------------------------------------


def folder_of(place: Path, model: str, layers: int) -> Path:
    """Returns the folder of a model, with its config.json."""
    folder = place / f"{model}-{layers}"
    folder.mkdir(parents=True, exist_ok=True)
    document = MODELS[model]
    name = "n_layer" if "n_layer" in document else "num_hidden_layers"
    (folder / "config.json").write_text(json.dumps(document | {name: layers}))
    return folder


def pretrain(place: Path, model: str, layers: int, steps: int) -> None:
    """Trains a model on the text of the files for training; exports its weights."""
    folder = folder_of(place, model, layers)
    if (folder / "weights").exists():
        return
    words = ["--model-config", folder / "config.json", "--store", folder / "store"]
    words += ["--data", place / "tasks/pretraining.txt"]
    words += ["--tokenizer", place / "tasks" / TOKENIZERS[model]]
    words += ["--seq-len", PRETRAINING_SEQ_LEN]
    words += ["--batch-size", BATCH_SIZE, "--steps", steps, *PRETRAINING[model]]
    words += ["--schedule", "linear", "--durability", 50, "--sample-bytes", 0]
    if train_main([str(word) for word in words]):
        raise SystemExit("pretraining has stopped; start it again to go on")
    export = ["checkpoint", "export", folder / "store", folder / "weights"]
    jaxinf_main([*map(str, export), "--format", "huggingface"])


def config_of(place: Path, run: Run) -> TrainConfig:
    """Returns the trainer's config of a run."""
    folder, is_new = folder_of(place, run.model, run.layers), run.start == "scratch"
    return TrainConfig(
        mode="memory",
        task="classification",
        source=None if is_new else folder / "weights",
        model_file=folder / "config.json" if is_new else None,
        data=(str(place / f"tasks/{run.task}-train.jsonl"),),
        validation=(str(place / f"tasks/{run.task}-validation.jsonl"),),
        tokenizer=place / "tasks" / TOKENIZERS[run.model],
        seq_len=tasks.SEQ_LEN,
        batch_size=BATCH_SIZE,
        steps=run.steps,
        learning_rate=RATE * run.factor,
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


def sent_bytes(place: Path, config: Path, variant: str) -> int:
    """Returns the bytes over the link of a step near storage, by its meter."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--model-config", config, "--steps", 1]
        words += ["--data", place / "tasks/pretraining.txt", "--sample-bytes", 0]
        words += ["--tokenizer", place / "tasks" / TOKENIZERS["gpt2"]]
        words += ["--store", Path(folder, "store"), "--log-dir", Path(folder, "log")]
        words += ["--csd", "emulated"]  # the link to a card has gradients alone
        if variant != "dense":
            words += ["--compress", variant]
        train_main([str(word) for word in words])
        line = Path(folder, "log/metrics.jsonl").read_text().splitlines()[0]
    return json.loads(line)["link_down_bytes"]


def measure(arguments: argparse.Namespace) -> None:
    """Does the runs of a part that the results lack, until the time is over."""
    place: Path = arguments.place
    place.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(place / "programs"))
    results = place / "results.jsonl"
    lines = read(results)  # refuses a file that it cannot go on with
    tasks.make(place / "tasks", arguments.most)
    end_s = time.monotonic() + 60 * arguments.minutes
    if arguments.part.startswith("pretraining-"):
        model = arguments.part.removeprefix("pretraining-")
        pretrain(place, model, arguments.layers, arguments.pretraining_steps)
        return
    if arguments.part == "bytes":
        config = folder_of(place, "gpt2", arguments.layers) / "config.json"
        done = [line.get("bytes") for line in lines]
        for variant in (*variants(*RATIOS), *variants(*RATIOS, more="")[1:]):
            if variant not in done:
                sent = sent_bytes(place, config, variant)
                _add(results, {"bytes": variant, "sent": sent})
        return
    if arguments.part == "baselines":
        add_baselines(place, lines)
        return
    done = [line.get("run") for line in lines]
    made: dict[tuple[str, str, str], Task] = {}
    for run in part(arguments.part, arguments.seeds, arguments.steps, arguments.layers):
        if asdict(run) in done:
            continue
        if time.monotonic() > end_s:
            return
        key = run.task, run.model, run.start
        dense = config_of(place, replace(run, variant="dense"))
        task = made[key] = made.get(key) or Task(dense)
        began_s = time.monotonic()
        found = task.right(task.train(config_of(place, run)))
        held = tasks.read_task(place / "tasks", run.task, "validation")
        right = by_file(held, task.in_order(held, found))
        seconds = round(time.monotonic() - began_s, 1)
        _add(results, {"run": asdict(run), "right": right, "seconds": seconds})
        share = sum(r for r, _ in right.values()) / sum(n for _, n in right.values())
        print(f"{run}: {100 * share:.2f} % right, {seconds} s", flush=True)


def add_baselines(place: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Adds the lines of tasks whose baselines the results lack."""
    done = {line.get("baselines") for line in lines}
    for task in tasks.TASKS:
        if task not in done:
            held = tasks.read_task(place / "tasks", task, "validation")
            found = tasks.baselines(place / "tasks", task)
            right = {name: by_file(held, one) for name, one in found.items()}
            _add(place / "results.jsonl", {"baselines": task, "right": right})


def _add(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"version": VERSION, **line}) + "\n")


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
