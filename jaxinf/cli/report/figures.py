"""The figures of a report, as plotly's JSON.

Invariant: every text from a log is escaped, since plotly takes some HTML; colours and
the transparent ground suit a light page and a dark one.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape, unescape
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np

from jaxinf.cli.report.logs import Logs
from jaxinf.typing import Array

__all__ = ["Figure", "FigureOf", "all_figures", "is_amount", "numbers_of"]

Figure: TypeAlias = dict[str, Any]
"""``data`` and ``layout`` of plotly."""

_INK = "#777777"  # 4.5:1 on white, and on black
_GRID = "rgba(128,128,128,0.25)"
_RUNS = ("#3b8ee0", "#e07b39", "#3aa35b", "#c0569f", "#a8921f", "#7a6fd0", "#2aa5a0")
_PHASES = {
    "read": "#3b8ee0",
    "write": "#e07b39",
    "update": "#3aa35b",
    "program": "#9a7fd1",
    "wait": "#c05656",
    "commit": "#b8901f",
    "copy": "#2aa5a0",
    "checksum": "#8c8c8c",
    "fetch": "#5fb0d8",
}
_TIERS = {"host": "#3b8ee0", "buffers": "#3aa35b", "device": "#9a7fd1"}
_TIERS |= {"drives": "#e07b39"}
_MOST_SPANS = 6000
_MOST_TRACKS = 40
_MIB = float(1 << 20)


class FigureOf(NamedTuple):
    """A figure, its title, and what it shows, in words."""

    title: str
    text: str
    figure: Figure


def all_figures(runs: Mapping[str, Logs]) -> Iterator[FigureOf]:
    """Yields the figures of runs by name, those that have anything to show."""
    for title, text, unit, columns, scale in _COMPARED:
        traces = list(_compared(runs, columns, scale))
        if traces:
            yield FigureOf(title, text, _lines(traces, unit))
    for name, logs in runs.items():
        suffix = f": {name}" if len(runs) > 1 else ""
        yield from _of_run(logs, suffix)


def numbers_of(figure: Figure) -> tuple[list[str], list[list[str]]]:
    """Returns the head and the rows of a table of what a figure shows.

    Of a line its first, last, least and greatest number and their median; of bars by
    phase their number, and how long they are together.
    """
    if any(trace["type"] == "bar" for trace in figure["data"]):
        rows = [
            [unescape(bar["name"]), f"{len(bar['x'])}", f"{sum(bar['x']):.4g} ms"]
            for bar in figure["data"]
        ]
        return ["phase", "spans", "together"], rows
    head = ["line", "first", "median", "last", "least", "most"]
    rows = []
    for line in figure["data"]:
        values = np.array([y for y in line["y"] if y is not None])
        if values.size:
            shown = values[0], np.median(values), values[-1], values.min(), values.max()
            rows.append([unescape(line["name"]), *(f"{one:.4g}" for one in shown)])
    return head, rows


_COMPARED: Sequence[tuple[str, str, str, Mapping[str, str], float]] = (
    (
        "Loss",
        "Of each step's batch, and of the held-out data (dots), in nats.",
        "nats",
        {"loss": ""},
        1,
    ),
    ("Throughput", "Tokens or images a second.", "a second", {"rate": ""}, 1),
    ("Time of a step", "Seconds.", "s", {"step_s": ""}, 1),
    (
        "Bytes on drives",
        "MiB read (lines) and written (dashes) in a step.",
        "MiB",
        {"drive_read_bytes": "read", "drive_write_bytes": "written"},
        1 / _MIB,
    ),
    (
        "Bytes on the link",
        "MiB in a step to the drives' processors (lines: gradients), and from them.",
        "MiB",
        {"link_down_bytes": "down", "link_up_bytes": "up"},
        1 / _MIB,
    ),
    ("Learning rate", "Of each step.", "", {"learning_rate": ""}, 1),
    ("Norm of gradients", "Before clipping.", "", {"gradient_norm": ""}, 1),
)


def _compared(
    runs: Mapping[str, Logs], columns: Mapping[str, str], scale: float
) -> Iterator[dict[str, Any]]:
    """Yields lines of the same columns of all runs."""
    for number, (name, logs) in enumerate(runs.items()):
        colour = _RUNS[number % len(_RUNS)]
        for column, word in columns.items():
            values = _column(logs, column)
            if values is None or not np.nanmax(np.abs(values)) > 0:
                continue
            dash = "dash" if word in ("written", "up") else "solid"
            label = " ".join(part for part in (name, word) if part)
            yield _line(logs.steps["step"], values * scale, label, colour, dash)
        if "loss" in columns and "loss" in logs.validation:
            yield {
                **_line(
                    logs.validation["step"],
                    logs.validation["loss"],
                    f"{name} held out",
                    colour,
                ),
                "mode": "markers",
            }


def _column(logs: Logs, name: str) -> Array | None:
    if name != "rate":
        return logs.steps.get(name)
    tokens, seconds = logs.steps.get("tokens"), logs.steps.get("step_s")
    if tokens is None or seconds is None:
        return None
    return tokens / np.where(seconds > 0, seconds, np.nan)


# --- of one run ----------------------------------------------------------------------


def _of_run(logs: Logs, suffix: str) -> Iterator[FigureOf]:
    phases = _group(logs, "phases", 1.0, _PHASES)
    if phases:
        whole = _line(logs.steps["step"], logs.steps["step_s"], "step", _INK, "dot")
        yield FigureOf(
            f"Phases of a step{suffix}",
            "Seconds in which some thread read, wrote, updated or waited, or programs "
            "ran; they overlap. Dots: the whole step.",
            _lines([*phases, whole], "s"),
        )
    if drives := _group(logs, "drives", 100.0, {}):
        figure = _lines(drives, "% of the step")
        figure["layout"]["yaxis"]["range"] = [0, 105]
        text = "Share of a step in which each drive was busy."
        yield FigureOf(f"Busy drives{suffix}", text, figure)
    if memory := _group(logs, "memory", 1 / _MIB, _TIERS):
        figure = _lines(memory, "MiB")
        figure["layout"]["yaxis"]["type"] = "log"
        text = "MiB by tier: the host's, of it buffers for state, the device's, drives."
        yield FigureOf(f"Memory{suffix}", text, figure)
    if logs.trace:
        yield from _of_trace(logs, suffix)


def _group(
    logs: Logs, group: str, scale: float, colours: Mapping[str, str]
) -> list[dict[str, Any]]:
    found = []
    for name, values in logs.steps.items():
        kind, _, part = name.partition(".")
        if kind == group and np.nanmax(np.abs(values)) > 0:
            colour = colours.get(part, _RUNS[len(found) % len(_RUNS)])
            found.append(_line(logs.steps["step"], values * scale, part, colour))
    return found


# --- of a trace ----------------------------------------------------------------------


class _Bar(NamedTuple):
    track: str
    name: str
    phase: str
    began_ms: float
    took_ms: float


def _of_trace(logs: Logs, suffix: str) -> Iterator[FigureOf]:
    bars, counters = list(_bars(logs.trace)), _counters(logs.trace)
    if bars:
        more = ""
        if len(bars) > _MOST_SPANS:
            more = f" The {_MOST_SPANS:,} longest of {len(bars):,} are drawn."
            bars = sorted(bars, key=lambda bar: -bar.took_ms)[:_MOST_SPANS]
        text = "By thread, drive and device, of trace.json; drag to zoom in." + more
        yield FigureOf(f"Timeline{suffix}", text, _timeline(bars))
    on_way = [c for c in counters.items() if c[0].startswith("bytes on their way")]
    memory = [c for c in counters.items() if c[0].startswith("memory")]
    texts = {"on_way": "MiB under way on each drive.", "memory": "MiB by tier."}
    for key, title, found in (
        ("on_way", "Bytes on their way", on_way),
        ("memory", "Memory in these steps", memory),
    ):
        traces = []
        for n, ((name, part), points) in enumerate(_series(found)):
            label = f"{name.partition(': ')[2]} {part}".strip()
            traces.append(_line(*points, label, _RUNS[n % len(_RUNS)]))
            traces[-1]["line"]["shape"] = "hv"
        if traces:
            figure = _lines(traces, "MiB")
            figure["layout"]["xaxis"]["title"] = {"text": "ms"}
            yield FigureOf(f"{title}{suffix}", texts[key], figure)


def _bars(events: Sequence[Mapping[str, Any]]) -> Iterator[_Bar]:
    """Yields the spans of a trace; what has another form is no span."""
    names = {}
    for event in events:
        if event.get("ph") == "M" and isinstance(event.get("args"), dict):
            key = event.get("pid"), event.get("tid"), event.get("name")
            names[str(key)] = str(event["args"].get("name", ""))[:80]
    for event in events:
        began_us, took_us = event.get("ts"), event.get("dur")
        if event.get("ph") != "X" or not is_amount(began_us) or not is_amount(took_us):
            continue
        pid, tid = event.get("pid"), event.get("tid")
        process = names.get(str((pid, 0, "process_name")), str(pid)[:20])
        thread = names.get(str((pid, tid, "thread_name")), str(tid)[:20])
        phase = str(event.get("cat", "step"))[:20]
        name = str(event.get("name", ""))[:200]
        times = began_us / 1e3, took_us / 1e3
        yield _Bar(f"{process}: {thread}", name, phase, *times)


def is_amount(value: Any) -> TypeGuard[float]:
    """Whether a log's word is an amount: of time, or of bytes."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < 1e15


