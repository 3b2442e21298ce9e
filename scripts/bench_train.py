"""A training step with the optimizer's state on a drive, beside one in memory.

Both train the same model from the same params on the same tokens in one process, a few
steps each in turns. A step ends when its new params and loss are ready; its commit goes
on during the next. The first step of each turn does not count, so that counted steps
pay for the work left over by others. With --clip-norm updates wait for all gradients,
and only prefetches and writes can overlap with the model. Medians are printed; `ratio`
is the median of the pairs of turns.

    python scripts/bench_train.py --store DIR --preset small --memory 256MiB

Bytes are of drives, in a step; what `store.wait` writes after a turn is counted apart.
`device_peak_bytes` are of the accelerator, as JAX counts them, if there is one.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench
import jax
import numpy as np
import optax
from flax import nnx
from jaxinf_models import GPT2, PRESETS, abstract_params, loss, split

import jaxinf
from jaxinf.engine import engine_of
from jaxinf.train.config import TrainConfig
from jaxinf.train.step import compile_train_step

IDLE_S = 1.0
OPTIONS: dict[str, Any] = {
    "preset": {"choices": [*PRESETS], "default": "small"},
    "batch_size": 4,
    "seq_len": 256,
    "clip_norm": {"type": float, "default": 0.0, "help": "0: none"},
}


def model(preset: str) -> tuple[Callable[..., jax.Array], Callable[[], Any]]:
    """Returns the loss function of a GPT-2, and what makes its params."""
    config = PRESETS[preset]
    graphdef, _ = abstract_params(config)

    def loss_fn(params: Any, data: Any) -> jax.Array:
        return loss(nnx.merge(graphdef, params), data["tokens"], data["targets"])

    return loss_fn, lambda: split(GPT2(config, rngs=nnx.Rngs(0)))[1]


class Trainer:
    """One model in training by a jit, with `tx` in memory or near storage."""

    def __init__(self, arguments: argparse.Namespace, tx: Any) -> None:
        graphdef, _ = abstract_params(PRESETS[arguments.preset])
        self.params = jax.jit(model(arguments.preset)[1])()
        self.state = tx.init(self.params)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        made = self.params, self.state, batch_of(arguments, 0)
        own = TrainConfig(clip_norm=arguments.clip_norm)
        self.compiled: Any = compile_train_step(own, graphdef, tx, *made, is_fused=True)

    def turn(self, arguments: argparse.Namespace, first: int, num_steps: int) -> None:
        """Runs steps from batch `first` on; notes the mean without the first one."""
        seconds = []
        for number in range(first, first + num_steps + 1):
            began = time.perf_counter()
            self.params, self.state, (loss, _) = jax.block_until_ready(
                self.compiled(self.params, self.state, batch_of(arguments, number))
            )
            seconds.append(time.perf_counter() - began)
            self.losses.append(float(loss))
        self.seconds.append(statistics.mean(seconds[1:]))


def batch_of(arguments: Any, number: int) -> dict[str, np.ndarray]:
    """Returns tokens and targets, the same for the same number."""
    shape = arguments.batch_size, arguments.seq_len + 1
    most = PRESETS[arguments.preset].vocab_size
    tokens = np.random.default_rng(number).integers(most, size=shape).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def optimizer(clip_norm: float) -> optax.GradientTransformation:
    """Returns adamw, behind clipping if `clip_norm` is not 0."""
    clip = [optax.clip_by_global_norm(clip_norm)] if clip_norm else []
    return optax.chain(*clip, optax.adamw(3e-4))


def measure(arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Runs both trainers in turns."""
    tx, num_steps = optimizer(arguments.clip_norm), arguments.steps
    memory = Trainer(arguments, tx)
    options = {"memory_bytes": arguments.memory, "durability": arguments.durability}
    store = jaxinf.open_store(place / "store", **options)
    update = Trainer(arguments, jaxinf.smart_update(tx, store))
    meters = engine_of(store).files.meters
    commits, moved, before = [], [], meters.snapshot()
    for turn in range(arguments.reps):
        first = turn * (num_steps + 1)
        memory.turn(arguments, first, num_steps)
        update.turn(arguments, first, num_steps)
        engine_of(store).steps.join()
        after = meters.snapshot()
        store.wait()
        moved.append((after - before, meters.snapshot() - after))
        before = meters.snapshot()  # what is read ahead from here on is of a step
        metrics = store.metrics_of(first + num_steps + 1)
        assert metrics is not None
        commits.append(metrics.commit_s)
        time.sleep(IDLE_S)  # so that no prefetch falls into the other's time
    store.close()
    own, waited = zip(*(moved[1:] or moved), strict=True)
    pairs = zip(update.losses, memory.losses, strict=True)
    count = (num_steps + 1) * len(own)
    device = jax.devices()[0].memory_stats() or {}
    return bench.rounded(
        {
            **{n: getattr(arguments, n) for n in ("preset", "clip_norm", "durability")},
            "memory_bytes": arguments.memory,
            "params": sum(leaf.size for leaf in jax.tree.leaves(memory.params)),
            "load_average": bench.load_average(),
            "memory_step_s": statistics.median(memory.seconds),
            "update_step_s": statistics.median(update.seconds),
            **bench.ratios("ratio", update.seconds, memory.seconds),
            "max_loss_difference": max(abs(u - m) for u, m in pairs),
            "read_bytes_a_step": sum(one.drive_read_bytes for one in own) // count,
            "written_bytes_a_step": sum(one.drive_write_bytes for one in own) // count,
            "written_bytes_by_wait": max(one.drive_write_bytes for one in waited),
            "commit_s": statistics.median(commits),
            "device_peak_bytes": device.get("peak_bytes_in_use"),
        }
    )


if __name__ == "__main__":
    bench.run(
        __doc__,
        measure,
        **OPTIONS,
        memory=bench.SIZE | {"default": 1 << 30},
        durability={
            "type": lambda x: int(x) if x.isdecimal() else x,
            "default": "step",
        },
        reps=4,
        steps=2,
    )
