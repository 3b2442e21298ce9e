"""Reads a run's log directory, however long, damaged or unfinished the logs are.

Invariant: memory is bounded; what cannot be read is left out, and a note says so.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np

from jaxinf.command_line import UsageError
from jaxinf.terminal import format_bytes
from jaxinf.typing import Array

MOST_POINTS = 2000
_MOST_READ = 16
_MOST_COLUMNS = 64
_LINE_BYTES = 1 << 20
_DOCUMENT_BYTES = 1 << 20
_TRACE_BYTES = 64 << 20
_TEXT_LENGTH = 500
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
    `config.json`, with the versions of packages; counters of `trace.json` have times in
    ms. Notes say what could not be read, and what was left out.
    """

    columns: Columns
    num_steps: int
    per_point: int
    validation: Columns
    settings: Mapping[str, str]
    spans: Sequence["Span"]
    counters: Mapping[str, Sequence[tuple[float, Mapping[str, float]]]]
    notes: Sequence[str]


class Span(NamedTuple):
    """What a thread, a drive or a device did for some time."""

    track: str
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
    if {"tokens", "step_s"} <= columns.keys():
        with np.errstate(divide="ignore", invalid="ignore"):
            columns["rate"] = columns["tokens"] / columns["step_s"]
    if not num_steps:
        raise UsageError(f"{metrics}: expected a line for each step, found no step yet")
    if per_point > 1:
        read = -(-per_point // max(1, per_point // _MOST_READ))
        notes.append(f"a point: mean of {read} of {per_point} steps, of {num_steps:,}")
    if (path / "metrics.last.json").exists():
        notes.append("the run had not ended when this was written: it goes on, or died")
    validation, held_out = {}, path / "validation.jsonl"
    if held_out.is_file():
        validation, *_ = _table(held_out, notes)
    settings = _document(path / "config.json", notes, _DOCUMENT_BYTES)
    versions = settings.pop("versions", {})
    for package, version in versions.items() if isinstance(versions, dict) else ():
        settings[f"version of {package}"] = version
    spans, counters = _trace(_document(path / "trace.json", notes, _TRACE_BYTES))
    texts = {_text(k): _text(v) for k, v in [*settings.items()][:300]}
    return Logs(
        columns, num_steps, per_point, validation, texts, spans, counters, notes
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
    sums: dict[str, list[float]] = {}
    counts: dict[str, list[int]] = {}
    num_rows = num_bad = 0
    with path.open("rb") as file:
        while line := file.readline(_LINE_BYTES):
            if not line.endswith(b"\n") and len(line) < _LINE_BYTES:
                notes.append(f"{path.name}: the last line is cut off")
                break
            if num_rows == num_lines:  # a run has written it since they were counted
                break
            if num_rows % stride:
                num_rows += 1
                continue
            values = _values(line)
            if values is None:
                num_bad += 1
                continue
            point, num_rows = num_rows // per_point, num_rows + 1
            for name, value in values.items():
                if name not in sums:
                    if len(sums) == _MOST_COLUMNS:
                        continue
                    sums[name], counts[name] = [0.0] * num_points, [0] * num_points
                sums[name][point] += value
                counts[name][point] += 1
    if num_bad:
        notes.append(f"{path.name}: {num_bad} lines are no steps, and left out")
    used = -(-num_rows // per_point)
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN
        means = {k: np.divide(sums[k], counts[k])[:used] for k in sums}
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
        inner = document.get(group)
        for name, value in inner.items() if isinstance(inner, dict) else ():
            found[f"{group}.{name[:80]}"] = value
    return {name: value for name, value in found.items() if _is_number(value)}


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and -1e300 < value < 1e300


def _is_amount(value: Any) -> TypeGuard[float]:
    return _is_number(value) and 0 <= value < 1e15


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
    return text if len(text) <= _TEXT_LENGTH else text[: _TEXT_LENGTH - 1] + "…"


def _trace(document: Mapping[str, Any]) -> tuple[list[Span], dict[str, Any]]:
    """Returns the spans and counters of a trace; what has another form is left out."""
    found = document.get("traceEvents")
    events = found if isinstance(found, list) else []
    names: dict[str, str] = {}
    spans: list[Span] = []
    counters: defaultdict[str, list[Any]] = defaultdict(list)
    for event in sorted(filter(_is_event, events), key=lambda e: e["ph"] != "M"):
        pid, tid, args = event.get("pid"), event.get("tid"), event["args"]
        name = str(event.get("name", ""))[:200]
        if event["ph"] == "M":
            owner = pid if name == "process_name" else f"{pid} {tid}"
            names[f"{name} {owner}"] = str(args.get("name", ""))[:80]
        elif not _is_amount(event.get("ts")):
            continue
        elif event["ph"] == "C":
            values = {str(k)[:40]: v for k, v in args.items() if _is_amount(v)}
            counters[name[:80]].append((event["ts"] / 1e3, values))
        elif _is_amount(event.get("dur")):
            process = names.get(f"process_name {pid}", str(pid)[:20])
            thread = names.get(f"thread_name {pid} {tid}", str(tid)[:20])
            phase, moved = str(event.get("cat", "step"))[:20], args.get("bytes")
            times = event["ts"] / 1e3, event["dur"] / 1e3
            num_bytes = moved if _is_amount(moved) else 0
            spans.append(Span(f"{process}: {thread}", name, phase, *times, num_bytes))
    return spans, dict(counters)


def _is_event(event: Any) -> bool:
    if not isinstance(event, dict) or event.get("ph") not in ("M", "C", "X"):
        return False
    return isinstance(event.setdefault("args", {}), dict)


def phase_rows(logs: Logs) -> list[list[str]]:
    """Returns what traced steps move and hold in forward, in backward, and after them.

    Backward begins with its first program; what runs forward again is a part of it. A
    span's bytes are shared among phases by its time in each. Without phases: no rows.
    """
    backward = [s for s in logs.spans if s.name.startswith("program backward")]
    windows: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    steps = [span for span in logs.spans if span.phase == "step"]
    for step in steps[:_MOST_STEPS]:
        own = [s for s in backward if s.within(step.began_ms, step.ended_ms)]
        if own:
            turn_ms = min(s.began_ms for s in own)
            last_ms = min(step.ended_ms, max(s.ended_ms for s in own))
            windows["forward"].append((step.began_ms, turn_ms))
            windows["backward"].append((turn_ms, last_ms))
            windows["after them"].append((last_ms, step.ended_ms))
    memory = logs.counters.get("memory", ())
    samples = [(at_ms, v["process"]) for at_ms, v in memory if "process" in v]
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
            elif inside_ms and (span.phase == "copy" or span.track[:6] == "drives"):
                moved[span.phase] += span.num_bytes * inside_ms / span.took_ms
        rates = (moved[kind] * 1e3 / whole_ms for kind in ("read", "write", "copy"))
        held = [m for at, m in samples if any(b <= at < e for b, e in parts)]
        shown = (min(held), sum(held) / len(held), max(held)) if held else ()
        mean_s, busy = whole_ms / 1e3 / len(parts), busy_ms / whole_ms
        row = [phase, f"{mean_s:.3g} s", f"{busy:.0%}"]
        row += [f"{format_bytes(round(rate))}/s" for rate in rates]
        rows.append([*row, " / ".join(format_bytes(round(one)) for one in shown)])
    return rows
