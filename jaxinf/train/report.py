"""The messages at the start and the end of a run.

Invariant: they name things the user can act on: paths, sizes, commands.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import jax
from jaxinf_models import num_params
from rich.console import Console

from jaxinf.engine import Store
from jaxinf.terminal import format_bytes, printable
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.rows import TrainingData
from jaxinf.train.evaluate import Evaluation, Evaluator
from jaxinf.train.freezing import trained
from jaxinf.train.help import installed, near
from jaxinf.train.memory import peak_rss_bytes
from jaxinf.train.metrics import read_lines
from jaxinf.train.schedules import (
    num_warmup_steps,
    peak_learning_rate,
    weight_decay,
)
from jaxinf.typing import PyTree

_NUM_FIRST = 2  # steps that read and compile anew


def say_config(console: Console, config: TrainConfig, data: TrainingData) -> None:
    """Describes the run in a few lines."""
    model = config.model_config
    source = "Python's standard library" if not config.data else " ".join(config.data)
    notes = "".join(f"        {note}\n" for note in data.notes)
    batch = f"{config.batch_size} images"
    if data.tokenizer is not None:
        unit = "bytes" if data.tokenizer.name == "bytes" else "tokens"
        batch = f"{config.batch_size} x {config.seq_len} {unit}"
        if config.source is not None:
            notes += f"        tokens by {data.tokenizer.name}\n"
        notes += f"example {data.example}\n"
    place = "memory" if config.store is None else f"store {config.store.absolute()}"
    console.print(
        f"model   {config.model_name}: {num_params(model):,} params in "
        f"{config.param_dtype}, computed in {config.dtype}\n"
        f"task    {config.task_name}\n"
        f"data    {source}: {data.description}\n"
        f"{notes}"
        f"steps   {config.steps} of {batch}, seed {config.seed}: "
        f"{config.steps * config.batch_size / len(data.train):.3g} epochs of "
        f"{len(data.train):,} rows\n"
        f"rate    {_rate_line(config)}\n"
        f"{_compression_line(config)}"
        f"{_trained_line(config)}"
        f"state   in {place}; logs in {config.logs}"
    )


def _rate_line(config: TrainConfig) -> str:
    """Describes the optimizer; says that fine-tuning has other defaults."""
    decay, num_warmup = weight_decay(config), num_warmup_steps(config)
    line = f"{config.optimizer}, learning rate {peak_learning_rate(config):g}, "
    line += f"{config.schedule} after {num_warmup} steps of warm-up"
    if decay is not None:
        line += f", weight decay {decay:g}"
    if config.source is not None and config.learning_rate is None:
        line += " (defaults for fine-tuning)"
    if num_warmup > config.steps / 10:
        line += "; the warm-up is more than a tenth of the run"
    return line


def _trained_line(config: TrainConfig) -> str:
    if not config.frozen:
        return ""
    params = config.abstract[1]
    own, num = (
        sum(leaf.size for leaf in jax.tree.leaves(tree))
        for tree in (trained(config.frozen, params), params)
    )
    return f"train   {own:,} of {num:,} params ({100 * own / num:.3g} %); others stay\n"


def _compression_line(config: TrainConfig) -> str:
    compression = config.compression
    if compression is None:
        return ""
    return (
        f"send    {compression.describe()}: {100 * compression.ratio:g} % of the "
        "gradients' bytes\n"
    )


def say_evaluation(
    console: Console,
    config: TrainConfig,
    found: Evaluation,
    evaluator: Evaluator,
    params: PyTree,
) -> None:
    """Prints the final loss and a sample."""
    console.print(describe(config, found))
    prompt, text = map(_shown, evaluator.sample(params))
    if prompt:
        text = text or "(the end, at once)"
        console.print(f"\nsample, after {prompt!r}:\n{text}\n")


def say_results(console: Console, config: TrainConfig, store: Store | None) -> None:
    """Prints what was found, and the paths of the results."""
    lines = [*read_lines(config.logs / "metrics.jsonl")]
    console.print("\n".join(_costs(lines)), markup=False, highlight=False)
    jaxinf, logs = installed("jaxinf"), near(config.logs)
    if store is not None:
        console.print(
            f"store   {store.path}: step {store.step}; to look inside:\n"
            f"  {jaxinf} inspect {near(store.path)}"
        )
    console.print(
        f"logs    {config.logs / 'metrics.jsonl'}; to make a page of them:\n"
        f"  {jaxinf} report {logs}"
    )


def _costs(lines: Sequence[Any]) -> list[str]:
    """Says what steps took: those of which there is a complete line, but the first."""
    said, taken = [], [line for line in lines if line["step_s"]]
    taken = taken[_NUM_FIRST:] or taken
    if taken:
        step_s = statistics.median(line["step_s"] for line in taken)
        said.append(f"time    {step_s:.3g} s a step (median)")
        read, written = (
            statistics.fmean(line[f"drive_{way}_bytes"] or 0 for line in taken)
            for way in ("read", "write")
        )
        if read or written:
            said.append(
                f"drives  {format_bytes(round(read))} read and "
                f"{format_bytes(round(written))} written a step (mean)"
            )
    return [*said, f"memory  at most {format_bytes(peak_rss_bytes())} resident"]


def say_stopped(console: Console, config: TrainConfig, step: int, command: str) -> None:
    """Says at which step a signal stopped the run, and how to resume it."""
    if config.store is None:
        console.print(
            f"stopped after step {step} of {config.steps}; --mode memory keeps nothing "
            "to resume"
        )
        return
    console.print(
        f"stopped after step {step} of {config.steps}, which is committed to "
        f"{config.store.absolute()}; to go on from there:\n  {command}"
    )


def describe(config: TrainConfig, found: Evaluation) -> str:
    """Formats an evaluation as one line."""
    text = f"validation loss {found.loss:.3f}, "
    if config.task_name != "classification":
        text += f"perplexity {found.perplexity:,.2f}, "
    return f"{text}{100 * found.accuracy:.1f} % right"


def _shown(text: bytes) -> str:
    return printable(text.decode("utf-8", errors="replace"), keep="\n\t")
