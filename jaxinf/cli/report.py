"""``jaxinf report``: a page about one run or several, from their log directories.

Invariant: what is in a log is a stranger's word: bounded, escaped, and never a script.
The page loads nothing from anywhere, and a browser runs two scripts alone, by their
digests: plotly's, and the one that draws.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro

from jaxinf.cli.arguments import PathArg, option
from jaxinf.cli.run_logs import Columns, Logs, read_logs
from jaxinf.command_line import UsageError
from jaxinf.errors import JaxinfError
from jaxinf.terminal import format_bytes
from jaxinf.transfer import write_bytes_atomically
from jaxinf.typing import Array

_MAX_RUNS = 16
_COLOURS = ("#3b8ee0", "#e07b39", "#3aa35b", "#9a7fd1", "#c05656", "#b8901f", "#2aa5a0")
_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 44rem; padding: 1rem; font: 1rem/1.5 system-ui; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .2rem; }
p { margin: .2rem 0 .6rem; } section { break-inside: avoid; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
td, th { border-bottom: 1px solid #8884; padding: .25rem .8rem .25rem 0;
  text-align: left; vertical-align: top; min-width: 5rem; overflow-wrap: anywhere; }
"""
_DRAW = """
const figures = %s;
const line = "rgba(128,128,128,0.25)", ink = "#777777";
const axis = (text) => ({automargin: true, gridcolor: line, zerolinecolor: line,
  linecolor: line, title: {text}});
figures.forEach(([data, unit], number) => Plotly.newPlot("figure-" + number, data,
  {paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: 320,
   font: {color: ink, size: 12}, margin: {l: 8, r: 8, t: 8, b: 8}, xaxis: axis("step"),
   yaxis: axis(unit), legend: {orientation: "h", y: -0.25, yanchor: "top"},
   showlegend: true, hoverlabel: {bgcolor: "#2b2f36", font: {color: "#ffffff"}}},
  {responsive: true, displayModeBar: false}));
"""


@dataclass(frozen=True)
class Report:
    """Make a page about a run, or several side by side, from their log directories.

    The page shows loss, speed, bytes, where the time and the memory of a step went,
    and settings. It opens offline. Needs plotly (pip install 'jaxinf[report]').
    """

    # Log directories of runs.
    logs: Annotated[
        tyro.conf.Positional[tuple[PathArg, ...]], option("LOG_DIR [LOG_DIR ...]")
    ]
    # The page; by default report.html in the first LOG_DIR.
    output: Annotated[PathArg | None, option("FILE")] = None

    def run(self) -> int:
        if not 0 < len(self.logs) <= _MAX_RUNS:
            raise UsageError(
                f"report: expected the log directory of a run, or up to {_MAX_RUNS}, "
                f"got {len(self.logs)}"
            )
        try:
            from plotly.offline import get_plotlyjs
        except ImportError as error:
            raise JaxinfError(
                "report: expected plotly, which draws the figures, found none; install "
                "it with: pip install 'jaxinf[report]'"
            ) from error
        names = [folder.name for folder in self.logs]
        if len(set(names)) < len(names):
            names = list(map(str, self.logs))
        read = map(read_logs, self.logs)
        runs = dict(zip(names, read, strict=True))
        figures = [figure for figure in _figures(runs) if figure.traces]
        page = _page(runs, figures, get_plotlyjs()).encode("utf-8", errors="replace")
        output = self.output or self.logs[0] / "report.html"
        write_bytes_atomically(output, page)
        print(output)
        return 0


class _Figure(NamedTuple):
    title: str
    text: str
    unit: str
    traces: list[dict[str, Any]]


def _page(runs: Mapping[str, Logs], figures: Sequence[_Figure], plotly_js: str) -> str:
    title = escape("Report of " + ", ".join(runs))
    parts = [_table("Summary", ["", *runs], _summary(runs))]
    for number, figure in enumerate(figures):
        title_html, text_html = escape(figure.title), escape(figure.text)
        parts.append(
            f"<section><h2>{title_html}</h2><p>{text_html}</p><noscript>"
            f'<p>The figure needs a script.</p></noscript><div id="figure-{number}" '
            f'class="plotly-graph-div"></div></section>'
        )
    names = dict.fromkeys(key for logs in runs.values() for key in logs.settings)
    settings = [[k, *(r.settings.get(k, "") for r in runs.values())] for k in names]
    settings.sort(key=lambda row: len(set(row[1:])) == 1)  # first where runs differ
    parts.append(_table("Settings", ["", *runs], settings))
    data = json.dumps([[figure.traces, figure.unit] for figure in figures])
    scripts = [plotly_js, _DRAW % data.replace("<", "\\u003c")]
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
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        for row in rows
    )
    return (
        f'<section tabindex="0"><h2>{escape(name)}</h2><table><thead><tr>{top}</thead>'
        f"<tbody>{lines}</tbody></table></section>"
    )


