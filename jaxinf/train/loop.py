"""A training run from its config to its report; start reading at `train`.

    batches[n] ─► step ─► loss            mode.compile(batch) makes the step: optax in
                   └► params, state       memory, near storage, or streamed (`modes`)

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

import jax
from rich.console import Console

from jaxinf.command_line import UsageError
from jaxinf.errors import ProcessError
from jaxinf.exchange import keep_tokenizer, tokenizer_files
from jaxinf.processes import Group, all_processes, silent_groups
from jaxinf.store import package_versions
from jaxinf.terminal import make_console
from jaxinf.train import messages, resume
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch, starting_at
from jaxinf.train.data.rows import TrainingData
from jaxinf.train.devices import connect, devices_of
from jaxinf.train.evaluate import BEST, Best, Evaluation, best_of, evaluator, num_tokens
from jaxinf.train.loading import load, make_batches
from jaxinf.train.metrics import NO_TRAFFIC, Costs, JsonLines, MetricsLog, StepLine
from jaxinf.train.modes import Done, in_memory, streamed
from jaxinf.train.opening import costs_of, open_run, stored_bytes
from jaxinf.train.optimizers import make_schedule, resolved_settings
from jaxinf.train.run_file import text_of_run
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
      UsageError: the config asks for something impossible.
      JaxinfError: the store, a drive, or a gradient that is not finite.
    """
    config = check(config)
    console, run_file = make_console(soft_wrap=True), text_of_run(config)
    group = Group("train")
    if config.distributed is not None:
        connect(config.distributed)
        group = all_processes("train", limit_s=_TIMEOUT_S)
    if group.number:
        console = Console(quiet=True, force_terminal=False)
    if not group.is_alone:
        log_dir = config.logs / f"process-{group.number:05d}"
        config = dataclasses.replace(config, log_dir=log_dir)
    with console.status("reading the data"):
        config, data = load(config)
    with contextlib.ExitStack() as stack:
        run = _TrainingRun(config, data, group, console, stack)
        _keep_config(run.step, config, run_file)
        signal_number = run.go()
        if run.step < config.steps:
            messages.say_stopped(console, config, run.step)
            return signal_number and 128 + signal_number
        return run.end()


