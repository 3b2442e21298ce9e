"""A training step with the optimizer's state on a drive, beside one in memory.

Both train the same model from the same params on the same tokens in one process, a few
steps each in turns. A step ends when its new params and loss are ready; its commit goes
on during the next. The first step of each turn does not count, so that counted steps
pay for the work left over by others. With --clip-norm updates wait for all gradients,
and only prefetches and writes can overlap with the model. Medians are printed; `ratio`
is the median of the pairs of turns.

    python scripts/bench_train.py --store DIR --preset small --memory 268435456

Bytes are of drives, in a step; what `store.wait` writes after a turn is counted apart.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jaxinf_models import GPT2, PRESETS, abstract_params, split

import jaxinf
from jaxinf.train.config import TrainConfig
from jaxinf.train.step import compile_train_step
from jaxinf.transfer import ByteCounts

IDLE_S = 1.0


class Trainer:
    """One model in training.

    Args:
      arguments: the program's arguments.
      tx: the optimizer.
      boundaries: the division of a step into jits.
    """

    def __init__(
        self, arguments: argparse.Namespace, tx: Any, boundaries: Any = "fused"
    ) -> None:
        config = PRESETS[arguments.preset]
        graphdef, _ = abstract_params(config)
        new_params = jax.jit(lambda: split(GPT2(config, rngs=nnx.Rngs(0)))[1])
        self.params = new_params()
        self.state = tx.init(self.params)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        example = batch(arguments, 0)
        self.compiled: Any = compile_train_step(
            TrainConfig(clip_norm=arguments.clip_norm),
            *(graphdef, tx, boundaries, self.params, self.state, example),
        )

    def turn(self, arguments: argparse.Namespace, first: int) -> None:
        """Runs steps from batch `first` on, of which the first is not counted."""
        for number in range(first, first + arguments.steps + 1):
            self.step(batch(arguments, number))
        del self.seconds[-arguments.steps - 1]

    def step(self, data: dict[str, np.ndarray]) -> None:
        """Runs and times one step."""
        began = time.perf_counter()
        self.params, self.state, (loss, _) = jax.block_until_ready(
            self.compiled(self.params, self.state, data)
        )
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(float(loss))


def batch(arguments: argparse.Namespace, number: int) -> dict[str, np.ndarray]:
    """Returns tokens and targets, the same for the same number."""
    rng = np.random.default_rng(number)
    shape = (arguments.batch_size, arguments.seq_len + 1)
    tokens = rng.integers(PRESETS[arguments.preset].vocab_size, size=shape)
    tokens = tokens.astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def durability(text: str) -> str | int:
    """Returns the durability that a word means."""
    return int(text) if text.isdecimal() else text


def optimizer(clip_norm: float) -> optax.GradientTransformation:
    """Returns adamw, behind clipping if `clip_norm` is not 0."""
    adamw = optax.adamw(3e-4)
    return (
        optax.chain(optax.clip_by_global_norm(clip_norm), adamw)
        if clip_norm
        else (adamw)
    )


def measure(arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Runs both trainers in turns."""
    tx = optimizer(arguments.clip_norm)
    memory = Trainer(arguments, tx, arguments.reference)
    options = {"memory_bytes": arguments.memory, "durability": arguments.durability}
    store = jaxinf.open_store(place / "store", **options)
    update = Trainer(arguments, jaxinf.smart_update(tx, store))
    commits, moved, before = [], [], moved_bytes(store)
    for turn in range(arguments.reps):
        first = turn * (arguments.steps + 1)
        memory.turn(arguments, first)
        update.turn(arguments, first)
        store._engine.join()
        after = moved_bytes(store)
        store.wait()
        moved.append((after - before, moved_bytes(store) - after))
        before = moved_bytes(store)  # what is read ahead from here on is of a step
        metrics = store.metrics_of(first + arguments.steps + 1)
        assert metrics is not None
        commits.append(metrics.commit_s)
        time.sleep(IDLE_S)  # so that no prefetch falls into the other's time
    result = figures(arguments, memory, update) | traffic(arguments, moved)
    store.close()
    return result | {"commit_s": round(statistics.median(commits), 4)}


def moved_bytes(store: jaxinf.Store) -> ByteCounts:
    """Returns the bytes that a store has moved."""
    return store._engine.opened.meters.snapshot()


def traffic(
    arguments: argparse.Namespace, moved: Sequence[tuple[ByteCounts, ByteCounts]]
) -> dict[str, int]:
    """Returns bytes of a step, and those written after a turn, but for the first."""
    moved = moved[1:] or moved
    steps = (arguments.steps + 1) * len(moved)
    return {
        "read_bytes_a_step": sum(own.drive_read_bytes for own, _ in moved) // steps,
        "written_bytes_a_step": sum(own.drive_write_bytes for own, _ in moved) // steps,
        "written_bytes_by_wait": max(beside.drive_write_bytes for _, beside in moved),
    }


def figures(
    arguments: argparse.Namespace, memory: Trainer, update: Trainer
) -> dict[str, Any]:
    """Returns the figures to be printed."""
    memory_s, update_s = (
        [
            statistics.mean(t.seconds[turn * arguments.steps :][: arguments.steps])
            for turn in range(arguments.reps)
        ]
        for t in (memory, update)
    )
    ratios = [u / m for u, m in zip(update_s, memory_s, strict=True)]
    differences = [
        abs(u - m) for u, m in zip(update.losses, memory.losses, strict=True)
    ]
    return {
        "preset": arguments.preset,
        "params": sum(leaf.size for leaf in jax.tree.leaves(memory.params)),
        "clip_norm": arguments.clip_norm,
        "reference": arguments.reference,
        "memory_bytes": arguments.memory,
        "durability": arguments.durability,
        "load_average": round(os.getloadavg()[0], 2),
        "memory_step_s": round(statistics.median(memory_s), 4),
        "update_step_s": round(statistics.median(update_s), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_spread": [round(min(ratios), 4), round(max(ratios), 4)],
        "max_loss_difference": max(differences),
        "losses_identical": max(differences) == 0,
    }


def main() -> None:
    """Prints the figures, or with --json one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, required=True, metavar="DIR")
    parser.add_argument("--preset", choices=[*PRESETS], default="small")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--memory", type=int, default=1 << 30)
    parser.add_argument("--durability", type=durability, default="step")
    parser.add_argument("--clip-norm", type=float, default=0.0, help="0: none")
    parser.add_argument(
        "--reference", choices=("fused", "halves", "split"), default="fused"
    )
    parser.add_argument("--reps", type=int, default=4, help="turns of each")
    parser.add_argument("--steps", type=int, default=2, help="counted in a turn")
    parser.add_argument("--json", action="store_true", help="one line")
    arguments = parser.parse_args()
    arguments.store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=arguments.store, prefix="bench-train-"
    ) as place:
        result = measure(arguments, Path(place))
    print(json.dumps(result, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