def _timeline(bars: Sequence[_Bar]) -> Figure:
    tracks = dict.fromkeys(sorted({bar.track for bar in bars}, key=_track_order))
    rows = {track: row for row, track in enumerate([*tracks][:_MOST_TRACKS])}
    by_phase: defaultdict[str, list[_Bar]] = defaultdict(list)
    for bar in bars:
        if bar.track in rows:
            by_phase[bar.phase].append(bar)
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": escape(phase),
            "y": [rows[bar.track] for bar in found],
            "base": _rounded([bar.began_ms for bar in found]),
            "x": _rounded([bar.took_ms for bar in found]),
            "text": [escape(bar.name) for bar in found],
            "textposition": "none",
            "hovertemplate": "%{text}<br>%{base} ms, for %{x} ms<extra></extra>",
            "marker": {"color": _PHASES.get(phase, _INK), "line": {"width": 0}},
            "width": 0.8,
        }
        for phase, found in sorted(by_phase.items())
    ]
    layout = _layout("ms", "")
    layout |= {"barmode": "overlay", "bargap": 0, "height": 200 + 22 * len(rows)}
    labels = [escape(_shortened(track)) for track in rows]
    layout["yaxis"] |= {
        "tickvals": [*rows.values()],
        "ticktext": labels,
        "autorange": "reversed",
        "tickfont": {"size": 10},
    }
    layout["hovermode"] = "closest"
    return {"data": data, "layout": layout}


