"""Shows the progress of a run: a live line on a terminal, or plain lines in a pipe.

Invariant: without a terminal only plain lines are written, without control characters;
printed text is never taken for markup.
"""

import contextlib
import logging
import math
import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from jaxinf.terminal import format_bytes
from jaxinf.train.metrics import StepLine

_PLAIN_INTERVAL_S = 5.0
_NUM_SETTLING = 5  # steps before the estimate of the time left is shown, or
_SETTLING_S = 60.0  # so long, where steps are slow
_SMOOTHING = 0.9  # for tokens/s and loss: an average of about 10 steps


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
