"""A training run from its config to its report; start reading at `train`.

    batches[n] ─► train_step ─► loss, params
                      └ tx.update: optax, or jaxinf's on the store

Invariant: batch n is a function of the data, the seed and n alone, and each commit
  keeps its n. So a stopped run goes on as if it had not been stopped.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx
from jaxinf_models import (
    ModelConfig,
    deferred_params,
    make_model,
    num_params,
    split,
)
from rich.console import Console

from jaxinf.command_line import UsageError
from jaxinf.terminal import make_console
from jaxinf.train.checkpoints import BEST, best_loss, evaluation_line
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch, Batches
from jaxinf.train.data.rows import TrainingData
from jaxinf.train.evaluate import Evaluation, Evaluator, num_tokens
from jaxinf.train.exports import ExportsOfRun
from jaxinf.train.freezing import check_source
from jaxinf.train.loading import load, make_batches
from jaxinf.train.lora import Lora, with_new
from jaxinf.train.metrics import JsonLines, MetricsLog, StepLine
from jaxinf.train.on_store import OnStore
from jaxinf.train.opening import Backend, open_backend
from jaxinf.train.optimizers import check_optimizer, make_optimizer
from jaxinf.train.processes import Processes, SumLog, start
from jaxinf.train.progress import Progress
from jaxinf.train.report import (
    describe,
    say_config,
    say_evaluation,
    say_results,
    say_stopped,
)
from jaxinf.train.resume import Identity, first_payload
from jaxinf.train.run_file import text_of_run
from jaxinf.train.schedules import learning_rates, resolved_settings
from jaxinf.train.signals import stop_request
from jaxinf.train.step import TrainStep
from jaxinf.train.step_timer import StepTimer
from jaxinf.train.trackers import Trackers, check_trackers
from jaxinf.typing import PyTree

# Share of the budget for pieces read and traced programs during an import.
_IMPORT_BYTES, _IMPORT_LEAF_BYTES = 4 << 20, 64 << 10
# What --eval-only does not write.
_LEFT_OUT: Mapping[str, Any] = {
    **dict.fromkeys(("tensorboard", "wandb", "trace", "export_to")),
    "eval_every": 0,
}


def train(
    config: TrainConfig, *, command: str = "", console: Console | None = None
) -> int:
    """Trains, or resumes training, until `config.steps`; blocks.

    Args:
      command: the command to show the user for resuming the run.
      console: the console to print to; by default standard output.

    Returns:
      The exit status: 0 if it reached its last step; 3 if it did, and an export failed;
      128 and the number of the signal that stopped it before.

    Raises:
      UsageError: the config asks for something impossible.
      JaxinfError: the store, a drive, or a gradient that is not finite.
    """
    config = check(config)
    check_optimizer(config)
    check_trackers(config)
    console = console or make_console(soft_wrap=True)
    run_file = text_of_run(config)
    processes = start(config)
    console = processes.console(console)
    config = processes.own(config)
    if not config.steps and not config.eval_only:
        _import(config, console)
        return 0
    with console.status("reading the data"):
        config, data = load(config)
    batches = make_batches(config, data)
    say_config(console, config, data)
    with contextlib.ExitStack() as stack:
        if config.eval_only:  # it writes nothing of the run's
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            config = dataclasses.replace(config, log_dir=place / "log", **_LEFT_OUT)
        backend = stack.enter_context(
            contextlib.closing(open_backend(config, make_optimizer(config), processes))
        )
        if config.eval_only and backend.store and not backend.store.exists:
            raise UsageError(
                f"--eval-only: expected a run in {config.store}, found none; name its "
                "--store, or give --mode memory with --from"
            )
        run = stack.enter_context(
            contextlib.closing(_Run(config, data, batches, backend, console, processes))
        )
        if not config.eval_only:
            _keep_config(run.step, config, run_file)
            signal_number = run.go()
            if run.step < config.steps:
                say_stopped(console, config, run.step, command)
                run.exports.end(waits=False)
                return signal_number and 128 + signal_number
        found, params = run.evaluate(), processes.local(run.evaluated)
        if processes.is_first or backend.needs_all:
            say_evaluation(console, config, found, run.evaluator, params)
        if config.eval_only:
            return 0
        say_results(console, config, backend.store)
        return run.exports.end()


def _import(config: TrainConfig, console: Console) -> None:
    """Makes the store from a checkpoint's weights, one leaf at a time, and stops."""
    params = _first_params(config)
    aside_bytes = _IMPORT_BYTES + _IMPORT_LEAF_BYTES * len(jax.tree.leaves(params))
    aside_bytes = min(aside_bytes, config.buffer_bytes // 4)
    config = dataclasses.replace(config, memory=config.buffer_bytes - aside_bytes)
    with contextlib.closing(open_backend(config, make_optimizer(config))) as backend:
        assert isinstance(backend, OnStore)
        if backend.store.step:
            raise UsageError(
                f"--steps 0: {config.store} is at step {backend.store.step} already; "
                "give a --store that is new"
            )
        backend.begin(params, first_payload(config))
        console.print(
            f"imported {num_params(config.model_config):,} params from {config.source} "
            f"to {config.store}, which is at step {backend.store.step}"
        )


def _first_params(config: TrainConfig) -> PyTree:
    """Returns new params, or those of a checkpoint as deferred leaves."""
    if config.source is None:
        return _new_params(config.model_config, config.seed, config.adapters)
    assert config.files is not None
    params = deferred_params(config.files, config.model_config, config.seed)
    check_source(config.frozen, params, config.source)
    adapters = config.adapters
    return params if adapters is None else with_new(adapters, params, config.seed)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _new_params(model: ModelConfig, seed: int, adapters: Lora | None) -> PyTree:
    params = split(make_model(model, rngs=nnx.Rngs(seed)))[1]
    return params if adapters is None else with_new(adapters, params, seed)


def _check_log_dir(logs: Path) -> None:
    is_new = not os.path.lexists(logs)
    try:
        logs.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(logs, os.W_OK) else "no access to write"
        if is_new:
            logs.rmdir()
    except OSError as error:
        problem = error.strerror
    if problem:
        raise UsageError(
            f"--log-dir {logs}: expected a directory, or a place for one, found: "
            f"{problem}; name another, outside the store"
        )


def _keep_config(step: int, config: TrainConfig, run_file: str) -> None:
    """Writes config.json and config.toml; those of the run so far stay beside them.

    Args:
      config: the run with what its data and its process have decided.
      run_file: the run as it was asked for.
    """
    versions = {
        "jaxinf": importlib.metadata.version("jaxinf"),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "optax": optax.__version__,
    }
    document = config.to_json() | resolved_settings(config)
    document["versions"] = versions
    texts = {"json": json.dumps(document, indent=1) + "\n", "toml": run_file}
    for kind, text in texts.items():
        path = config.logs / f"config.{kind}"
        if path.exists():
            path.replace(config.logs / f"config.{step or 'previous'}.{kind}")
        path.write_text(text, encoding="utf-8")


class _Run:
    """The state of a run: data, params, optimizer state, logs."""

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData,
        batches: Batches,
        backend: Backend,
        console: Console,
        processes: Processes,
    ) -> None:
        self._processes = processes
        self._config, self._batches = config, batches
        self._backend, self._console = backend, console
        self._identity = Identity(config, data)
        self._identity.check_same(processes.group)
        self._graphdef, like = config.abstract
        self.step = self._first_step()
        _check_log_dir(config.logs)  # before the store is made
        self.params, self._state = backend.init(
            lambda: _first_params(config),
            processes.like(like),
            first_payload(config),
            processes.batch(batches[0]),
        )
        self._num_skipped = backend.num_skipped(self._state)
        self._num_updates = backend.committed_step(self._state)
        self._num_kept_updates = -1  # at the last checkpoint
        self._learning_rate = learning_rates(config)
        self._data = data
        self._open_logs()

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """Made at the first evaluation, in the memory that training has left then."""
        return Evaluator(self._config, self._data, self._graphdef, self._backend)

    def _first_step(self) -> int:
        store = self._backend.store
        if store is None or not store.step:
            return 0
        payload = store.payload or {}
        step = self._identity.resume_step(payload, self._batches)
        self._console.print(f"resuming at step {step}")
        for change in self._identity.changes(payload):
            self._console.print(f"  changed from here on: {change}")
        return step

    def _open_logs(self) -> None:
        logs = self._config.logs
        logs.mkdir(parents=True, exist_ok=True)
        self._validation = JsonLines(logs / "validation.jsonl", self.step, first=0)
        trackers, self._sums = Trackers(self._config), None
        if not self._processes.group.is_alone:
            self._metrics = MetricsLog(logs, self.step)
            self._sums = SumLog(self._processes, logs.parent, self.step, trackers)
        else:
            self._metrics = MetricsLog(logs, self.step, trackers.begin, trackers.send)
        self._trackers, self._timer = trackers, StepTimer(self._config, self.step)
        self._best_loss = best_loss(self._backend.store, logs / "validation.jsonl")
        self.exports = ExportsOfRun(self._backend.store, self._console)

    def go(self) -> int:
        """Trains until the last step, or until a signal; returns its number or 0."""
        config, first, last = self._config, self.step, self._config.steps
        if first >= last:
            self._console.print(
                f"already at step {first}, nothing to train: --steps is {last}"
            )
            return 0
        train_step, stopped = self._compile(), 0
        if config.eval_every and not first:
            self._console.print(f"step 0: {describe(config, self.evaluate())}")
        unit = "images" if config.takes_images else "tokens"
        coming = self._batches.starting_at(Batches.position_of(first))
        with (
            contextlib.closing(coming),
            Progress(self._console, first=first, last=last, unit=unit) as progress,
            self._metrics.recording(functools.partial(self._complete, progress)),
            stop_request(
                lambda name: self._console.print(
                    f"{name}: finishing this step; once more ends at once"
                )
            ) as stop,
        ):
            while self.step < last:
                if stopped := self._processes.stop_number(self.step + 1, stop.number):
                    break
                progress.step(self._one_step(train_step, next(coming)))
                self.exports.say_new()
                every, is_last = config.checkpoint_every, self.step == last
                if every and (self.step % every == 0 or is_last):
                    self._keep()
                every = config.eval_every
                if every and self.step % every == 0 and not is_last:
                    text = describe(config, self.evaluate())
                    self._console.print(f"step {self.step}: {text}")
        return stopped

    def _compile(self) -> TrainStep:
        """Compiles before the first step, so that its time is like the others'."""
        started_s = time.monotonic()
        self._console.print("compiling …")
        compiled = self._backend.compile_step(
            self._graphdef,
            self.params,
            self._state,
            self._processes.batch(self._batches[0]),
        )
        self._console.print(f"compiled in {time.monotonic() - started_s:.1f} s")
        return compiled

    def _complete(self, progress: Progress, line: StepLine) -> None:
        if self._sums is not None:
            self._sums.write(line)
        progress.costs(line)

    def _one_step(self, train_step: TrainStep, batch: Batch) -> StepLine:
        store = self._backend.store
        if store is not None:
            coming = self._backend.committed_step(self._state) + 1
            shard = self._batches.shard
            store.annotate(coming, self._identity.position(self.step + 1, batch, shard))
        try:
            with self._timer.step(self.step + 1):
                self.params, self._state, (loss, norm) = jax.block_until_ready(
                    train_step(self.params, self._state, self._processes.batch(batch))
                )
        except jax.errors.JaxRuntimeError:
            if store is not None:
                store.check()  # raises what stopped it, without JAX's wrapping
            raise
        self.step += 1
        rate = self._learning_rate(self._num_updates)
        before, self._num_skipped = (
            self._num_skipped,
            self._backend.num_skipped(self._state),
        )
        if is_skipped := self._num_skipped > before:
            self._console.print(f"step {self.step}: skipped, NaN or Inf in a gradient")
        self._num_updates += not is_skipped
        line = StepLine(
            *(self.step, float(loss), num_tokens(batch)),
            learning_rate=rate,
            gradient_norm=None if norm is None else float(norm),
            **self._timer.fields(),
        )
        costs = self._backend.costs(self._state, is_skipped=is_skipped)
        self._metrics.add(line, costs)
        self._timer.ended(costs)
        return line

    def _keep(self) -> None:
        assert self._backend.store is not None, "check refuses it in memory"
        if self._num_updates == self._num_kept_updates:
            return  # all batches since then were skipped
        self._timer.forget()
        name = self._backend.store.checkpoint(state=self._state)
        self._console.print(f"step {self.step}: checkpoint {name}")
        self._num_kept_updates = self._num_updates

    def _keep_best(self, loss: float) -> None:
        if self._backend.store is not None:
            self._backend.store.checkpoint(BEST, state=self._state, overwrite=True)
            self._console.print(f"step {self.step}: checkpoint {BEST}")
            self._best_loss = loss

    @property
    def evaluated(self) -> PyTree:
        """The params to evaluate, which may be their average."""
        if self._config.evaluates_average:
            return self._backend.average(self.params, self._state)
        return self.params

    def evaluate(self) -> Evaluation:
        """Evaluates the params; once a step it logs that, and keeps the best so far."""
        self._timer.forget()
        params = self._processes.local(self.evaluated)
        if self._backend.needs_all:
            found = self.evaluator.evaluate(params)
        else:
            found = Evaluation(
                *self._processes.group.first(
                    "the evaluation",
                    lambda: dataclasses.astuple(self.evaluator.evaluate(params)),
                )
            )
        if self.step > self._validation.last_step:
            committed = self._backend.committed_step(self._state)
            line = evaluation_line(self.step, committed, found)
            self._validation.write(self.step, line)
            self._trackers.send(json.loads(line), "held_out/")
            is_offered = self._config.eval_every > 0 and self.step > 0
            if is_offered and found.loss < self._best_loss:
                self._keep_best(found.loss)
        return found

    def close(self) -> None:
        """Closes the logs."""
        self._timer.close()
        self._metrics.close()
        if self._sums is not None:
            self._sums.close()
        self._validation.close()
        self._trackers.close()
