"""``jaxinf report``: a page about one run or several, from their log directories.

Invariant: what is in a log is a stranger's word: bounded, escaped, and never a script.
The page loads nothing from anywhere, and a browser runs two scripts alone, by their
digests: plotly's, and the one that draws.
"""

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxinf.cli.run_logs import Columns, Logs, Span, phase_rows, read_logs
from jaxinf.command_line import UsageError
from jaxinf.errors import JaxinfError
from jaxinf.io import write_bytes_atomically
from jaxinf.terminal import format_bytes

_MOST_RUNS = 16
_MOST_SPANS = 6000
_MOST_TRACKS = 40
_MIB = float(1 << 20)
_INK = "#777777"  # 4.5:1 on white, and on black
_GRID = "rgba(128,128,128,0.25)"
_RUNS = ("#3b8ee0", "#e07b39", "#3aa35b", "#c0569f", "#a8921f", "#7a6fd0", "#2aa5a0")
_PHASES = {"read": "#3b8ee0", "write": "#e07b39", "update": "#3aa35b"}
_PHASES |= {"program": "#9a7fd1", "wait": "#c05656", "commit": "#b8901f"}
_PHASES |= {"copy": "#2aa5a0", "checksum": "#8c8c8c", "fetch": "#5fb0d8"}
_DASHES = {"drive_read_bytes": "solid", "drive_write_bytes": "dash"}
_DASHES |= {"link_down_bytes": "dot", "link_up_bytes": "dashdot"}
_STYLE = """
:root { color-scheme: light dark; --ink: #1d1f23; --ground: #ffffff; --line: #8884; }
@media (prefers-color-scheme: dark) { :root { --ink: #e2e4e8; --ground: #060708; } }
body { color: var(--ink); background: var(--ground); margin: 0 auto; max-width: 44rem;
  padding: 0 1rem 3rem; font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .2rem; }
p { margin: .2rem 0 .6rem; } section { break-inside: avoid; }
div.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
td, th { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0;
  text-align: left; vertical-align: top; min-width: 5rem; overflow-wrap: anywhere; }
@media print { :root { --ink: #000000; --ground: #ffffff; }
  div.table { overflow: visible; } }
"""
_DRAW = """
const figures = %s;
figures.forEach(([data, layout], number) => Plotly.newPlot("figure-" + number, data,
  layout, {responsive: true, displayModeBar: false}));
"""


class _Figure(NamedTuple):
    title: str
    text: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]


def write_report(folders: Sequence[Path], output: Path) -> None:
    """Writes the page about log directories, at most 16."""
    if len(folders) > _MOST_RUNS:
        raise UsageError(
            f"report: expected at most {_MOST_RUNS} log directories, got "
            f"{len(folders)}; make a report of some of them"
        )
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise JaxinfError(
            "report: expected plotly, which draws the figures, found none; install it "
            "with: pip install 'jaxinf[report]'"
        ) from error
    names = [folder.absolute().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder.absolute()) for folder in folders]
    runs = {name: read_logs(one) for name, one in zip(names, folders, strict=True)}
    page = _page(runs, [one for one in _figures(runs) if one.traces], get_plotlyjs())
    write_bytes_atomically(output, page.encode("utf-8", errors="replace"))


# --- the page ------------------------------------------------------------------------


