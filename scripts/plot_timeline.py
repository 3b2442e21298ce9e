"""Draws one training step: the times of drive, kernel and model.

python scripts/bench_train.py --store DIR --timeline step.json
python scripts/plot_timeline.py step.json docs/img/timeline.png

Of a streamed step (scripts/bench_stream.py --timeline) it shows reads of params, and
the programs that the model was cut into.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]: an extra

ROWS = {
    "fetch": ("params", "#0f8b8d"),
    "program": ("programs", "#7a5fa8"),
    "read": ("reads", "#2a78b5"),
    "checksum": ("checksums", "#9a9a9a"),
    "update": ("kernel", "#3d9a50"),
    "write": ("writes", "#d1662f"),
    "model": ("forward, backward", "#7a5fa8"),
    "commit": ("drain, commit", "#b8433f"),
}
COMMIT = ("drain", "sync", "publish")


def model_spans(spans: list[dict[str, Any]], step_s: float) -> list[dict[str, Any]]:
    """Returns the times in the step without a wait for a leaf's update."""
    leaves = sorted((s["began_s"], s["ended_s"]) for s in spans if s["kind"] == "leaf")
    gaps, at = [], 0.0
    for began, ended in [*leaves, (step_s, step_s)]:
        if began > at:
            gaps.append({"kind": "model", "began_s": at, "ended_s": began})
        at = max(at, ended)
    return gaps


def plot(document: dict[str, Any], path: Path) -> None:
    """Writes the picture."""
    step_s = document["step_s"]
    spans = document["spans"]
    if not any(span["kind"] == "program" for span in spans):
        spans = spans + model_spans(spans, step_s)
    kinds_found = {"commit" if s["kind"] in COMMIT else s["kind"] for s in spans}
    rows = {kind: style for kind, style in ROWS.items() if kind in kinds_found}
    figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
    for row, (kind, (_, colour)) in enumerate(rows.items()):
        kinds = COMMIT if kind == "commit" else (kind,)
        bars = [
            (s["began_s"], s["ended_s"] - s["began_s"])
            for s in spans
            if s["kind"] in kinds
        ]
        alpha = 0.6 if kind in ("read", "write") else 1.0  # several threads overlap
        axes.broken_barh(
            bars, (row - 0.38, 0.76), facecolors=colour, alpha=alpha, linewidth=0
        )
    axes.axvline(step_s, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(
        " next step may begin", (step_s, -0.55), fontsize=8, annotation_clip=False
    )
    axes.set_yticks(range(len(rows)), [label for label, _ in rows.values()])
    axes.invert_yaxis()
    axes.set_xlabel("seconds from the beginning of the step")
    axes.set_xlim(0, max(s["ended_s"] for s in spans) * 1.02)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Reads a timeline, writes a picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("timeline", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    plot(json.loads(arguments.timeline.read_text()), arguments.picture)


if __name__ == "__main__":
    main()
