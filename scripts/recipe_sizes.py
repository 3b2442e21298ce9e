"""What the recipes in docs/recipes take: memory, disk, and bytes of a step.

    python scripts/recipe_sizes.py            # a table, computed; nothing is written
    python scripts/recipe_sizes.py RUN.toml   # of another run

The chunks are laid out as for a new store of the run, and the states that an update
reads and writes are counted in whole pages. Reads of a streamed run's params, and
gradients that wait on the drive, are given at most: what memory saves is not counted.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jaxinf.command_line import UsageError
from jaxinf.errors import JaxinfError
from jaxinf.terminal import format_bytes, format_count
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.run_file import read_run
from jaxinf.train.sizes import sizes_of

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"
PRESETS = {"Llama-2-7b-hf": ("llama", "llama2-7b")}
"""Models of folders that `from` names."""


def run_of(path: Path) -> TrainConfig:
    """Reads a run; the model of a folder that is not here is a preset."""
    run = read_run(path)
    if run.source is None or run.source.exists():
        return check(run)
    if run.source.name not in PRESETS:
        raise UsageError(f"{path}: expected a folder at {run.source}, found none")
    model, preset = PRESETS[run.source.name]
    return replace(run, source=None, model=model, preset=preset)


def table(paths: Sequence[Path]) -> str:
    """Returns a table of runs in Markdown."""
    lines = [
        "| recipe | params | memory | disk | read a step | written a step |",
        "|---|---|---|---|---|---|",
    ]
    for path in paths:
        run = run_of(path)
        sizes, most = sizes_of(run)[0], "at most " if run.mode == "stream" else ""
        cells = [
            f"[{path.stem}](#{path.stem})",
            format_count(sizes.num_params),
            format_bytes(sizes.memory_bytes),
            format_bytes(sizes.disk_bytes),
            most + format_bytes(sizes.read_bytes),
            most + format_bytes(sizes.written_bytes),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    given = [Path(name) for name in sys.argv[1:]]
    try:
        print(table(given or sorted(RECIPES.glob("*.toml"))))
    except (UsageError, JaxinfError) as error:
        sys.exit(str(error))
