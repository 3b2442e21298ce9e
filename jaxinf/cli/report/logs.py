"""Reads a run's log directory, however long, damaged or unfinished the logs are.

Invariant: memory is bounded; what cannot be read is left out, and a note says so.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from jaxinf.command_line import UsageError
from jaxinf.errors import StoreError
from jaxinf.io import check_regular, read_bounded
from jaxinf.io.failures import translated
from jaxinf.typing import Array

__all__ = ["MOST_POINTS", "Logs", "read_logs"]

MOST_POINTS = 2000
"""Points of a run that are drawn; more steps are averaged."""

_LINE_BYTES = 1 << 20
_DOCUMENT_BYTES = 1 << 20
_TRACE_BYTES = 64 << 20
_MOST_COLUMNS = 64
_TEXT_LENGTH = 500

_FIELDS = (
    *("loss", "tokens", "step_s", "update_s", "commit_s", "drive_read_bytes"),
    *(
        "drive_write_bytes",
        "link_down_bytes",
        "link_up_bytes",
        "learning_rate",
        "gradient_norm",
    ),
    "rss_bytes",
)
_GROUPS = ("phases", "drives", "memory")

Columns: TypeAlias = Mapping[str, Array]
"""Values by field, float64, NaN where a line has none; of groups as ``phases.read``."""


@dataclass(frozen=True)
class Logs:
    """What a log directory says.

    Attributes:
      path: the directory.
      steps: columns of `metrics.jsonl`, thinned to about `MOST_POINTS`.
      num_steps: number of its steps.
      per_point: number of steps that a point is the mean of.
      validation: columns of `validation.jsonl`.
      settings: `config.json` without versions, as text by name.
      versions: versions by package.
      plan: `plan.json`; empty if there is none.
      trace: events of `trace.json`; empty if there is none.
      notes: what could not be read, and what was left out, for the reader.
    """

    path: Path
    steps: Columns
    num_steps: int
    per_point: int
    validation: Columns = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    trace: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()

    def median(self, name: str) -> float | None:
        """Returns the median of a column, None if it has no value."""
        column = self.steps.get(name)
        known = [] if column is None else column[np.isfinite(column)]
        return float(np.median(known)) if len(known) else None

    def most(self, name: str) -> float | None:
        """Returns the greatest value of a column, None if it has no value."""
        column = self.steps.get(name)
        known = [] if column is None else column[np.isfinite(column)]
        return float(np.max(known)) if len(known) else None


def read_logs(path: Path) -> Logs:
    """Reads a log directory; blocks.

    Raises:
      UsageError: it has no `metrics.jsonl`, or that has no step.
      StoreIOError: a file cannot be read.
    """
    metrics = path / "metrics.jsonl"
    if not metrics.exists():
        raise UsageError(
            f"{path}: expected a log directory of a run, found no metrics.jsonl there; "
            "it is STORE-log by default, and the trainer's first lines name it"
        )
    notes: list[str] = []
    table = _Table(metrics, notes)
    columns = table.columns()
    if not table.num_rows:
        raise UsageError(f"{metrics}: expected a line for each step, found no step yet")
    if table.per_point > 1:
        notes.append(
            f"{table.num_rows:,} steps are thinned: each point is the mean of "
            f"{table.per_point} of them"
        )
    if (path / "metrics.last.json").exists():
        notes.append("the run had not ended when this was written: it goes on, or died")
    validation: Columns = {}
    if (path / "validation.jsonl").exists():
        validation = _Table(path / "validation.jsonl", notes).columns()
    config = _document(path / "config.json", notes)
    versions = config.pop("versions", {})
    versions = _texts(versions if isinstance(versions, dict) else {})
    _note_newer(versions.get("jaxinf", ""), notes)
    plan = _document(path / "plan.json", notes, version=1)
    trace = _document(path / "trace.json", notes, most_bytes=_TRACE_BYTES)
    events = trace.get("traceEvents", ())
    return Logs(
        path,
        columns,
        table.num_rows,
        table.per_point,
        validation,
        _texts(config),
        versions,
        plan,
        [one for one in events if isinstance(one, dict)]
        if isinstance(events, list)
        else (),
        notes,
    )


# --- lines ---------------------------------------------------------------------------


class _Table:
    """Numbers of a file of JSON lines, averaged whenever there are too many."""

    def __init__(self, path: Path, notes: list[str]) -> None:
        self._names: dict[str, int] = {"step": 0}
        self._rows: list[Array] = []
        self._open: list[Mapping[str, float]] = []
        self.num_rows, self.per_point = 0, 1
        num_bad = 0
        for line in _lines(path, notes):
            values = _values(line)
            if values is None:
                num_bad += 1
                continue
            self.num_rows += 1
            self._add(values)
        if num_bad:
            notes.append(f"{path.name}: {num_bad} lines are no steps, and left out")

    def _add(self, values: Mapping[str, float]) -> None:
        for name in values:
            if name not in self._names and len(self._names) < _MOST_COLUMNS:
                self._names[name] = len(self._names)
        self._open.append(values)
        if len(self._open) < self.per_point:
            return
        self._close_point()
        if len(self._rows) >= 2 * MOST_POINTS:
            pairs = zip(self._rows[::2], self._rows[1::2], strict=True)
            self._rows = [_mean([self._wide(a), self._wide(b)]) for a, b in pairs]
            self.per_point *= 2

    def _close_point(self) -> None:
        rows = np.full((len(self._open), len(self._names)), np.nan)
        for row, values in zip(rows, self._open, strict=True):
            for name, value in values.items():
                if name in self._names:
                    row[self._names[name]] = value
        self._open = []
        self._rows.append(_mean(rows))

    def _wide(self, row: Array) -> Array:
        """Returns a row with a place for each column that has come since."""
        missing = len(self._names) - len(row)
        return np.pad(row, (0, missing), constant_values=np.nan)

    def columns(self) -> Columns:
        """Returns the columns that have a value."""
        if self._open:
            self._close_point()
        table = np.array([self._wide(row) for row in self._rows])
        if not len(table):
            return {}
        found = {name: table[:, number] for name, number in self._names.items()}
        return {name: col for name, col in found.items() if np.isfinite(col).any()}


def _mean(rows: Any) -> Array:
    """Returns the means of columns, of the values that are known."""
    rows = np.asarray(rows)
    known = np.isfinite(rows)
    sums, counts = np.where(known, rows, 0.0).sum(0), known.sum(0)
    return np.where(counts, sums / np.maximum(counts, 1), np.nan)


def _lines(path: Path, notes: list[str]) -> Iterator[bytes]:
    """Yields whole lines; the last one may be cut off, of a run that still writes."""
    with translated("read", path):
        check_regular(path, path.stat())
        with path.open("rb") as file:
            while line := file.readline(_LINE_BYTES):
                if not line.endswith(b"\n"):
                    while len(line) == _LINE_BYTES and not line.endswith(b"\n"):
                        line = file.readline(_LINE_BYTES)
                    if not line.endswith(b"\n"):
                        notes.append(f"{path.name}: the last line is cut off")
                        return
                    line = b""
                yield line


def _values(line: bytes) -> dict[str, float] | None:
    """Returns the numbers of a line by name; None if it is no step."""
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(line)
        if not isinstance(document, dict) or _number(document.get("step")) is None:
            return None
        found = {name: document.get(name) for name in ("step", *_FIELDS, "perplexity")}
        for group in _GROUPS:
            inner = document.get(group)
            for name, value in inner.items() if isinstance(inner, dict) else ():
                found[f"{group}.{name[:_TEXT_LENGTH]}"] = value
        numbers = {name: _number(value) for name, value in found.items()}
        return {name: value for name, value in numbers.items() if value is not None}
    return None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with contextlib.suppress(OverflowError):
        number = float(value)
        return number if math.isfinite(number) else None
    return None


# --- documents -----------------------------------------------------------------------


def _document(
    path: Path,
    notes: list[str],
    *,
    most_bytes: int = _DOCUMENT_BYTES,
    version: int | None = None,
) -> dict[str, Any]:
    """Reads an object of JSON; an empty one, with a note, if it cannot be used."""
    if not path.exists():
        return {}
    try:
        found = json.loads(read_bounded(path, most_bytes))
    except (StoreError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} is left out: {_short(str(error))}")
        return {}
    if not isinstance(found, dict):
        notes.append(f"{path.name} is left out: expected an object")
        return {}
    if version is not None and found.get("version") != version:
        notes.append(
            f"{path.name} is left out: expected version {version}, found "
            f"{_short(str(found.get('version')))}; a newer jaxinf may have written it"
        )
        return {}
    return found


def _note_newer(version: str, notes: list[str]) -> None:
    ours = metadata.version("jaxinf")
    if version and _order(version) > _order(ours):
        notes.append(
            f"jaxinf {version} wrote the logs, and this is {ours}: what only that one "
            "knows is left out"
        )


def _order(version: str) -> list[int]:
    return [int(part) if part.isdecimal() else 0 for part in version.split(".")[:4]]


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns settings as short texts; the first few hundred."""
    shown = list(settings.items())[:300]
    return {_short(name): _short(_text(value)) for name, value in shown}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _short(text: str) -> str:
    return text if len(text) <= _TEXT_LENGTH else text[: _TEXT_LENGTH - 1] + "…"
