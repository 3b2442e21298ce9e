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

ReadCosts: TypeAlias = Callable[[], dict[str, Any]]
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
      path: The file. With `step` 0 an existing one is from another run and is moved
        aside, to ``<stem>.previous.jsonl``.
      step: The last committed step; later lines are dropped.
    """

    def __init__(self, path: Path, step: int, *, first_step: int = 1) -> None:
        self.last_step = first_step - 1
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
        with translated("log", Path(self._file.name)):
            self._file.write(line + "\n")
        self.last_step = step

    def close(self) -> None:
        with translated("log", Path(self._file.name)):
            self._file.close()


class MetricsLog:
    """Writes `metrics.jsonl` from the last committed step on, as lines complete."""

    def __init__(self, log_dir: Path, step: int) -> None:
        self._pending: tuple[StepLine, ReadCosts] | None = None
        log_dir.mkdir(parents=True, exist_ok=True)
        self._pending_path = log_dir / "metrics.last.json"
        path = log_dir / "metrics.jsonl"
        is_continued = path.exists()
        self._lines = JsonLines(path, step)
        if is_continued:  # lacks the last lines of a killed run
            pending = StepLine(0)
            with contextlib.suppress(OSError, ValueError, TypeError):
                pending = StepLine(**json.loads(self._pending_path.read_text()))
            for number in range(self._lines.last_step + 1, step + 1):
                self.write(pending if pending.step == number else StepLine(number))
        self._pending_path.unlink(missing_ok=True)

    def add(self, line: StepLine, read_costs: ReadCosts) -> None:
        """Takes a step with its results; its commit may still be in flight."""
        self.flush()
        self._pending = line, read_costs
        self._pending_path.write_text(line.to_json())

    def flush(self) -> None:
        """Writes the pending line, once its step is durable."""
        if self._pending is not None:
            (line, read_costs), self._pending = self._pending, None
            self.write(line.with_costs(read_costs()))
        self._pending_path.unlink(missing_ok=True)

    def write(self, line: StepLine) -> None:
        self._lines.write(line.step, line.to_json())

    def close(self) -> None:
        """Closes the file; writes a pending line, if its step is durable."""
        with contextlib.suppress(Exception):  # whose cause is raised already
            self.flush()
        self._lines.close()