class _TrainingRun:
    """A run on its way: its mode, its logs, and how far it is.

    Args:
      stack: closes what the run opens.
    """

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
        messages.say_config(console, config, data)
        self._devices, self._idle_bytes = devices_of(config), rss_bytes()
        self._store = store = None
        if config.mode != "memory":
            self._store = store = open_run(config, self._devices)
            stack.callback(store.close)
        self._identity = resume.identity_of(config, data)
        resume.check_same(self._identity, group)
        self.step, changes = 0, list[str]()
        if store is not None and store.step:
            self.step, changes = resume.resumed(config, self._identity, store.payload)
            console.print(f"resuming at step {self.step}")
        for change in changes:
            console.print(f"  changed from here on: {change}")
        _check_logs(config.logs)
        is_new, files = store is not None and not store.step, dict[str, bytes]()
        if is_new:  # before anything is written
            files = tokenizer_files(tokenizer=config.tokenizer, weights=config.source)
        with console.status("making or reading the store"):
            if store is not None and config.mode == "stream":
                console.print("planning a step …")
                first = self._devices.joined(self._batches[0])
                self._mode = streamed(config, store, self._devices, first, stack)
            else:
                self._mode = in_memory(config, store, self._devices)
        if store is not None and is_new:
            keep_tokenizer(store.path, files)
        self._num_updates = store.step if store else 0
        self._disk_bytes = stored_bytes(store) if store else 0
        self._num_kept_updates = -1  # at the last checkpoint
        self._learning_rate = jax.jit(make_schedule(config))
        self._timer = StepTimer(config, self.step)
        stack.callback(self._timer.close)
        self._best = best_of(store, group)
        self._metrics = MetricsLog(config.logs, self.step)
        stack.callback(self._metrics.close)
        self._validation = JsonLines(config.logs / "validation.jsonl", self.step, 0)
        stack.callback(self._validation.close)

    def go(self) -> int:
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
        step = self._mode.compile(self._devices.joined(self._batches[0]))
        console.print(f"ready after {time.monotonic() - began_s:.1f} s")
        if config.eval_every and self._best.step < 0:
            self._say_evaluation()
        coming = starting_at(self._batches, first)
        progress = messages.Progress(console, config, first)
        with contextlib.closing(coming), stop_requests() as requests:
            while self.step < last:
                if stopped := stop_number(self._group, self.step + 1, requests):
                    break
                progress.step(self._one_step(step, next(coming)))
                every, is_last = config.checkpoint_every, self.step == last
                if every and (self.step % every == 0 or is_last):
                    self._keep()
                every = config.eval_every
                if every and self.step % every == 0 and not is_last:
                    self._say_evaluation()
            self._metrics.flush()
        return stopped

    def _one_step(self, step: Callable[[Batch], Done], batch: Batch) -> StepLine:
        number, store = self.step + 1, self._store
        if store is not None:
            payload = resume.payload_of(self._identity, number) | self._best.payload()
            store.annotate(self._num_updates + 1, payload)
        try:
            done, measured = self._timer.measure(
                number, lambda: step(self._devices.joined(batch))
            )
        except jax.errors.JaxRuntimeError as error:
            if store is not None:
                store.check()  # raises what stopped it, without JAX's wrapping
            if self._group.is_alone:
                raise
            silent_groups.append(self._group)  # JAX would wait for it, and abort
            raise ProcessError(
                f"step {number}: expected all processes to compute it, found: "
                f"{str(error).splitlines()[0]}; another process may have died: see its "
                "output, and start all again"
            ) from error
        self.step = number
        if done.stream is not None:
            parts = (
                done.stream[f"waited_{x}_s"] for x in ("params", "values", "updates")
            )
            measured["phases"]["wait"] = round(sum(parts), 6)
        line = StepLine(
            *(number, done.loss, num_tokens(batch)),
            learning_rate=float(self._learning_rate(self._num_updates)),
            gradient_norm=done.norm,
            stream=done.stream,
            **measured,
        )
        if done.is_skipped:
            self._console.print(f"step {number}: skipped, NaN or Inf in a gradient")
        self._num_updates += not done.is_skipped
        costs: Costs = NO_TRAFFIC.copy
        if store is not None and not done.is_skipped:
            what = self._num_updates, self._disk_bytes, done.stream or {}
            costs = functools.partial(costs_of, store, *what)
        self._metrics.add(line, costs)
        self._timer.ended(number, costs)
        return line

    def _keep(self) -> None:
        """Keeps a checkpoint, unless all batches since the last one were skipped."""
        if self._store is not None and self._num_updates != self._num_kept_updates:
            self._timer.forget()
            name = self._store.checkpoint(state=self._mode.state())
            self._console.print(f"step {self.step}: checkpoint {name}")
            self._num_kept_updates = self._num_updates

    # --- evaluation ----------------------------------------------------------------

    @functools.cached_property
    def _evaluator(self) -> Callable[[PyTree], Evaluation]:
        """Made at the first evaluation, in the memory that training has left then."""
        return evaluator(self._config, self._data, self._mode.function)

    def _say_evaluation(self) -> None:
        text = messages.describe(self._config, self._evaluate())
        self._console.print(f"step {self.step}: {text}")

    def _evaluate(self) -> Evaluation:
        """Evaluates the params; once a step it logs that, and keeps the best so far."""
        self._timer.forget()
        own = self._evaluator(self._mode.params())
        # Other processors may round otherwise, and all must keep the same best.
        found = Evaluation(*self._group.first("the evaluation", lambda: own))
        if self.step > self._validation.last_step:
            # Less than the step if batches were skipped.
            committed = self._num_updates if self._store else 0
            line = {"step": self.step, "committed": committed, "loss": found.loss}
            line |= {"perplexity": found.perplexity, "accuracy": found.accuracy}
            self._validation.write(self.step, json.dumps(line))
        is_offered = self._config.eval_every > 0 and self.step > 0
        if self._store and is_offered and found.loss < self._best.loss:
            self._store.checkpoint(BEST, state=self._mode.state(), overwrite=True)
            self._console.print(f"step {self.step}: checkpoint {BEST}")
            self._best = Best(self._num_updates, found.loss)
        return found

    # --- the end -------------------------------------------------------------------

    def end(self) -> int:
        """Evaluates, prints the memory that the run took, and waits for exports.

        Returns the exit status.
        """
        store, console = self._store, self._console
        if self.step:
            console.print(messages.describe(self._config, self._evaluate()))
        messages.say_results(console, self._config, store, self._idle_bytes)
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


def _check_logs(logs: Path) -> None:
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


def _keep_config(step: int, config: TrainConfig, run_file: str) -> None:
    """Writes config.json and config.toml; those of the run so far stay beside them.

    config.toml has the run as it was asked for, config.json with what its data and its
    process have decided.
    """
    document = config.to_json() | resolved_settings(config)
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
