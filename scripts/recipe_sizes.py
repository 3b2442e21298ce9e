"""What the recipes in docs/recipes take: memory, disk, and bytes of a step.

    python scripts/recipe_sizes.py            # a table, computed; nothing is written
    python scripts/recipe_sizes.py RUN.toml   # of another run

The chunks are laid out as for a new store of the run, and the states that an update
reads and writes are counted in whole pages. Reads of a streamed run's params, and
gradients that wait on the drive, are given at most: what memory saves is not counted.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
from jaxinf_models import abstract_params, num_params

import jaxinf
from jaxinf.command_line import UsageError
from jaxinf.engine import (
    StoreDescription,
    can_take,
    check_compressed,
    describe,
    gradient_forms,
    keeps_feedback,
    moved_states,
)
from jaxinf.errors import JaxinfError
from jaxinf.program import averaged, trace_init
from jaxinf.store import required_bytes
from jaxinf.streaming import trace_optimizer
from jaxinf.streaming.update.traffic import moved_bytes
from jaxinf.terminal import format_bytes, format_count
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.optimizers import make_optimizer
from jaxinf.train.run_file import read_run
from jaxinf.typing import PyTree

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"
PRESETS = {"Llama-2-7b-hf": ("llama", "llama2-7b")}
"""Models of folders that `from` names."""


@dataclass(frozen=True)
class Sizes:
    """What a run takes.

    Attributes:
      num_params: params of the model.
      memory_bytes: of a streamed step; else of buffers, and of JAX's params, gradients,
        updates and new params. Activations and the process are not in it.
      disk_bytes: both slots, and gradients that wait.
      read_bytes, written_bytes: of the drives, in a step.
    """

    num_params: int
    memory_bytes: int
    disk_bytes: int
    read_bytes: int
    written_bytes: int


def sizes_of(config: TrainConfig) -> Sizes:
    """Computes the sizes of a run from its store's layout; writes nothing."""
    params = abstract_params(config.model_config)[1]
    leaves = jax.tree.leaves(params)
    is_streamed, stays = config.mode == "stream", config.resident == "params"
    description = _described(config, params)
    with (
        tempfile.TemporaryDirectory() as place,
        jaxinf.open_store(
            Path(place, "store"),
            csd=config.csd,
            state=config.state,
            master=config.master,
        ) as store,
    ):
        shape = store._training.shape(description)
        disk = sum(required_bytes(shape.directory).values())
        read = written = 0
        for number, leaf in enumerate(leaves):
            kernel = description.leaves[number].kernel
            has_params = stays if is_streamed else can_take(shape, number, leaf.dtype)
            for layout in shape.layouts(number, (0,) * leaf.ndim, leaf.shape):
                loads, stores = moved_states(kernel, layout)
                read += moved_bytes(shape, layout, loads - {0} if has_params else loads)
                written += moved_bytes(shape, layout, stores)
                if is_streamed and not stays:  # forward and backward
                    num_reads = 2 * config.micro_batches
                    read += num_reads * moved_bytes(shape, layout, [0])
    count = num_params(config.model_config)
    if is_streamed:
        waiting = 4 * count if config.clip_norm or config.micro_batches > 1 else 0
        times = config.micro_batches  # a sum is read and written by each part
        disk, read = disk + waiting, read + times * waiting
        written += times * waiting
    arrays = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    memory = config.buffer_bytes + (0 if is_streamed else 4 * arrays)
    return Sizes(count, memory, disk, read, written)


def _described(config: TrainConfig, params: PyTree) -> StoreDescription:
    """Describes the store of a run."""
    compress, tx = config.compression, averaged(make_optimizer(config), config.average)
    update = trace_optimizer(tx, params)
    check_compressed(compress, update)
    return describe(
        update,
        trace_init(tx, params),
        [(1,) * leaf.ndim for leaf in jax.tree.leaves(params)],
        average=config.average,
        has_feedback=keeps_feedback(compress),
        forms=partial(gradient_forms, compress),
    )


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
        sizes, most = sizes_of(run), "at most " if run.mode == "stream" else ""
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
