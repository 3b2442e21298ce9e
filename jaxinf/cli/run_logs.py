"""Reads a run's log directory, however long, damaged or unfinished the logs are.

Invariant: memory is bounded; what cannot be read is left out, and a note says so.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np

from jaxinf.command_line import UsageError
from jaxinf.terminal import format_bytes
from jaxinf.typing import Array

MOST_POINTS = 2000
_MOST_READ = 16  # lines for a point, up to twice as many
_MOST_COLUMNS = 64
_LINE_BYTES = 1 << 20
_DOCUMENT_BYTES = 1 << 20
_TRACE_BYTES = 64 << 20
_MOST_CHARS = 500
_MOST_SETTINGS = 300
_MOST_STEPS = 10

_FIELDS = ("step", "loss", "tokens", "step_s", "rss_bytes", "drive_read_bytes")
_FIELDS += ("drive_write_bytes", "link_down_bytes", "link_up_bytes")
_GROUPS = ("phases", "memory")

Columns: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True)
class Logs:
    """What a log directory says.

    Columns are of float64, NaN where no value is known: a field of `metrics.jsonl` or
    `validation.jsonl`, of a group as ``phases.read``, and ``rate``, tokens a second. A
    point is the mean of `per_point` steps, or of some of them. Settings are those of
    `config.json`, with the versions of packages; memory of `trace.json` is the
    process's, in bytes by ms. Notes say what could not be read, and what was left out.
    """

    columns: Columns
    num_steps: int
    per_point: int
    validation: Columns
    settings: Mapping[str, str]
    spans: Sequence["Span"]
    memory: Sequence[tuple[float, float]]
    notes: Sequence[str]


class Span(NamedTuple):
    """What a thread, a drive or a device did for some time; `process` is its group."""

    process: str
    name: str
    phase: str
    began_ms: float
    took_ms: float
    num_bytes: float

    @property
    def ended_ms(self) -> float:
        return self.began_ms + self.took_ms

    def within(self, began_ms: float, ended_ms: float) -> float:
        """Returns for how long it is in a window."""
        return max(0.0, min(self.ended_ms, ended_ms) - max(self.began_ms, began_ms))


def read_logs(path: Path) -> Logs:
    metrics = path / "metrics.jsonl"
    if not metrics.is_file():
        raise UsageError(
            f"{path}: expected a log directory of a run, found no metrics.jsonl there; "
            "it is STORE-log by default, and the trainer's first lines name it"
        )
    notes: list[str] = []
    columns, num_steps, per_point = _table(metrics, notes)
    if not num_steps:
        raise UsageError(f"{metrics}: expected a line for each step, found no step yet")
    if {"tokens", "step_s"} <= columns.keys():
        with np.errstate(divide="ignore", invalid="ignore"):
            columns["rate"] = columns["tokens"] / columns["step_s"]
    if per_point > 1:
        read = -(-per_point // max(1, per_point // _MOST_READ))
        notes.append(f"a point: mean of {read} of {per_point} steps, of {num_steps:,}")
    if (path / "metrics.last.json").exists():
        notes.append("the run had not ended when this was written: it goes on, or died")
    held_out = path / "validation.jsonl"
    validation = _table(held_out, notes)[0] if held_out.is_file() else {}
    settings = _document(path / "config.json", notes, _DOCUMENT_BYTES)
    if isinstance(versions := settings.pop("versions", {}), dict):
        settings |= {f"version of {name}": one for name, one in versions.items()}
    trace = _document(path / "trace.json", notes, _TRACE_BYTES)
    return Logs(
        *(columns, num_steps, per_point, validation),
        {_text(k): _text(v) for k, v in [*settings.items()][:_MOST_SETTINGS]},
        *_trace(trace),
        notes,
    )


# --- lines ---------------------------------------------------------------------------


def _table(path: Path, notes: list[str]) -> tuple[dict[str, Array], int, int]:
    """Returns columns of means, the number of lines, and how many a mean has."""
    with path.open("rb") as file:
        blocks = iter(lambda: file.read(1 << 20), b"")
        num_lines = sum(block.count(b"\n") for block in blocks)
    per_point = max(1, -(-num_lines // MOST_POINTS))
    num_points = -(-num_lines // per_point)
    stride = max(1, per_point // _MOST_READ)
    sums: dict[str, Array] = {}  # of each point: sum, count
    num_rows = num_bad = 0
    with path.open("rb") as file:
        while line := file.readline(_LINE_BYTES):
            if not line.endswith(b"\n") and len(line) < _LINE_BYTES:
                notes.append(f"{path.name}: the last line is cut off")
                break
            if num_rows == num_lines:  # a run has written it since they were counted
                break
            values = {} if num_rows % stride else _values(line)
            if values is None:
                num_bad += 1
                continue
            for name, value in values.items():
                if name in sums or len(sums) < _MOST_COLUMNS:
                    added = sums.setdefault(name, np.zeros((2, num_points)))
                    added[:, num_rows // per_point] += value, 1
            num_rows += 1
    if num_bad:
        notes.append(f"{path.name}: {num_bad} lines are no steps, and left out")
    used = -(-num_rows // per_point)
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN
        means = {name: (sum_ / num)[:used] for name, (sum_, num) in sums.items()}
    return means, num_rows, per_point


def _values(line: bytes) -> dict[str, float] | None:
    """Returns the numbers of a line by name; None if it is no step."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not _is_number(document.get("step")):
        return None
    found = {name: document.get(name) for name in _FIELDS}
    for group in _GROUPS:
        if isinstance(inner := document.get(group), dict):
            found |= {f"{group}.{name[:80]}": value for name, value in inner.items()}
    return {name: value for name, value in found.items() if _is_number(value)}


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and -1e300 < value < 1e300


