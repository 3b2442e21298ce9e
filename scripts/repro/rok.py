"""The ROK curve of scripts/repro/ssdtrain.py: table, published statements, plot.

One point is one policy at one batch size: the peak of values between programs, and the
throughput (2408.10013, section IV-C), over that of keep in the same rounds. Recomputed
work does not count as throughput.

    python scripts/repro/ssdtrain.py --store DIR --rok --plot rok.png

takes some 20 minutes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

PUBLISHED = (
    "offload has keep's throughput at an equal batch, a peak below that of layerwise "
    "recomputation, and twice the batch in equal memory (2408.10013, section IV-C)"
)

Points = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Measures by the stack and batch size, such as ``gpt 4``, and by policy."""

COLOURS = {
    "keep": "#9a9a9a",
    "recompute": "#d1662f",
    "offload": "#2a78b5",
    "offload 0.53": "#3d9a50",
    "offload 0.40": "#7a5fa8",
}
LEFT_OUT = "keep"


def table(points: Points) -> str:
    """Returns a row for each stack and batch size, a column pair for each policy."""
    policies = list(dict.fromkeys(name for one in points.values() for name in one))
    head = " ".join(f"{name:>18}" for name in policies)
    lines = [f"{'MiB, of keep':14} {head}"]
    for where, found in points.items():
        cells = [_cell(found.get(name)) for name in policies]
        lines.append(f"{where:14} " + " ".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def _cell(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return "does not fit"
    return f"{one['peak_bytes'] / 2**20:7.1f} {_throughput(one):8.2f}"


def _throughput(one: Mapping[str, Any]) -> float:
    """The throughput over keep's."""
    return round(1 / one["time_ratio"], 3)


def statements(points: Points) -> dict[str, list[float]]:
    """Returns the least and greatest value of what the paper states, by its words."""
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for where, one in points.items():
        keep = one["keep"]
        for name, policy in one.items():
            if name != LEFT_OUT:
                note(f"{name}: peak over keep's", _peak_ratio(policy, keep))
                note(f"{name}: throughput over keep's", _throughput(policy))
        ratio = _peak_ratio(one["offload"], one["recompute"])
        note("offload: peak over recompute's", ratio)
        stack, batch = where.split()
        twice = points.get(f"{stack} {2 * int(batch)}")
        if twice is not None:
            ratio = _peak_ratio(twice["offload"], keep)
            note("offload at twice the batch: peak over keep's", ratio)
    return {name: [min(values), max(values)] for name, values in found.items()}


def show(points: Points, picture: Path | None) -> None:
    """Prints the curve beside what the paper states, and draws it."""
    print(f"\n{table(points)}\n\npublished: {PUBLISHED}")
    for name, (low, high) in statements(points).items():
        print(f"{name:46} {low:.2f} to {high:.2f}")
    if picture is not None:
        plot(points, picture)


def _peak_ratio(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    return round(one["peak_bytes"] / other["peak_bytes"], 3)


def plot(points: Points, path: Path) -> None:
    """Writes a picture with a panel for each stack."""
    import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]: an extra

    stacks = list(dict.fromkeys(where.split()[0] for where in points))
    figure, panels = plt.subplots(
        1,
        len(stacks),
        figsize=(3.4 * len(stacks), 3.2),
        squeeze=False,
        layout="constrained",
    )
    for stack, axes in zip(stacks, panels.flat, strict=True):
        own = {
            int(w.split()[1]): one for w, one in points.items() if w.startswith(stack)
        }
        for name, colour in COLOURS.items():
            batches = [batch for batch in sorted(own) if name in own[batch]]
            measures = [own[batch][name] for batch in batches]
            peaks = [one["peak_bytes"] / 2**20 for one in measures]
            rates = [_throughput(one) for one in measures]
            axes.plot(peaks, rates, "o-", color=colour, label=name, markersize=4)
            if name in ("keep", "offload"):
                for batch, x, y in zip(batches, peaks, rates, strict=True):
                    place = {"textcoords": "offset points", "xytext": (0, 6)}
                    axes.annotate(str(batch), (x, y), fontsize=7, **place)
        axes.set_title(stack.upper(), fontsize=10)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_ylim(0, 1.2)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
    panels.flat[0].set_ylabel("throughput over keep's")
    panels.flat[-1].legend(fontsize=7, loc="lower right")
    figure.supxlabel("peak of values, MiB (numbers: batch size)", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