def _page(runs: Mapping[str, Logs], figures: Sequence[_Figure], plotly_js: str) -> str:
    title = escape("Report of " + ", ".join(runs))
    parts = [_table("Summary", ["", *runs], _summary(runs))]
    for number, one in enumerate(figures):
        parts.append(
            f"<section><h2>{escape(one.title)}</h2><p>{escape(one.text)}</p><noscript>"
            f'<p>The figure needs a script.</p></noscript><div id="figure-{number}" '
            f'class="plotly-graph-div"></div></section>'
        )
    head = ["phase", "of a step", "programs busy", "drives read", "drives write"]
    head += ["link", "memory: least / mean / most"]
    for name, logs in runs.items():
        parts.append(_table(f"Phases of traced steps: {name}", head, phase_rows(logs)))
    names = dict.fromkeys(key for logs in runs.values() for key in logs.settings)
    settings = [[k, *(r.settings.get(k, "") for r in runs.values())] for k in names]
    settings.sort(key=lambda row: len(set(row[1:])) == 1)  # first where runs differ
    parts.append(_table("Settings", ["", *runs], settings))
    drawn = json.dumps([[one.traces, one.layout] for one in figures])
    scripts = [plotly_js, _DRAW % drawn.replace("<", "\\u003c")]
    digests = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'"
        for s in scripts
    )
    policy = f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; "
    policy += "img-src data: blob:; base-uri 'none'; form-action 'none'"
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">
<title>{title}</title>
<style>{_STYLE}</style>
<script>{scripts[0]}</script>
</head>
<body><main>
<h1>{title}</h1>
{body}
</main><script>{scripts[1]}</script></body>
</html>
"""


def _table(name: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a section, none without rows; a narrow screen can move it by keyboard."""
    if not rows:
        return ""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<section><h2>{escape(name)}</h2><div class="table" tabindex="0" '
        f'role="region" aria-label="{escape(name)}"><table><thead><tr>{top}</tr>'
        f"</thead><tbody>{lines}</tbody></table></div></section>"
    )


def _summary(runs: Mapping[str, Logs]) -> list[list[str]]:
    def size(value: float) -> str:
        return format_bytes(round(value))

    rows = [["steps", *(f"{logs.num_steps:,}" for logs in runs.values())]]
    for label, name, of, text in (
        ("last loss", "loss", lambda known: known[-1], "{:.4g}".format),
        ("held-out loss", "held out", lambda known: known[-1], "{:.4g}".format),
        ("time of a step", "step_s", np.median, "{:.4g} s".format),
        ("throughput", "rate", np.median, "{:,.4g} a second".format),
        ("read a step", "drive_read_bytes", np.median, size),
        ("written a step", "drive_write_bytes", np.median, size),
        ("to the drives' processors", "link_down_bytes", np.median, size),
        ("from them", "link_up_bytes", np.median, size),
        ("most memory", "rss_bytes", np.max, size),
    ):
        row = [label]
        for logs in runs.values():
            columns = logs.validation if name == "held out" else logs.columns
            values = columns.get("loss" if name == "held out" else name, np.zeros(0))
            known = values[np.isfinite(values)]
            row.append(text(float(of(known))) if len(known) else "")
        rows.append(row)
    rows.append(["notes", *("; ".join(logs.notes) for logs in runs.values())])
    return [row for row in rows if any(row[1:])]


# --- figures -------------------------------------------------------------------------

_COMPARED: Sequence[tuple[str, str, str, Mapping[str, str]]] = (
    ("Loss", "Of each step's batch, and held out (dots).", "nats", {"loss": "solid"}),
    ("Throughput", "Tokens or images a second.", "a second", {"rate": "solid"}),
    (
        "Bytes",
        "In a step: read from drives (lines) and written (dashes); gradients to the "
        "drives' processors (dots), and results from them (both).",
        "MiB",
        _DASHES,
    ),
)


def _figures(runs: Mapping[str, Logs]) -> Iterator[_Figure]:
    """Yields the figures that have anything to show."""
    for title, text, unit, columns in _COMPARED:
        traces = []
        for (name, logs), colour in zip(runs.items(), cycle(_RUNS)):
            for column, dash in columns.items():
                word = column.partition("_bytes")[0].replace("_", " ")
                label = name if unit != "MiB" else f"{name} {word}"
                traces += _line(logs.columns, column, label, colour, unit, dash)
            if title == "Loss":
                label = f"{name} held out"
                traces += _line(logs.validation, "loss", label, colour, unit, "dots")
        yield _Figure(title, text, traces, _layout("step", unit))
    for name, logs in runs.items():
        for one in _figures_of_run(logs):
            yield one._replace(title=f"{one.title}: {name}") if len(runs) > 1 else one


