"""The messages of a run: its config, progress and results.

Invariant: messages name what the user can act on: paths, sizes, commands. Without a
terminal only plain lines are written, without control characters; printed text is never
taken for markup.
"""

import shlex
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
from jaxinf_models import num_params
from rich.console import Console

from jaxinf.engine import Store
from jaxinf.errors import printable
from jaxinf.terminal import format_bytes
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.rows import TrainingData
from jaxinf.train.evaluate import Evaluation
from jaxinf.train.freezing import mask_frozen
from jaxinf.train.metrics import StepLine
from jaxinf.train.optimizers import resolve_settings
from jaxinf.train.timing import peak_rss_bytes

EXPORT_FAILED = 3
"""The exit status of a complete run."""

_INTERVAL_S = 5.0  # between lines of progress


def print_config(console: Console, config: TrainConfig, data: TrainingData) -> None:
    about, num_rows = data.description, len(data.train)
    batch = f"{config.batch_size} images"
    if data.tokenizer is not None:
        unit = "bytes" if data.tokenizer.name == "bytes" else "tokens"
        batch = f"{config.batch_size} x {config.seq_len} {unit}"
        if config.source and unit == "tokens":
            about += f", tokens by {data.tokenizer.name}"
    epochs = config.steps * config.batch_size / num_rows
    steps = f"{config.steps} of {batch}, seed {config.seed}: {epochs:.3g} epochs of "
    settings: dict[str, Any] = resolve_settings(config)
    rate = f"{config.optimizer}, learning rate {settings['learning_rate']:g}, "
    rate += f"{config.schedule} after {settings['warmup_steps']} steps of warm-up"
    if (decay := settings["weight_decay"]) is not None:
        rate += f", weight decay {decay:g}"
    model = f"{config.model_name}: {num_params(config.model_config):,} params in "
    model += f"{config.param_dtype}, computed in {config.dtype}"
    checkpoint = config.files and config.files.checkpoint
    tensors = checkpoint.tensors.values() if checkpoint else ()
    dtypes = {tensor.dtype.name for tensor in tensors}
    if config.param_dtype == "float32" and "bfloat16" in dtypes:
        model += "; the folder has bfloat16: --param-dtype bfloat16 keeps it"
    source = " ".join(config.data) or "Python's standard library"
    rows = [
        ("model", model),
        ("task", config.task_name),
        ("data", f"{source}: {about}"),
        *(("", note) for note in data.notes),
        ("steps", f"{steps}{num_rows:,} rows"),
        ("rate", rate),
    ]
    if config.frozen:
        params = config.abstract[1]
        num_trained, num_all = (
            sum(leaf.size for leaf in jax.tree.leaves(tree))
            for tree in (mask_frozen(config.frozen, params), params)
        )
        share = f"({100 * num_trained / num_all:.3g} %); others stay"
        rows.append(("train", f"{num_trained:,} of {num_all:,} params {share}"))
    place = "memory" if config.store is None else f"store {config.store.absolute()}"
    rows.append(("state", f"in {place}; logs in {config.logs}"))
    console.print("\n".join(f"{name:7} {printable(text)}" for name, text in rows))


def print_results(
    console: Console, config: TrainConfig, store: Store | None, idle_bytes: int
) -> None:
    """Prints paths, and the memory taken beside `idle_bytes`, as --memory means it."""
    peak = format_bytes(max(0, peak_rss_bytes() - idle_bytes))
    if config.mode == "stream" and config.memory is not None:
        peak += f" of --memory {format_bytes(config.memory)}"
    idle = f"{format_bytes(idle_bytes)} of the process itself"
    lines = [f"memory  at most {peak}, beside {idle}"]
    logs, every, is_alone = config.logs, "", jax.process_count() == 1
    if store is not None:
        path = store.path if is_alone else store.path.parent
        lines.append(f"store   {path}: step {store.step}; to look inside:")
        lines.append(f"  {_command('jaxinf', 'inspect', path)}")
        if config.source is not None:
            words = ("export", path, "EXPORT", "--format", "huggingface")
            lines.append("to export the model to a new folder EXPORT:")
            lines.append(f"  {_command('jaxinf', 'checkpoint', *words)}")
    if not is_alone:
        logs, every = logs.parent, "/process-*"
    lines.append(f"logs    {logs}{every}; to make a page of them:")
    lines.append(f"  {_command('jaxinf', 'report', logs)}{every}")
    console.print("\n".join(lines), markup=False, highlight=False)


def _command(*words: str | Path) -> str:
    """Returns a shell command that does not depend on the PATH."""
    return shlex.join([sys.executable, "-m", *map(str, words)])


def print_stopped(console: Console, config: TrainConfig, step: int) -> None:
    text = "; --mode memory keeps nothing to resume"
    if config.store is not None:
        run = _command("jaxinf.train", "--config", config.logs / "config.toml")
        place = config.store.absolute()
        text = f", which is committed to {place}; to go on from there:\n  {run}"
        if config.distributed:  # names this process
            text += "\nand each other process by the config.toml of its own logs"
    console.print(f"stopped after step {step} of {config.steps}{text}")


def format_evaluation(config: TrainConfig, evaluation: Evaluation) -> str:
    text = f"validation loss {evaluation.loss:.3f}, "
    if config.task_name != "classification":
        text += f"perplexity {evaluation.perplexity:,.2f}, "
    return f"{text}{100 * evaluation.accuracy:.1f} % right"


class Progress:
    """Prints the progress of a run every few seconds."""

    def __init__(self, console: Console, config: TrainConfig, num_before: int) -> None:
        self._console, self._last = console, config.steps
        self._num_before = num_before
        self._unit = "images" if config.takes_images else "tokens"
        self._started_s = self._shown_s = time.monotonic()

    def add(self, line: StepLine) -> None:
        now_s, num_done = time.monotonic(), line.step - self._num_before
        is_end = num_done == 1 or line.step == self._last
        if not is_end and now_s - self._shown_s < _INTERVAL_S:
            return
        self._shown_s = now_s
        left = ""
        if num_done == 1:  # it takes longer than the others
            self._started_s = now_s
        else:
            step_s = (now_s - self._started_s) / (num_done - 1)
            left_s = round(step_s * (self._last - line.step))
            left = f"  {timedelta(seconds=left_s)} left".replace("  0:", "  ")
        rate = jax.process_count() * (line.tokens or 0) / (line.step_s or 1)
        speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        self._console.print(
            f"step {line.step}/{self._last}{left}  loss {line.loss:.3f}  "
            f"{speed} {self._unit}/s  memory {format_bytes(line.rss_bytes or 0)}"
        )
