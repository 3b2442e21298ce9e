"""The page of a report: HTML that says everything but the figures without a script.

Invariant: the page loads nothing from anywhere, and runs no script but plotly's, by
their digests; a text of a log cannot become one.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jaxinf.cli.report.figures import FigureOf, all_figures, numbers_of
from jaxinf.cli.report.logs import Logs, read_logs
from jaxinf.cli.report.phases import phase_rows
from jaxinf.command_line import UsageError
from jaxinf.errors import JaxinfError
from jaxinf.io import write_bytes_atomically
from jaxinf.terminal import format_bytes

__all__ = ["write_report"]

_MOST_RUNS = 16
_SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL)

_STYLE = """
:root { color-scheme: light dark; --ink: #1d1f23; --ground: #ffffff; --line: #8884; }
@media (prefers-color-scheme: dark) { :root { --ink: #e2e4e8; --ground: #060708; } }
body { color: var(--ink); background: var(--ground); margin: 0 auto; max-width: 44rem;
  padding: 0 1rem 3rem; font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .2rem; }
h1, h2, td, th, li { overflow-wrap: anywhere; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1rem; padding: 0;
  list-style: none; }
a { color: inherit; }
p { margin: .2rem 0 .6rem; }
div.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
td, th { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0;
  text-align: left; vertical-align: top; min-width: 5rem; }
section { break-inside: avoid; }
summary { cursor: pointer; }
:focus-visible { outline: 3px solid #3b8ee0; outline-offset: 2px; }
@media print { :root { --ink: #000000; --ground: #ffffff; }
  nav, details { display: none; } .modebar { display: none !important; }
  div.table { overflow: visible; } }
"""


def write_report(folders: Sequence[Path], output: Path) -> None:
    """Writes the page; blocks.

    Args:
      folders: log directories, at most 16.
      output: the page, which is replaced.

    Raises:
      UsageError: no such logs, too many, or the extra `report` is not installed.
      StoreError: a file cannot be read or written.
    """
    if len(folders) > _MOST_RUNS:
        raise UsageError(
            f"report: expected at most {_MOST_RUNS} log directories, got "
            f"{len(folders)}; make a report of some of them"
        )
    plotly_io, plotly_js = _plotly()
    runs = _named([read_logs(folder) for folder in folders])
    figures = list(all_figures(runs))
    bodies = [
        plotly_io.to_html(
            shown.figure,
            full_html=False,
            include_plotlyjs=False,
            validate=False,
            div_id=f"figure-{number}",
            default_height=f"{shown.figure['layout']['height']}px",
            config={"responsive": True, "displaylogo": False},
        )
        for number, shown in enumerate(figures)
    ]
    page = _page(runs, figures, bodies, plotly_js)
    write_bytes_atomically(output, page.encode("utf-8", errors="replace"))


def _plotly() -> tuple[Any, str]:
    """Returns plotly's writer of figures, and its script.

    Raises:
      JaxinfError: it is not installed.
    """
    try:
        import plotly.io
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise JaxinfError(
            "report: expected plotly, which draws the figures, found none; install it "
            "with: pip install 'jaxinf[report]'"
        ) from error
    return plotly.io, get_plotlyjs()


def _named(runs: Iterable[Logs]) -> dict[str, Logs]:
    """Names runs by their directories, as short as they differ."""
    found: dict[str, Logs] = {}
    for logs in runs:
        path = logs.path.absolute()
        name = path.name
        if name in found:
            name = str(path)
        while name in found:
            name += " again"
        found[name] = logs
    return found


def _page(
    runs: Mapping[str, Logs],
    figures: Sequence[FigureOf],
    bodies: Sequence[str],
    plotly_js: str,
) -> str:
    title = "Report of " + ", ".join(runs)
    sections = [
        _section("Summary", _table("Summary", ["", *runs], _summary(runs))),
        _section("Predicted and found", _predictions(runs)),
    ]
    sections += [
        _section(
            shown.title,
            f"<p>{escape(shown.text)}</p><noscript><p>The figure needs a script."
            f"</p></noscript>{body}{_in_numbers(shown)}",
        )
        for shown, body in zip(figures, bodies, strict=True)
    ]
    sections += [
        _section("Phases of traced steps", _phases(runs)),
        _section("Settings", _table("Settings", ["", *runs], _settings(runs))),
        _section("Versions", _table("Versions", ["", *runs], _rows(runs, "versions"))),
    ]
    body = "\n".join(text for _, text in sections if text)
    links = "".join(
        f'<li><a href="#{_anchor(name)}">{escape(name)}</a></li>'
        for name, text in sections
        if text
    )
    scripts = [plotly_js, *(s for one in bodies for s in _SCRIPT.findall(one))]
    digests = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; "
    policy += "img-src data: blob:; base-uri 'none'; form-action 'none'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
<script>{plotly_js}</script>
</head>
<body>
<h1>{escape(title)}</h1>
<nav aria-label="Sections"><ul>{links}</ul></nav>
<main>
{body}
</main>
</body>
</html>
"""


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _section(name: str, content: str) -> tuple[str, str]:
    """Returns a section's name and its HTML, none if it has no content."""
    if not content:
        return name, ""
    heading = f'<h2 id="{_anchor(name)}">{escape(name)}</h2>'
    return name, f"<section>{heading}{content}</section>"


def _anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _table(name: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table, none without rows; a narrow screen can move it by keyboard."""
    if not rows:
        return ""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    label = f'aria-label="{escape(name)}"'
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="table" tabindex="0" role="region" {label}>{table}</div>'


def _in_numbers(shown: FigureOf) -> str:
    """Returns what a figure shows as a table, which opens by keyboard, too."""
    title = f"{shown.title} in numbers"
    table = _table(title, *numbers_of(shown.figure))
    return f"<details><summary>{escape(title)}</summary>{table}</details>"


# --- rows ----------------------------------------------------------------------------


def _summary(runs: Mapping[str, Logs]) -> list[list[str]]:
    kinds: dict[str, Any] = {
        "steps": lambda logs: f"{logs.num_steps:,}",
        "last loss": lambda logs: _number(_last(logs, "loss")),
        "held-out loss": lambda logs: _number(
            float(logs.validation["loss"][-1]) if "loss" in logs.validation else None
        ),
        "time of a step": lambda logs: _unit(logs.median("step_s"), "s"),
        "read a step": lambda logs: _bytes(logs.median("drive_read_bytes")),
        "written a step": lambda logs: _bytes(logs.median("drive_write_bytes")),
        "most memory": lambda logs: _bytes(logs.most("rss_bytes")),
        "notes": lambda logs: "; ".join(logs.notes),
    }
    rows = [
        [name, *(show(logs) for logs in runs.values())] for name, show in kinds.items()
    ]
    return [row for row in rows if any(row[1:])]


def _predictions(runs: Mapping[str, Logs]) -> str:
    """Returns tables of what was predicted and found, of runs with a `plan.json`."""
    tables = []
    for name, logs in runs.items():
        if rows := _held(logs):
            head = [name if len(runs) > 1 else "", "predicted", "found"]
            title = f"Predicted and found: {name}"
            tables.append(_table(title, head, rows))
            guesses = _dict(logs.plan.get("forecast")).get("guesses")
            if isinstance(guesses, list) and guesses:
                said = ", ".join(str(one)[:200] for one in guesses[:50])
                tables.append(f"<p>Rests on guesses: {escape(said)}</p>")
    return "".join(tables)


def _phases(runs: Mapping[str, Logs]) -> str:
    """Returns a table for each run with a trace of forward and backward programs."""
    tables = []
    for name, logs in runs.items():
        head, rows = phase_rows(logs.trace)
        title = f"Phases of traced steps: {name}"
        tables.append(_table(title, [name if len(runs) > 1 else "", *head[1:]], rows))
    return "".join(tables)


def _held(logs: Logs) -> list[list[str]]:
    sizes, forecast = (_dict(logs.plan.get(key)) for key in ("sizes", "forecast"))
    phases = _dict(forecast.get("phases"))

    def planned(*names: str) -> float | None:
        known = [_float(phases.get(name)) for name in names]
        return sum(filter(None, known)) if any(known) else None

    def moved() -> float | None:
        known = [logs.median(f"phases.{name}") for name in ("read", "write")]
        return sum(filter(None, known)) if any(known) else None

    seconds = [
        ("time of a step", _float(forecast.get("step_s")), logs.median("step_s")),
        ("programs", planned("programs"), logs.median("phases.program")),
        ("updates", planned("update"), logs.median("phases.update")),
        ("drives", planned("params", "state", "values and gradients"), moved()),
    ]
    sizes_of = [
        ("read a step", "read_bytes", logs.median("drive_read_bytes")),
        ("written a step", "written_bytes", logs.median("drive_write_bytes")),
        ("memory (found: resident)", "memory_bytes", logs.most("rss_bytes")),
        ("on drives", "disk_bytes", logs.most("memory.drives")),
    ]
    rows = [[name, _unit(one, "s"), _unit(found, "s")] for name, one, found in seconds]
    rows += [
        [name, _bytes(_float(sizes.get(key))), _bytes(found)]
        for name, key, found in sizes_of
    ]
    return [row for row in rows if row[1]]


def _settings(runs: Mapping[str, Logs]) -> list[list[str]]:
    """Returns settings, those in which the runs differ first."""
    rows = _rows(runs, "settings")
    return sorted(rows, key=lambda row: len(set(row[1:])) == 1)


def _rows(runs: Mapping[str, Logs], attribute: str) -> list[list[str]]:
    texts = [getattr(logs, attribute) for logs in runs.values()]
    names = dict.fromkeys(name for one in texts for name in one)
    return [[name, *(one.get(name, "") for one in texts)] for name in names]


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _float(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e30 else None


def _last(logs: Logs, name: str) -> float | None:
    column = logs.steps.get(name)
    return None if column is None else float(column[-1])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _unit(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.3g} {unit}"


def _bytes(value: float | None) -> str:
    return "" if value is None else format_bytes(round(value))