def _figures_of_run(logs: Logs) -> Iterator[_Figure]:
    overlap = "Seconds in which some thread read, wrote, updated or waited, or "
    overlap += "programs ran; they overlap. Dots: the whole step."
    tiers = "By tier: the host's, of it buffers for state, the device's, drives."
    for title, group, unit, text in (
        ("Phases of a step", "phases", "s", overlap),
        ("Memory", "memory", "MiB", tiers),
    ):
        traces = []
        for name in logs.columns:
            kind, _, part = name.partition(".")
            if kind == group:
                colour = _PHASES.get(part, _RUNS[len(traces) % len(_RUNS)])
                traces += _line(logs.columns, name, part, colour, unit)
        if traces and group == "phases":
            traces += _line(logs.columns, "step_s", "step", _INK, unit, "dot")
        yield _Figure(title, text, traces, _layout("step", unit))
    text = "By thread, drive and device; drag to zoom in, click twice to see all."
    if len(logs.spans) > _MOST_SPANS:
        text += f" The {_MOST_SPANS:,} longest of {len(logs.spans):,} are drawn."
    spans = sorted(logs.spans, key=lambda span: -span.took_ms)[:_MOST_SPANS]
    yield _Figure("Timeline", text, *_timeline(spans))


def _timeline(spans: Sequence[Span]) -> tuple[list[Any], dict[str, Any]]:
    tracks = sorted({span.track for span in spans})[:_MOST_TRACKS]
    rows = {track: row for row, track in enumerate(tracks)}
    by_phase: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.track in rows:
            by_phase[span.phase].append(span)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": escape(phase),
            "y": [rows[span.track] for span in found],
            "base": [span.began_ms for span in found],
            "x": [span.took_ms for span in found],
            "text": [escape(span.name) for span in found],
            "textposition": "none",
            "hovertemplate": "%{text}<br>%{base:.6g} ms, %{x:.4g} ms<extra></extra>",
            "marker": {"color": _PHASES.get(phase, _INK), "line": {"width": 0}},
            "width": 0.8,
        }
        for phase, found in sorted(by_phase.items())
    ]
    layout = _layout("ms", "")
    layout |= {"barmode": "overlay", "bargap": 0, "height": 200 + 22 * len(rows)}
    layout["hovermode"] = "closest"
    shown = (track.partition(": ")[2] for track in rows)
    layout["yaxis"] |= {
        "tickvals": [*rows.values()],
        "ticktext": [escape(t if len(t) < 26 else "…" + t[-25:]) for t in shown],
        "autorange": "reversed",
        "tickfont": {"size": 10},
    }
    return traces, layout


def _line(
    columns: Columns, name: str, label: str, colour: str, unit: str, dash: str = "solid"
) -> list[dict[str, Any]]:
    """Returns the line, or dots, of a column; none if it has no number but 0."""
    y = columns.get(name, np.zeros(0)) / (_MIB if unit == "MiB" else 1)
    if not np.nanmax(np.abs(y), initial=0) > 0:
        return []
    trace = {
        "type": "scatter",
        "mode": "markers" if dash == "dots" or len(y) == 1 else "lines",
        "name": escape(label),
        "x": columns["step"].tolist(),
        "y": y.tolist(),
        "line": {
            "color": colour,
            "width": 1.5,
            "dash": "dot" if dash == "dots" else dash,
        },
        "marker": {"color": colour},
    }
    return [trace]


def _layout(x: str, y: str) -> dict[str, Any]:
    lines = dict.fromkeys(("gridcolor", "zerolinecolor", "linecolor"), _GRID)
    axis: dict[str, Any] = {"automargin": True, **lines}
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": _INK, "size": 12},
        "height": 320,
        "margin": dict.fromkeys("lrtb", 8),
        "xaxis": axis | {"title": {"text": x}},
        "yaxis": axis | {"title": {"text": y}},
        "legend": {"orientation": "h", "y": -0.25, "yanchor": "top"},
        "showlegend": True,
        "hoverlabel": {"bgcolor": "#2b2f36", "font": {"color": "#ffffff"}},
    }
