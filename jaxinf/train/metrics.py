"""`metrics.jsonl`: the cost of every step, one JSON line for each.

Invariant: each step up to the last committed one has exactly one line, however the run
was interrupted; a line is written once and never changed.

A step's commit goes on while the next step computes. So its line is complete one step
later, and is written then. Until then it is kept in `metrics.last.json`, so that a
killed run loses no line.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from jaxinf.transfer import ByteCounts, translated, write_bytes_atomically

Costs: TypeAlias = Callable[[], dict[str, Any]]
"""Blocks until a step is durable, then returns the fields of its `StepLine` that only
the store knows."""

NO_TRAFFIC: dict[str, Any] = {f.name: 0 for f in dataclasses.fields(ByteCounts)}


@dataclasses.dataclass(frozen=True)
class StepLine:
    """One line; docs/reports.md says what each field is.

    Null: a loss or a norm that is not finite, the norm in mode stream, where gradients
    never exist at once, what a mode or a skipped step does not have, and all but `step`
    if a process was killed after a commit and before it wrote the line. The traffic of
    a skipped step counts for the next commit.
    """

    step: int
    loss: float | None = None
    tokens: int | None = None
    step_s: float | None = None
    update_s: float | None = None
    commit_s: float | None = None
    hit_share: float | None = None
    drive_read_bytes: int | None = None
    drive_write_bytes: int | None = None
    link_down_bytes: int | None = None
    link_up_bytes: int | None = None
    rss_bytes: int | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    phases: Mapping[str, float] | None = None
    drives: Mapping[str, float] | None = None
    memory: Mapping[str, int | None] | None = None
    stream: Mapping[str, Any] | None = None

    def with_costs(self, costs: Mapping[str, Any]) -> "StepLine":
        """Returns the line with the fields that only the store knows."""
        memory = {**(self.memory or {}), **costs.get("memory", {})}
        return dataclasses.replace(self, **{**costs, "memory": memory})

    def to_json(self) -> str:
        """Returns the line without its newline; NaN, which JSON lacks, becomes null."""
        fields = dataclasses.asdict(self)
        for name in ("loss", "gradient_norm"):
            if fields[name] is not None and not math.isfinite(fields[name]):
                fields[name] = None
        if self.stream is None:
            del fields["stream"]
        return json.dumps(fields)


class JsonLines:
    """A file of JSON lines with a rising ``step``, continued from a given step.

    Args:
      path: the file. With `step` 0 an existing one is from another run and is moved
        aside, to ``<stem>.previous.jsonl``.
      step: the last committed step; later lines are dropped.
      first: the first step that may have a line.
    """

    def __init__(self, path: Path, step: int, first: int = 1) -> None:
        self.last_step = first - 1
        kept: list[str] = []
        if step == 0 and path.exists():
            path.replace(path.with_suffix(".previous.jsonl"))
        path.touch()
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                number = -1
                with contextlib.suppress(ValueError, KeyError, TypeError):  # cut off
                    number = int(json.loads(line)["step"])
                if self.last_step < number <= step:
                    kept.append(line.rstrip() + "\n")
                    self.last_step = number
        write_bytes_atomically(path, "".join(kept).encode())
        self._file = path.open("a", buffering=1)

    def write(self, step: int, line: str) -> None:
        """Appends a step's line and flushes it."""
        with translated("log", Path(self._file.name)):
            self._file.write(line + "\n")
        self.last_step = step

    def close(self) -> None:
        """Closes the file; idempotent."""
        with translated("log", Path(self._file.name)):
            self._file.close()


class MetricsLog:
    """Writes `metrics.jsonl`, each line when it is complete.

    Args:
      log_dir: the log directory; made if it does not exist.
      step: the last committed step; the file is continued after it.
    """

    def __init__(self, log_dir: Path, step: int) -> None:
        self._held: tuple[StepLine, Costs] | None = None
        log_dir.mkdir(parents=True, exist_ok=True)
        self._last, path = log_dir / "metrics.last.json", log_dir / "metrics.jsonl"
        is_continued = path.exists()
        self._lines = JsonLines(path, step)
        if is_continued:  # lacks the last lines of a killed run
            waiting = StepLine(0)
            with contextlib.suppress(OSError, ValueError, TypeError):
                waiting = StepLine(**json.loads(self._last.read_text()))
            for number in range(self._lines.last_step + 1, step + 1):
                self.write(waiting if waiting.step == number else StepLine(number))
        self._last.unlink(missing_ok=True)

    def add(self, line: StepLine, costs: Costs) -> None:
        """Takes a step with its results; its commit may still be in flight.

        Args:
          costs: returns the traffic; blocks at most until the next step's end.
        """
        self.flush()
        self._held = line, costs
        self._last.write_text(line.to_json())

    def flush(self) -> None:
        """Writes the line that is held, once its step is durable."""
        if self._held is not None:
            (line, costs), self._held = self._held, None
            self.write(line.with_costs(costs()))
        self._last.unlink(missing_ok=True)

    def write(self, line: StepLine) -> None:
        """Writes a line that is complete."""
        self._lines.write(line.step, line.to_json())

    def close(self) -> None:
        """Closes the file; a line still held is written, if its step is durable."""
        with contextlib.suppress(Exception):  # whose cause is raised already
            self.flush()
        self._lines.close()