def _summary(runs: Mapping[str, Logs]) -> list[list[str]]:
    def size(value: float) -> str:
        return format_bytes(round(value))

    def last(values: Array) -> float:
        return values[-1]

    rows = [["steps", *map(_steps, runs.values())]]
    for label, name, reduce, text in (
        ("last loss", "loss", last, "{:.4g}".format),
        ("held-out loss", "loss", last, "{:.4g}".format),
        ("held-out accuracy", "accuracy", last, "{:.1%}".format),
        ("time of a step, median", "step_s", np.median, "{:.4g} s".format),
        ("throughput, median", "rate", np.median, "{:,.4g}".format),
        ("read a step, median", "drive_read_bytes", np.median, size),
        ("written a step, median", "drive_write_bytes", np.median, size),
        ("gradients sent a step, median", "link_down_bytes", np.median, size),
        ("updates received a step, median", "link_up_bytes", np.median, size),
        ("most memory", "rss_bytes", np.max, size),
    ):
        row = [label]
        for logs in runs.values():
            columns = logs.validation if label.startswith("held") else logs.columns
            values = columns.get(name, np.zeros(0))
            finite = values[np.isfinite(values)]
            cell = text(float(reduce(finite))) if len(finite) else ""
            if cell and name == "rate":
                images = "images " * ("task" in logs.settings)  # have no seq_len
                unit = "tokens " if "seq_len" in logs.settings else images
                cell += f" {unit}a second"
            row.append(cell)
        rows.append(row)
    rows.insert(4, ["best step, held out", *map(_best_step, runs.values())])
    rows.append(["notes", *("; ".join(logs.notes) for logs in runs.values())])
    return [row for row in rows if any(row[1:])]


def _steps(logs: Logs) -> str:
    last = int(logs.columns["step"][-1])
    first = last - logs.num_steps + 1
    return f"{first:,} to {last:,}" if first > 1 else f"{logs.num_steps:,}"


def _best_step(logs: Logs) -> str:
    """Names the step that a run with evaluations keeps."""
    columns = logs.validation
    pairs = zip(columns.get("loss", ()), columns.get("step", ()), strict=False)
    loss, step = min((p for p in pairs if p[1] > 0 and p[0] == p[0]), default=(0, 0))
    return f"{int(step):,}, with a loss of {loss:.4g}" if step else ""


_PHASES = (
    "Seconds in which some thread read, wrote, updated or waited, or programs ran; "
    "they overlap. Dots: the whole step."
)
_BYTES = (
    "In a step: read from drives (lines) and written (dashes); gradients sent to be "
    "applied beside them (dots), and updates received (both)."
)
_MOVED = {"drive_read_bytes": "solid", "drive_write_bytes": "dash"}
_MOVED |= {"link_down_bytes": "dot", "link_up_bytes": "dashdot"}
_MEMORY = "By tier: the host's, of it buffers for state, the device's, drives."


def _figures(runs: Mapping[str, Logs]) -> Iterator[_Figure]:
    """Yields all figures, also those that have nothing to show."""
    loss, rate, moved = list[Any](), list[Any](), list[Any]()
    for (name, logs), colour in zip(runs.items(), cycle(_COLOURS)):
        columns = logs.columns
        loss += _line(columns, "loss", name, colour)
        loss += _line(logs.validation, "loss", f"{name} held out", colour, "dots")
        rate += _line(columns, "rate", name, colour)
        for column, dash in _MOVED.items():
            word = column.partition("_bytes")[0].replace("_", " ")
            moved += _line(columns, column, f"{name} {word}", colour, dash, 1 << 20)
    yield _Figure("Loss", "Of each step's batch, and held out (dots).", "nats", loss)
    yield _Figure("Throughput", "Tokens or images a second.", "a second", rate)
    yield _Figure("Bytes", _BYTES, "MiB", moved)
    for name, logs in runs.items():
        columns = logs.columns
        of_run = f": {name}" if len(runs) > 1 else ""
        phases = _lines(columns, "phases.")
        if phases:
            phases += _line(columns, "step_s", "step", "#777777", "dot")
        yield _Figure(f"Phases of a step{of_run}", _PHASES, "s", phases)
        tiers = _lines(columns, "memory.", 1 << 20)
        yield _Figure(f"Memory{of_run}", _MEMORY, "MiB", tiers)


def _lines(columns: Columns, group: str, unit: int = 1) -> list[dict[str, Any]]:
    names = [column for column in columns if column.startswith(group)]
    return [
        line
        for name, colour in zip(names, cycle(_COLOURS))
        for line in _line(columns, name, name.removeprefix(group), colour, unit=unit)
    ]


def _line(
    columns: Columns,
    name: str,
    label: str,
    colour: str,
    dash: str = "solid",
    unit: int = 1,
) -> list[dict[str, Any]]:
    """Returns the line, or dots, of a column; none if it has no number but 0."""
    y = columns.get(name, np.zeros(0)) / unit
    if not np.nanmax(np.abs(y), initial=0) > 0:
        return []
    is_dots = dash == "dots" or len(y) == 1
    trace = {
        "type": "scatter",
        "mode": "markers" if is_dots else "lines",
        "name": escape(label),
        "x": columns["step"].tolist(),
        "y": y.tolist(),
        "line": {"color": colour, "width": 1.5, "dash": "dot" if is_dots else dash},
        "marker": {"color": colour},
    }
    return [trace]
