"""`metrics.jsonl`: what every step cost, one JSON line a step.

Invariant: each step up to the last committed one has exactly one line, however the run
was interrupted; a line is written once and never changed.

A step's commit runs on while the next step computes, so its line is complete, and
written, one step later. Until then it waits in `metrics.last.json`, so that a killed
run loses nothing.
"""

import contextlib
import dataclasses
import json
import math
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["JsonLines", "MetricsLog", "StepLine", "peak_rss_bytes", "rss_bytes"]


@dataclasses.dataclass(frozen=True)
class StepLine:
    """One line.

    Attributes:
      step: batches trained on, this one included.
      loss: mean cross entropy of the batch in nats a token that is learned, or a
        label, before the update; null where it is not finite.
      tokens: in this step's batch, padding included; its images, where it has none.
      step_s: the whole step, from the batch's being ready to the new params' being so.
      update_s: from the first gradient's arrival at the store to the last result;
        null in mode memory and for a skipped step.
      drive_read_bytes: read from drives since the step before, and so on; 0 in mode
        memory. The traffic of a skipped step is counted with the next commit.
      drive_write_bytes: written to drives.
      link_down_bytes: over the host link toward the CSDs: gradients.
      link_up_bytes: over the host link from the CSDs: updates or new params.
      rss_bytes: resident memory of the process after the step.

    All but `step` are null in the line of a step that was committed by a process which
    was killed before it could write what it had cost.
    """

    step: int
    loss: float | None = None
    tokens: int | None = None
    step_s: float | None = None
    update_s: float | None = None
    drive_read_bytes: int | None = None
    drive_write_bytes: int | None = None
    link_down_bytes: int | None = None
    link_up_bytes: int | None = None
    rss_bytes: int | None = None

    def to_json(self) -> str:
        """The line, without its newline; JSON has no NaN."""
        fields = dataclasses.asdict(self)
        if self.loss is not None and not math.isfinite(self.loss):
            fields["loss"] = None
        return json.dumps(fields)


class JsonLines:
    """A file of JSON lines with a rising ``step``, to be continued at a step.

    Args:
      path: the file. With `step` 0 an existing one is from another run and is moved
        aside, to ``<stem>.previous.jsonl``.
      step: lines after it are of steps that were never committed: dropped.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.last_step = 0
        kept: list[str] = []
        if step == 0 and path.exists():
            path.replace(path.with_suffix(".previous.jsonl"))
        elif path.exists():
            for line, number in _readable_lines(path):
                if self.last_step < number <= step:
                    kept.append(line)
                    self.last_step = number
        temporary = path.with_name(path.name + ".new")
        temporary.write_text("".join(kept))
        temporary.replace(path)
        self._file = path.open("a", buffering=1)

    def write(self, step: int, line: str) -> None:
        """Appends a step's line and flushes it."""
        self._file.write(line + "\n")
        self.last_step = step

    def close(self) -> None:
        """Closes the file; idempotent."""
        self._file.close()


class MetricsLog:
    """Writes `metrics.jsonl`, each line once it is complete.

    Args:
      log_dir: made if it is not there.
      step: the last committed step; the file is continued after it.
    """

    def __init__(self, log_dir: Path, step: int) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._last = log_dir / "metrics.last.json"
        path = log_dir / "metrics.jsonl"
        is_continued = path.exists()
        self._lines = JsonLines(path, step)
        if is_continued:
            self._fill(step)
        self._last.unlink(missing_ok=True)

    def _fill(self, step: int) -> None:
        """Writes the lines that a killed run could not."""
        waiting = _waiting_line(self._last)
        for number in range(self._lines.last_step + 1, step + 1):
            is_waiting = waiting is not None and waiting.step == number
            self.write(waiting if waiting and is_waiting else StepLine(number))

    def hold(self, line: StepLine) -> None:
        """Keeps the line of a step that is still being committed."""
        self._last.write_text(line.to_json())

    def write(self, line: StepLine) -> None:
        """Appends a complete line."""
        self._lines.write(line.step, line.to_json())

    def settle(self) -> None:
        """No line is held any more: all are written."""
        self._last.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the file; a line that is still held waits for the run's resumption."""
        self._lines.close()


def rss_bytes() -> int:
    """Resident memory of this process now."""
    return _now_bytes() or peak_rss_bytes()


def peak_rss_bytes() -> int:
    """The most resident memory that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return max(peak, _now_bytes())  # the kernel brings its peak up to date now and then


def _now_bytes() -> int:
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def _readable_lines(path: Path) -> Iterator[tuple[str, int]]:
    """Lines and their steps; a line cut off by a kill is left out."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                yield line.rstrip() + "\n", int(json.loads(line)["step"])


def _waiting_line(path: Path) -> StepLine | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return StepLine(**json.loads(path.read_text()))
    return None
