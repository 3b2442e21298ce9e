"""A training run from its config to its report; start reading at `train`.

    batches[n] ─► step ─► loss            `modes` makes the step: optax in memory, near
                   └► params, state       storage, or streamed

Invariant: batch n is a function of the data, the seed and n alone, and each commit
keeps its n. So a stopped run goes on as if it had not been stopped.
"""

import contextlib
import dataclasses
import functools
import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxinf.command_line import UsageError
from jaxinf.errors import ProcessError
from jaxinf.exchange import keep_tokenizer, read_tokenizer_files
from jaxinf.processes import Group, all_processes, silent_groups
from jaxinf.store import package_versions
from jaxinf.terminal import make_console
from jaxinf.train import messages, resume
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch, iterate_from
from jaxinf.train.data.rows import TrainingData
from jaxinf.train.devices import connect_processes, find_devices
from jaxinf.train.evaluate import (
    BEST,
    BestCheckpoint,
    Evaluation,
    count_tokens,
    find_best,
    make_evaluator,
)
from jaxinf.train.loading import load_data, make_batches
from jaxinf.train.metrics import NO_TRAFFIC, JsonLines, MetricsLog, ReadCosts, StepLine
from jaxinf.train.modes import InMemoryTraining, Step, StepResult, StreamedTraining
from jaxinf.train.opening import open_run_store, step_costs, stored_bytes
from jaxinf.train.optimizers import make_schedule, resolve_settings
from jaxinf.train.run_file import format_run
from jaxinf.train.signals import stop_number, stop_requests
from jaxinf.train.timing import StepTimer, rss_bytes
from jaxinf.typing import PyTree

_TIMEOUT_S = 600.0  # for a process that is behind the others


def train(config: TrainConfig) -> int:
    """Trains, or resumes training, until `config.steps`; blocks.

    Returns:
      The exit status: 0 if it reached its last step; 3 if it did, and an export failed;
      128 and the number of the signal that stopped it before.

    Raises:
      UsageError: The config asks for something impossible.
      JaxinfError: The store, a drive, or a gradient that is not finite.
    """
    config = check(config)
    console, run_file = make_console(soft_wrap=True), format_run(config)
    group = Group("train")
    if config.distributed is not None:
        connect_processes(config.distributed)
        group = all_processes("train", limit_s=_TIMEOUT_S)
    if group.number:
        console = Console(quiet=True, force_terminal=False)
    if not group.is_alone:
        log_dir = config.logs / f"process-{group.number:05d}"
        config = dataclasses.replace(config, log_dir=log_dir)
    with console.status("reading the data"):
        config, data = load_data(config)
    with contextlib.ExitStack() as stack:
        run = _TrainingRun(config, data, group, console, stack)
        _write_config(run.step, config, run_file)
        signal_number = run.train()
        if run.step < config.steps:
            messages.print_stopped(console, config, run.step)
            return signal_number and 128 + signal_number
        return run.finish()


