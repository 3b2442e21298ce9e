"""Measures what a training run takes beside its products and bytes.

    models of two blocks ─► their loss and gradient ─► operations a second
    a model of no size ───► runs of the trainer ─────► commits, calls, memory

Invariant: what is written is in a temporary directory, which is removed.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxinf_models import PRESETS, abstract_params

from jaxinf.streaming import CallTime, usual_call, usual_s
from jaxinf.train.step import loss_of

_SEQ_LEN = 128
_BATCH_SIZE = 2
_HEADS = (8, 12)
"""Of 64 features each: a power of two has slower products on a processor."""

_NUM_STEPS, _NUM_FIRST = 24, 4
_TINY = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_positions": 8,
    "n_layer": 6,
    "n_head": 1,
    "n_embd": 32,
}
_SMALLEST = replace(
    PRESETS["nano"], num_positions=8, num_layers=6, num_heads=1, num_features=32
)
"""The model of `_TINY`, as `jaxinf_models` has it."""

_MODES = {
    "memory": (),
    "update": ("--memory", "64MiB"),
    "stream": ("--memory", "64MiB"),
}
_FLAGS = ("--batch-size", "1", "--seq-len", "8", "--sample-bytes", "0")


def measure_call(device: Any) -> CallTime:
    """Returns the usual time of a call with next to nothing to compute; blocks.

    Its operands and operations are as many as those of a block of a model.
    """
    graphdef, params = abstract_params(_SMALLEST)
    tokens = jax.ShapeDtypeStruct((1, _TINY["n_positions"]), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    with jax.default_device(device):
        return usual_call(loss_of(graphdef), params, batch)


class Training(NamedTuple):
    """What runs of the trainer take.

    Attributes:
      commit_s: Seconds of a commit.
      move_s: Seconds of a read or write of a drive, which some threads do together.
      process_bytes: Memory of the process by mode; that of a step is next to nothing. A
        streamed run gives back what planning and compilation took, so for it this is
        the memory while it steps, and for others the most.
    """

    commit_s: float
    move_s: float
    process_bytes: Mapping[str, int]


def measure_programs(device: Any, dtype: str) -> float:
    """Returns the usual operations a second of loss and gradient of models; blocks.

    The usual ones, not the most: others may use the processor, as they will in a run.
    Each width counts alike.
    """
    with jax.default_device(device):
        return statistics.harmonic_mean(_programs(n, dtype) for n in _HEADS)


def _programs(num_heads: int, dtype: str) -> float:
    size = replace(
        PRESETS["small"],
        vocab_size=256,
        num_layers=2,
        num_heads=num_heads,
        num_features=64 * num_heads,
        dtype=dtype,
    )
    graphdef, params = abstract_params(size)
    tokens = jnp.zeros((_BATCH_SIZE, _SEQ_LEN), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    gradients_of = jax.value_and_grad(loss_of(graphdef))
    lowered = jax.jit(gradients_of).lower(params, batch)
    costs: Any = lowered.cost_analysis()
    return float(costs["flops"]) / usual_s(lowered.compile(), (params, batch))


def measure_training(folder: Path) -> Training:
    """Runs the trainer in processes of their own; blocks for some ten seconds.

    Args:
      folder: A directory on the drive for its store.

    Raises:
      ValueError: It fails.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        (place / "tiny.json").write_text(json.dumps(_TINY))
        runs = {mode: _run(place, mode, words) for mode, words in _MODES.items()}
    steps, _ = runs["update"]
    commit_s = statistics.median(one["phases"]["commit"] for one in steps)
    busy_s = statistics.median(sum(s["drives"].values()) * s["step_s"] for s in steps)
    num_moves = 2 * len(jax.tree.leaves(abstract_params(_SMALLEST)[1]))
    process_bytes = {mode: held for mode, (_, held) in runs.items()}
    lines, most = runs["stream"]
    process_bytes["stream"] = min(most, max(one["rss_bytes"] for one in lines))
    return Training(commit_s, busy_s / num_moves, process_bytes)


def _run(place: Path, mode: str, words: Sequence[str]) -> tuple[list[Any], int]:
    """Returns the lines of steps, and the memory of the process."""
    logs = place / f"{mode}-log"
    command = [sys.executable, "-m", "jaxinf.train", "--mode", mode, *words, *_FLAGS]
    command += ["--model-config", str(place / "tiny.json"), "--steps", str(_NUM_STEPS)]
    command += ["--log-dir", str(logs)]
    command += [] if mode == "memory" else ["--store", str(place / mode)]
    with (place / "output").open("w+b") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if status:
            output.seek(0)
            last = output.read().decode(errors="replace").strip().splitlines()[-1:]
            raise ValueError(f"a run of the trainer failed: {' '.join(last)}")
    lines = (logs / "metrics.jsonl").read_text().splitlines()
    unit = 1 if sys.platform == "darwin" else 1024
    return [json.loads(line) for line in lines][_NUM_FIRST:], unit * used.ru_maxrss
