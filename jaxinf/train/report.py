"""What a run says: its config, progress, results and exports.

Invariant: it names things the user can act on: paths, sizes, commands. Without a
terminal only plain lines are written, without control characters; printed text is never
taken for markup. Training never waits for an export; a complete run does, until Ctrl-C.
"""

import contextlib
import logging
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jaxinf_models import num_params
from rich.console import Console
from rich.live import Live
from rich.text import Text

from jaxinf.engine import Store
from jaxinf.terminal import format_bytes, printable
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.rows import TrainingData
from jaxinf.train.evaluate import Evaluation
from jaxinf.train.freezing import trained
from jaxinf.train.help import installed, near
from jaxinf.train.metrics import StepLine, read_lines
from jaxinf.train.schedules import (
    num_warmup_steps,
    peak_learning_rate,
    weight_decay,
)
from jaxinf.train.timing import peak_rss_bytes

_NUM_FIRST = 2  # steps that read and compile anew
_PLAIN_INTERVAL_S = 5.0
_NUM_SETTLING = 5  # steps before the estimate of the time left is shown, or
_SETTLING_S = 60.0  # so long, where steps are slow
_SMOOTHING = 0.9  # for tokens/s and loss: an average of about 10 steps
_EXPORT_FAILED = 3  # the exit status of a complete run


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


def say_sample(console: Console, prompt: bytes, text: bytes) -> None:
    """Prints what the model goes on with after a prompt, if there is one."""
    if prompt:
        shown = _shown(text) or "(the end, at once)"
        console.print(f"\nsample, after {_shown(prompt)!r}:\n{shown}\n")


def say_results(
    console: Console, config: TrainConfig, store: Store | None, idle_bytes: int
) -> None:
    """Prints what was found, and the paths of the results.

    Args:
      idle_bytes: resident memory of the process before it had the run's params.
    """
    lines = [*read_lines(config.logs / "metrics.jsonl")]
    text = "\n".join([*_costs(lines), _memory_line(config, idle_bytes)])
    console.print(text, markup=False, highlight=False)
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
    return said


def _memory_line(config: TrainConfig, idle_bytes: int) -> str:
    """Says what the run took beside the process itself, as --memory means it."""
    taken = format_bytes(max(0, peak_rss_bytes() - idle_bytes))
    asked = ""
    if config.mode == "stream" and config.memory is not None:
        asked = f" of --memory {format_bytes(config.memory)}"
    idle = format_bytes(idle_bytes)
    return f"memory  at most {taken}{asked}, beside {idle} of the process itself"


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


# --- progress ------------------------------------------------------------------------


@contextlib.contextmanager
def saying_compilation(console: Console) -> Iterator[None]:
    """Says how many programs the body compiles, before the time that it takes."""
    log, said = logging.getLogger("jaxinf.compile"), list[float]()

    def say(record: logging.LogRecord) -> bool:
        if not said:  # variants of a plan are compiled, too
            said.append(time.monotonic())
            console.print(f"{record.getMessage()} …")
        return False

    level = log.level
    log.setLevel(logging.INFO)
    log.addFilter(say)
    try:
        yield
    finally:
        log.removeFilter(say)
        log.setLevel(level)
    if said:
        console.print(f"ready after {time.monotonic() - said[0]:.1f} s")


