"""Reads a run's log directory, however long, damaged or unfinished the logs are.

Invariant: memory is bounded; what cannot be read is left out, and a note says so.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np

from jaxinf.command_line import UsageError
from jaxinf.documents import decode
from jaxinf.errors import StoreIOError
from jaxinf.transfer import read_bounded
from jaxinf.typing import Array

MAX_POINTS = 2000
_MAX_COLUMNS = 64
_LINE_BYTES = 1 << 20
_DOCUMENT_BYTES = 1 << 20
_MAX_CHARS = 500  # of a setting

_FIELDS = ("step", "loss", "tokens", "step_s", "rss_bytes", "drive_read_bytes")
_FIELDS += ("drive_write_bytes", "link_down_bytes", "link_up_bytes", "accuracy")
_GROUPS = ("phases", "memory")

Columns: TypeAlias = dict[str, Array]
"""Values by name, float64, NaN where none is known: a field of ``metrics.jsonl``, of a
group as ``phases.read``, and ``rate``, tokens a second."""


class Logs(NamedTuple):
    """The content of a log directory; notes name the parts that are left out."""

    columns: Columns
    num_steps: int
    validation: Columns
    settings: Mapping[str, str]
    notes: Sequence[str]


def read_logs(path: Path) -> Logs:
    metrics = path / "metrics.jsonl"
    if not metrics.is_file():
        raise UsageError(
            f"{path}: expected a log directory of a run, found no metrics.jsonl there; "
            "only `jaxinf train` writes one, by default to STORE-log"
        )
    notes: list[str] = []
    columns, num_steps = _table(metrics, notes)
    if not columns:
        raise UsageError(f"{metrics}: expected a line for each step, found no step yet")
    if {"tokens", "step_s"} <= columns.keys():
        with np.errstate(divide="ignore", invalid="ignore"):
            columns["rate"] = columns["tokens"] / columns["step_s"]
    if (path / "metrics.last.json").exists():
        notes.append("the run had not ended when this was written: it goes on, or died")
    validation_log = path / "validation.jsonl"
    validation = _table(validation_log, notes)[0] if validation_log.is_file() else {}
    settings = _document(path / "config.json", notes)
    if isinstance(versions := settings.pop("versions", {}), dict):
        settings |= {f"version of {name}": text for name, text in versions.items()}
    settings = {
        name: (value if isinstance(value, str) else json.dumps(value))[:_MAX_CHARS]
        for name, value in settings.items()
        if value not in (None, [])  # a default, or none
    }
    return Logs(columns, num_steps, validation, settings, notes)


def _table(path: Path, notes: list[str]) -> tuple[Columns, int]:
    """Returns columns of the last line and of others at equal distances.

    Also returns the number of all lines.
    """
    rows, number, num_bad = list[Any](), 0, 0
    with path.open("rb") as file:
        blocks = iter(lambda: file.read(1 << 20), b"")
        num_lines = sum(block.count(b"\n") for block in blocks)
        every = -(-num_lines // MAX_POINTS)
        file.seek(0)
        while (line := file.readline(_LINE_BYTES)) and number < num_lines:
            number += line.endswith(b"\n")
            if (num_lines - number) % every == 0:
                values = _values(line)
                rows += [values] if values else []
                num_bad += not values
    if line and not line.endswith(b"\n"):
        notes.append(f"{path.name}: the last line is cut off")
    if num_bad:
        notes.append(f"{path.name}: {num_bad} lines are no steps, and left out")
    if every > 1:
        notes.append(f"{path.name}: one of {every} lines is shown, of {num_lines:,}")
    names = [*dict.fromkeys(chain.from_iterable(rows))][:_MAX_COLUMNS]
    return {n: np.array([row.get(n, np.nan) for row in rows]) for n in names}, num_lines


def _values(line: bytes) -> dict[str, float] | None:
    """Returns the numbers of a line by name; None if it is no step."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not _is_number(document.get("step")):
        return None
    fields = {name: document.get(name) for name in _FIELDS}
    for group in _GROUPS:
        if isinstance(inner := document.get(group), dict):
            fields |= {f"{group}.{name[:80]}": value for name, value in inner.items()}
    numbers = [(name, value) for name, value in fields.items() if _is_number(value)]
    return dict(numbers[:_MAX_COLUMNS])


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and -1e300 < value < 1e300


def _document(path: Path, notes: list[str]) -> dict[str, Any]:
    """Reads an object of JSON; an empty one, with a note, if it cannot be used."""
    if not path.is_file():
        return {}
    try:
        return decode(read_bounded(path, _DOCUMENT_BYTES), dict[str, Any])
    except (StoreIOError, ValueError) as error:
        notes.append(f"{path.name} is left out: {error}")
        return {}
