"""What a run says at its start and at its end.

Invariant: it names things the user can act on: places, sizes, commands.
"""

import os
import shlex
from pathlib import Path

from jaxinf_models import num_params
from rich.console import Console

from jaxinf.engine import Store
from jaxinf.train.backend import Backend, OnStore
from jaxinf.train.config import TrainConfig, format_bytes
from jaxinf.train.data import ByteCorpus
from jaxinf.train.evaluate import Evaluator, Verdict
from jaxinf.train.metrics import peak_rss_bytes
from jaxinf.train.optimizers import peak_learning_rate
from jaxinf.train.progress import printable
from jaxinf.typing import PyTree

__all__ = ["say_config", "say_results", "say_stopped"]


def say_config(console: Console, config: TrainConfig, corpus: ByteCorpus) -> None:
    """The run in four lines."""
    model = config.model_config
    data = "Python's standard library" if not config.data else " ".join(config.data)
    place = "memory" if config.store is None else f"store {config.store.absolute()}"
    console.print(
        f"model   {config.model} {config.preset}: {num_params(model):,} params in "
        f"{config.param_dtype}, computed in {config.dtype}\n"
        f"data    {data}: {corpus.train.size:,} bytes to train on, "
        f"{corpus.validation.size:,} to validate\n"
        f"steps   {config.steps} of {config.batch_size} x {config.seq_len} bytes, "
        f"{config.optimizer}, learning rate {peak_learning_rate(config):g} "
        f"({config.schedule}), seed {config.seed}\n"
        f"{_compression_line(config)}"
        f"state   in {place}; logs in {config.logs}"
    )


def _compression_line(config: TrainConfig) -> str:
    compression = config.compression
    if compression is None:
        return ""
    return (
        f"send    {compression.describe()}: {100 * compression.ratio:g} % of the "
        "gradients' bytes\n"
    )


def say_results(
    console: Console,
    config: TrainConfig,
    backend: Backend,
    verdict: Verdict,
    evaluator: Evaluator,
    params: PyTree,
) -> None:
    """The final report: what was learned, a sample, and where everything is."""
    console.print(_judgement(verdict))
    prompt, text = evaluator.sample(params)
    if text:
        console.print(f"\nsample, after {printable(prompt)!r}:\n{printable(text)}\n")
    if isinstance(backend, OnStore):
        path = backend.store.path
        console.print(
            f"store   {path}: step {backend.store.step}, "
            f"{format_bytes(_store_bytes(backend.store))} on disk\n"
            f"        look inside with: jaxinf inspect {shlex.quote(str(path))}\n"
            f"buffers at most {format_bytes(backend.store.peak_memory_bytes)} of "
            f"{format_bytes(config.memory_bytes)} for the state on its way"
        )
    console.print(
        f"logs    {config.logs / 'metrics.jsonl'}\n"
        f"memory  at most {format_bytes(peak_rss_bytes())} resident"
    )


def say_stopped(console: Console, config: TrainConfig, step: int, command: str) -> None:
    """Where a run was stopped by a signal, and how to go on."""
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


def _judgement(verdict: Verdict) -> str:
    margin = verdict.bigram - verdict.loss
    if margin > 0:
        outcome = (
            f"{margin:.3f} better than the bigram: the model has learned more than "
            "which byte follows which"
        )
    else:
        outcome = f"{-margin:.3f} worse than the bigram: train for more steps"
    return (
        f"validation loss {verdict.loss:.3f} nats a byte; the same text has entropy "
        f"{verdict.unigram:.3f} by single bytes (unigram) and {verdict.bigram:.3f} "
        f"given the byte before (bigram)\n{outcome}"
    )


def _store_bytes(store: Store) -> int:
    """What the store takes on its drives; holes take nothing."""
    roots = {store.path, *(csd.root for csd in store.csds())}
    outermost = [r for r in roots if not any(p in roots for p in r.parents)]
    files = (
        Path(folder, name).lstat()
        for root in outermost
        for folder, _, names in os.walk(root)
        for name in names
    )
    unique = {(entry.st_dev, entry.st_ino): entry.st_blocks * 512 for entry in files}
    return sum(unique.values())