class Progress(contextlib.ExitStack):
    """Shows each step when it is done; a live line ends with its context.

    Args:
      first: number of steps done before.
      unit: the unit of a line's `tokens`.
    """

    def __init__(
        self, console: Console, *, first: int, last: int, unit: str = "tokens"
    ) -> None:
        super().__init__()
        self._console, self._unit = console, unit
        self._first, self._last = first, last
        self._started_s = self._shown_s = time.monotonic()
        self._tokens_per_s = self._loss = 0.0
        self._drive = self._stream = ""
        self._live = None
        if console.is_terminal and not console.is_dumb_terminal:
            live = Live(console=console, refresh_per_second=4)
            self._live = self.enter_context(live)

    def costs(self, line: StepLine) -> None:
        """Adds the traffic of a committed step."""
        if line.step_s and line.drive_read_bytes and line.drive_write_bytes:
            read = line.drive_read_bytes / line.step_s / 1e9
            written = line.drive_write_bytes / line.step_s / 1e9
            self._drive = f"  drive {read:.2f} GB/s read {written:.2f} written"
        if line.stream is not None:
            waited = ", ".join(
                f"{name} {line.stream[f'waited_{name}_s']:.1f}"
                for name in ("params", "device", "updates")
            )
            hit_rate = line.stream["prefetch_hit_rate"]
            self._stream = f"  prefetched {hit_rate:.0%}  waited s: {waited}"

    def step(self, line: StepLine) -> None:
        """Adds a step; shows it at once on a terminal, otherwise every few seconds."""
        assert line.loss is not None
        assert line.tokens and line.step_s  # noqa: PT018
        # A plain mean until there are enough steps for a moving average.
        weight = min(_SMOOTHING, 1 - 1 / (line.step - self._first))
        rate = line.tokens / line.step_s
        self._tokens_per_s += (1 - weight) * (rate - self._tokens_per_s)
        if math.isfinite(line.loss):
            self._loss += (1 - weight) * (line.loss - self._loss)
        if self._live is not None:
            self._live.update(Text(self._text(line), no_wrap=True, overflow="crop"))
        elif self._is_due(line.step):
            self._console.print(self._text(line))

    def _is_due(self, step: int) -> bool:
        now_s = time.monotonic()
        is_end = step in (self._first + 1, self._last)
        if not is_end and now_s - self._shown_s < _PLAIN_INTERVAL_S:
            return False
        self._shown_s = now_s
        return True

    def _text(self, line: StepLine) -> str:
        return (
            f"step {line.step}/{self._last}{self._left(line.step)}  "
            f"loss {self._loss:.3f}  {_rate(self._tokens_per_s)} {self._unit}/s  "
            f"memory {format_bytes(line.rss_bytes or 0)}{self._drive}{self._stream}"
        )

    def _left(self, step: int) -> str:
        num_done = step - self._first
        elapsed_s = time.monotonic() - self._started_s
        is_early = num_done < _NUM_SETTLING and elapsed_s < _SETTLING_S
        if is_early and step < self._last:
            return ""
        return f"  {_clock(elapsed_s / num_done * (self._last - step))} left"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


# --- exports -------------------------------------------------------------------------


class ExportsOfRun:
    """What a run says of its exports; the store logs those that fail.

    Args:
      store: None in memory, where there are none.
    """

    def __init__(self, store: Store | None, console: Console) -> None:
        self._store, self._console = store, console
        self._num_said = 0

    def say_new(self) -> None:
        """Says which steps have been exported since the last call."""
        infos = [] if self._store is None else self._store.exports()
        for info in infos[self._num_said :]:
            if info.outcome == "under way":
                break
            self._num_said += 1
            if info.outcome == "exported":
                self._console.print(f"step {info.step}: exported to {info.url}")

    def end(self, *, waits: bool = True) -> int:
        """Waits for the export under way, or gives it up; returns the exit status.

        Ctrl-C ends the wait, and gives it up.
        """
        if self._store is None:
            return 0
        self._store.wait()  # for the last step, which may be due
        under_way = [i for i in self._store.exports() if i.outcome == "under way"]
        try:
            if under_way and waits:
                self._wait(self._store, under_way[0].step)
            self._store.end_export(waits=waits)
        except KeyboardInterrupt:
            pass  # the export was given up, which the store has logged
        self.say_new()
        failed = [i.step for i in self._store.exports() if i.outcome == "failed"]
        if failed and waits:  # else the status is that of the signal
            steps = ", ".join(map(str, failed))
            text = f"exports of step {steps} failed: exit status {_EXPORT_FAILED}"
            self._console.print(text)
        return _EXPORT_FAILED if failed else 0

    def _wait(self, store: Store, step: int) -> None:
        text = f"waiting for the export of step {step}; Ctrl-C gives it up"
        if not self._console.is_terminal:
            self._console.print(text)
        with self._console.status(text) as status:

            def show(done: int, total: int) -> None:
                sizes = f"{format_bytes(done)} of {format_bytes(total)}"
                status.update(f"{text}: {sizes}")

            store.end_export(progress=show)