def _shortened(track: str) -> str:
    """Returns the name of a track, of a long one its end."""
    name = track.removeprefix("threads: ").removeprefix("drives: ")
    return name if len(name) < 26 else "…" + name[-25:]


def _track_order(track: str) -> tuple[int, str]:
    kinds = ("threads: steps", "JAX device", "drives", "threads")
    number = (n for n, kind in enumerate(kinds) if track.startswith(kind))
    return next(number, len(kinds)), track


def _counters(
    events: Sequence[Mapping[str, Any]],
) -> dict[str, list[tuple[float, Mapping[str, Any]]]]:
    found: defaultdict[str, list[tuple[float, Mapping[str, Any]]]] = defaultdict(list)
    for event in events:
        args = event.get("args")
        if event.get("ph") != "C" or not isinstance(args, dict):
            continue
        if is_amount(event.get("ts")):
            name = str(event.get("name", ""))[:80]
            found[name].append((event["ts"] / 1e3, args))
    return found


def _series(
    counters: Sequence[tuple[str, list[tuple[float, Mapping[str, Any]]]]],
) -> Iterator[tuple[tuple[str, str], tuple[Array, Array]]]:
    """Yields counters by name and part, with times in ms and MiB."""
    for name, points in counters[:20]:
        points = points[:: max(1, len(points) // _MOST_SPANS)]
        times = np.array([at for at, _ in points])
        parts = dict.fromkeys(str(key)[:40] for _, args in points for key in args)
        for part in [*parts][:8]:
            values = [args.get(part) for _, args in points]
            numbers = [v / _MIB if is_amount(v) else np.nan for v in values]
            yield (name, part), (times, np.array(numbers))


# --- plotly --------------------------------------------------------------------------


def _line(x: Array, y: Array, name: str, colour: str, dash: str = "solid") -> Figure:
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "name": escape(name),
        "x": _rounded(x),
        "y": _rounded(y),
        "line": {"color": colour, "width": 1.5, "dash": dash},
        "marker": {"color": colour},
    }


def _lines(traces: list[dict[str, Any]], unit: str) -> Figure:
    return {"data": traces, "layout": _layout("step", unit)}


def _layout(x: str, y: str) -> dict[str, Any]:
    axis = {"gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": _GRID}
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": _INK, "size": 12},
        "height": 320,
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "xaxis": {**axis, "automargin": True, "title": {"text": x}},
        "yaxis": {**axis, "automargin": True, "title": {"text": y}},
        "legend": {"orientation": "h", "y": -0.25, "yanchor": "top"},
        "showlegend": True,
        "hoverlabel": {"bgcolor": "#2b2f36", "font": {"color": "#ffffff"}},
        "dragmode": "zoom",
    }


def _rounded(values: Any) -> list[float | None]:
    """Returns numbers with six digits, None where one is not known."""
    return [float(f"{v:.6g}") if np.isfinite(v) else None for v in values]