class _TrainingRun:
    """The state of a run, which `stack` closes: training, logs, and progress."""

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData,
        group: Group,
        console: Console,
        stack: contextlib.ExitStack,
    ) -> None:
        self._config, self._data = config, data
        self._group, self._console = group, console
        self._batches = make_batches(config, data)
        messages.print_config(console, config, data)
        self._devices, self._idle_bytes = find_devices(config), rss_bytes()
        self._store = store = None
        if config.mode != "memory":
            self._store = store = open_run_store(config, self._devices)
            stack.callback(store.close)
        self._identity = resume.run_identity(config, data)
        self.step = self._check_resume()
        _check_log_dir(config.logs)
        with console.status("making or reading the store"):
            self._training = self._open_training(stack)
        self._num_updates = store.step if store else 0
        self._disk_bytes = stored_bytes(store) if store else 0
        self._num_checkpointed_updates = -1
        self._learning_rate = jax.jit(make_schedule(config))
        self._timer = StepTimer(config, self.step)
        stack.callback(self._timer.close)
        self._best = find_best(store, group)
        self._metrics = MetricsLog(config.logs, self.step)
        stack.callback(self._metrics.close)
        validation_log = config.logs / "validation.jsonl"
        self._validation = JsonLines(validation_log, self.step, first_step=0)
        stack.callback(self._validation.close)

    def _check_resume(self) -> int:
        """Returns the number of steps that are done; refuses another run's store."""
        resume.check_processes_agree(self._identity, self._group)
        store = self._store
        if store is None or not store.exists:
            return 0
        payload, identity = store.payload, self._identity
        step, changes = 0, list[str]()
        if store.step:
            step, changes = resume.check_resumable(self._config, identity, payload)
        resume.check_weights(self._config.store, identity, payload)
        if not step:
            return 0
        whose = " with the store's params; of --from only the form and the tokenizer"
        whose *= bool(self._config.source)
        self._console.print(f"resuming at step {step}{whose}")
        for change in changes:
            self._console.print(f"  changed from here on: {change}")
        return step

    def _open_training(
        self, stack: contextlib.ExitStack
    ) -> InMemoryTraining | StreamedTraining:
        config, store, devices = self._config, self._store, self._devices
        if store is None:
            return InMemoryTraining(config, store, devices)
        is_new, files = not store.step, dict[str, bytes]()
        if is_new:  # read before anything is written
            places = {"tokenizer": config.tokenizer, "weights": config.source}
            files = read_tokenizer_files(**places)
        if config.mode == "stream":
            self._console.print("planning a step …")
            batch = devices.join_batch(self._batches[0])
            training = StreamedTraining(config, store, devices, batch, stack)
        else:
            training = InMemoryTraining(config, store, devices)
        if is_new:
            keep_tokenizer(store.path, files)
        return training

    def train(self) -> int:
        """Trains until the last step, or until a signal; returns its number or 0."""
        config, console, first = self._config, self._console, self.step
        last, stopped = config.steps, 0
        if first >= last:
            console.print(
                f"already at step {first}, nothing to train: --steps is {last}"
            )
            return 0
        began_s = time.monotonic()
        console.print("compiling …")  # so that no step's time has it
        step = self._training.compile_step(self._devices.join_batch(self._batches[0]))
        console.print(f"ready after {time.monotonic() - began_s:.1f} s")
        if config.eval_every and self._best.step < 0:
            self._evaluate(f"step {self.step}: ")
        batches = iterate_from(self._batches, first)
        progress = messages.Progress(console, config, first)
        with contextlib.closing(batches), stop_requests() as requests:
            while self.step < last:
                if stopped := stop_number(self._group, self.step + 1, requests):
                    break
                progress.add(self._run_step(step, next(batches)))
                every, is_last = config.checkpoint_every, self.step == last
                if every and (self.step % every == 0 or is_last):
                    self._save_checkpoint()
                every = config.eval_every
                if every and self.step % every == 0 and not is_last:
                    self._evaluate(f"step {self.step}: ")
            self._metrics.flush()
        return stopped

    def _run_step(self, step: Step, batch: Batch) -> StepLine:
        number, store = self.step + 1, self._store
        if store is not None:
            best = self._best.to_payload()
            payload = resume.step_payload(self._identity, number) | best
            store.annotate(self._num_updates + 1, payload)
        result, measured = self._compute(step, batch, number)
        self.step, stream = number, result.stream
        if stream is not None:
            waits = (stream[f"waited_{x}_s"] for x in ("params", "values", "updates"))
            measured["phases"]["wait"] = round(sum(waits), 6)
        line = StepLine(
            number,
            result.loss,
            count_tokens(batch),
            learning_rate=float(self._learning_rate(self._num_updates)),
            gradient_norm=result.norm,
            stream=stream,
            **measured,
        )
        if result.is_skipped:
            self._console.print(f"step {number}: skipped, NaN or Inf in a gradient")
        self._num_updates += not result.is_skipped
        read_costs: ReadCosts = NO_TRAFFIC.copy
        if store is not None and not result.is_skipped:
            read_costs = functools.partial(
                step_costs, store, self._num_updates, self._disk_bytes, stream or {}
            )
        self._metrics.add(line, read_costs)
        self._timer.stop_due_trace(number, read_costs)
        return line

    def _compute(
        self, step: Step, batch: Batch, number: int
    ) -> tuple[StepResult, dict[str, Any]]:
        """Runs a step; returns its result, and its measured fields of a `StepLine`."""
        try:
            return self._timer.measure(
                number, lambda: step(self._devices.join_batch(batch))
            )
        except jax.errors.JaxRuntimeError as error:
            if self._store is not None:
                self._store.check()  # raises what stopped it, without JAX's wrapping
            if self._group.is_alone:
                raise
            silent_groups.append(self._group)  # JAX would wait for it, and abort
            raise ProcessError(
                f"step {number}: expected all processes to compute it, found: "
                f"{str(error).splitlines()[0]}; another process may have died: see its "
                "output, and start all again"
            ) from error

    def _save_checkpoint(self) -> None:
        """Saves a checkpoint, unless all batches since the last one were skipped."""
        if self._store is None or self._num_updates == self._num_checkpointed_updates:
            return
        self._timer.reset()
        name = self._store.checkpoint(state=self._training.optimizer_state())
        self._console.print(f"step {self.step}: checkpoint {name}")
        self._num_checkpointed_updates = self._num_updates

    @functools.cached_property
    def _evaluator(self) -> Callable[[PyTree], Evaluation]:
        """Made at the first evaluation, in the memory that training has left then."""
        compile_function = self._training.compile_function
        return make_evaluator(self._config, self._data, compile_function)

    def _evaluate(self, when: str = "") -> None:
        self._timer.reset()
        local = self._evaluator(self._training.evaluation_params())
        # Other processors may round otherwise, and all must keep the same best.
        evaluation = Evaluation(*self._group.first("the evaluation", lambda: local))
        loss = evaluation.loss
        self._console.print(when + messages.format_evaluation(self._config, evaluation))
        if self.step > self._validation.last_step:
            # Less than the step if batches were skipped.
            committed = self._num_updates if self._store else 0
            line = {"step": self.step, "committed": committed, "loss": loss}
            line["perplexity"] = evaluation.perplexity
            line["accuracy"] = evaluation.accuracy
            self._validation.write(self.step, json.dumps(line))
        is_candidate = self._config.eval_every > 0 and self.step > 0
        if self._store and is_candidate and loss < self._best.loss:
            state = self._training.optimizer_state()
            self._store.checkpoint(BEST, state=state, overwrite=True)
            self._console.print(f"step {self.step}: checkpoint {BEST}")
            self._best = BestCheckpoint(self._num_updates, loss)

    def finish(self) -> int:
        """Evaluates, prints the results, and waits for exports; the exit status."""
        store, console = self._store, self._console
        if self.step:
            self._evaluate()
        messages.print_results(console, self._config, store, self._idle_bytes)
        if store is None:
            return 0
        store.wait()  # for the last step, which may be due
        for info in store.exports():
            if not info.problem:
                console.print(f"step {info.step}: exported to {info.url}")
        failed = [f"{info.step}" for info in store.exports() if info.problem]
        if not failed:
            return 0
        text = f"exports of step {', '.join(failed)} failed: exit status"
        console.print(f"{text} {messages.EXPORT_FAILED}")
        return messages.EXPORT_FAILED


def _check_log_dir(logs: Path) -> None:
    """Refuses a log directory that cannot be made; leaves no new one."""
    try:
        is_new = not logs.exists()
        logs.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=logs).close()
        if is_new:
            logs.rmdir()
    except OSError as error:
        raise UsageError(
            f"--log-dir {logs}: expected a directory, or a place for one, found: "
            f"{error.strerror}; name another, outside the store"
        ) from error


def _write_config(step: int, config: TrainConfig, run_file: str) -> None:
    """Writes config.json and config.toml; those of the run so far stay beside them.

    config.toml has the run as it was asked for, config.json with what its data and its
    process have decided.
    """
    document = config.to_json() | resolve_settings(config)
    if config.files is not None:  # which say the model, not --model and --preset
        document["model"] = config.model_name
        del document["preset"]
    versions = {"python": platform.python_version(), **package_versions()}
    document["versions"] = versions
    texts = {"json": json.dumps(document, indent=1) + "\n", "toml": run_file}
    for kind, text in texts.items():
        path = config.logs / f"config.{kind}"
        if path.exists():
            path.replace(config.logs / f"config.{step or 'previous'}.{kind}")
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