# --- documents -----------------------------------------------------------------------


def _document(path: Path, notes: list[str], most_bytes: int) -> dict[str, Any]:
    """Reads an object of JSON; an empty one, with a note, if it cannot be used."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > most_bytes:
            raise ValueError(f"it is longer than {most_bytes >> 20} MiB")
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("expected an object")
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} is left out: {_text(str(error))}")
        return {}
    return found


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_CHARS else text[: _MOST_CHARS - 1] + "…"


def _trace(
    document: Mapping[str, Any],
) -> tuple[list[Span], list[tuple[float, float]]]:
    """Returns the spans and the memory of a trace, but what has another form."""
    found = document.get("traceEvents")
    groups: dict[str, str] = {}
    spans, memory = list[Span](), list[tuple[float, float]]()
    for event in found if isinstance(found, list) else ():
        args = event.get("args", {}) if isinstance(event, dict) else None
        if not isinstance(args, dict):
            continue
        kind, name = event.get("ph"), str(event.get("name", ""))
        group = str(event.get("pid"))
        if (kind, name) == ("M", "process_name"):  # comes before its spans
            groups[group] = str(args.get("name", ""))
        elif not _is_amount(at_us := event.get("ts")):
            continue
        elif kind == "X" and _is_amount(took_us := event.get("dur")):
            phase, moved = str(event.get("cat", "step")), args.get("bytes")
            num_bytes = moved if _is_amount(moved) else 0
            times = at_us / 1e3, took_us / 1e3
            spans.append(Span(groups.get(group, ""), name, phase, *times, num_bytes))
        elif (kind, name) == ("C", "memory") and _is_amount(args.get("process")):
            memory.append((at_us / 1e3, args["process"]))
    return spans, memory


def _is_amount(value: Any) -> TypeGuard[float]:
    return _is_number(value) and 0 <= value < 1e15


def _windows(spans: Sequence[Span]) -> Iterator[tuple[str, float, float]]:
    """Yields the phases of traced steps: when they began and ended.

    Backward begins with its first program; what runs forward again is a part of it.
    """
    backward = [span for span in spans if span.name.startswith("program backward")]
    for step in [span for span in spans if span.phase == "step"][:_MOST_STEPS]:
        own = [s for s in backward if s.within(step.began_ms, step.ended_ms)]
        if own:
            turn_ms = min(s.began_ms for s in own)
            last_ms = min(step.ended_ms, max(s.ended_ms for s in own))
            yield "forward", step.began_ms, turn_ms
            yield "backward", turn_ms, last_ms
            yield "after them", last_ms, step.ended_ms


def phase_rows(logs: Logs) -> list[list[str]]:
    """Returns what traced steps move and hold in forward, in backward, and after them.

    A span's bytes are shared among phases by its time in each. Without phases: no rows.
    """
    windows: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for phase, *window in _windows(logs.spans):
        windows[phase].append((window[0], window[1]))
    rows = []
    for phase, parts in windows.items():
        whole_ms = sum(end - begin for begin, end in parts)
        if whole_ms <= 0:
            continue
        busy_ms = 0.0
        moved: defaultdict[str, float] = defaultdict(float)
        for span in logs.spans:
            inside_ms = sum(span.within(*part) for part in parts)
            if span.phase == "program":
                busy_ms += inside_ms
            elif inside_ms and (span.phase == "copy" or span.process == "drives"):
                moved[span.phase] += span.num_bytes * inside_ms / span.took_ms
        rates = (moved[kind] * 1e3 / whole_ms for kind in ("read", "write", "copy"))
        held = [m for at, m in logs.memory if any(b <= at < e for b, e in parts)]
        shown = (min(held), sum(held) / len(held), max(held)) if held else ()
        mean_s, busy = whole_ms / 1e3 / len(parts), busy_ms / whole_ms
        row = [phase, f"{mean_s:.3g} s", f"{busy:.0%}"]
        row += [f"{format_bytes(round(rate))}/s" for rate in rates]
        rows.append([*row, " / ".join(format_bytes(round(one)) for one in shown)])
    return rows
