"""Counts memory, disk, and bytes of a step of the recipes in docs/recipes.

    python scripts/recipe_sizes.py   # a table, computed; nothing is written

The chunks are laid out as for a new store of the run, and the states that an update
reads and writes are counted in whole pages. The programs of a streamed run are traced
for a batch of causal language modelling.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxinf.command_line import UsageError
from jaxinf.terminal import format_bytes, format_count
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.count import RunNeeds, count_needs
from jaxinf.train.run_file import read_run_file

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"
PRESETS = {"Llama-2-7b-hf": ("llama", "llama2-7b")}
"""Models of folders that `from` names."""


def run_of(path: Path) -> TrainConfig:
    """Reads a run; the model of a folder that is not here is a preset."""
    run = read_run_file(path)
    if run.source is None or run.source.exists():
        return check(run)
    if run.source.name not in PRESETS:
        raise UsageError(f"{path}: expected a folder at {run.source}, found none")
    model, preset = PRESETS[run.source.name]
    return replace(run, source=None, model=model, preset=preset)


def counted(run: TrainConfig) -> RunNeeds:
    """Counts a run, without the values of its batch if it is not streamed."""
    tokens = np.zeros((run.batch_size, run.seq_len or 64), np.int32)
    batch = {"tokens": tokens, "targets": tokens} if run.mode == "stream" else None
    return count_needs(run, batch, None)


def table(paths: Sequence[Path]) -> str:
    """Returns a table of runs in Markdown."""
    lines = [
        "| recipe | params | memory | disk | read a step | written a step |",
        "|---|---|---|---|---|---|",
    ]
    for path in paths:
        sizes = counted(run_of(path))
        names = ("host", "disk", "drive_read", "drive_write")
        found = [format_bytes(getattr(sizes, f"{name}_bytes")) for name in names]
        cells = [f"[{path.stem}](#{path.stem})", format_count(sizes.num_params)]
        lines.append(f"| {' | '.join([*cells, *found])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(sorted(RECIPES.glob("*.toml"))))
