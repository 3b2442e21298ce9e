"""Peak memory of streamed training: at a budget, at the least budget, and by depth.

Each case is some steps of `jaxinf.stream`, AdamW behind clipping by the global norm, in
a process of its own, whose peak of resident memory is printed as one line of JSON.

    python scripts/measure_streaming.py --store /mnt/nvme0/tmp

`over_budget_mib` is the peak without the budget: what Python, JAX, the traced model and
its compiled programs take. `evaluation_mib` is the peak of an evaluation of the loss in
the memory of the step, and `step_after_mib` that of the step after it.
"""

import bisect
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import tyro
from flax import nnx
from jaxinf_models import (
    GPT2,
    PRESETS,
    GPT2Config,
    abstract_params,
    num_params,
    split,
    task_loss,
)

import jaxinf
from jaxinf.errors import StreamError
from jaxinf.streaming import store_memory_bytes
from jaxinf.streaming.plan.memory import divide
from jaxinf.streaming.plan.plan import prepare
from jaxinf.streaming.run import compiled_bytes
from jaxinf.terminal import parse_bytes

MIB = 1 << 20
STEP_BYTES = 8 * MIB


@dataclass(frozen=True)
class Case:
    """One process.

    Attributes:
      store: Directory for the store; removed.
      preset: Size of the GPT-2.
      num_layers: Its layers; 0: those of the preset.
      memory_bytes: The budget.
      steps, seq_len: Of the run; a batch is one sequence.
    """

    store: Path
    preset: str
    num_layers: int = 0
    memory_bytes: int = 0
    steps: int = 3
    seq_len: int = 64


@dataclass(frozen=True)
class Model:
    """A GPT-2 as `jaxinf.stream` takes it."""

    config: GPT2Config
    seq_len: int

    @cached_property
    def graphdef(self) -> Any:
        """The model's graph."""
        return abstract_params(self.config)[0]

    def loss_fn(self, params: Any, batch: Any) -> jax.Array:
        """The mean cross entropy."""
        return task_loss(nnx.merge(self.graphdef, params), "causal-lm", batch)

    def new_params(self) -> Any:
        """Random params."""
        return split(GPT2(self.config, rngs=nnx.Rngs(0)))[1]

    def batch(self) -> dict[str, Any]:
        """One sequence."""
        rng = np.random.default_rng(0)
        shape = (1, self.seq_len + 1)
        tokens = rng.integers(self.config.vocab_size, size=shape, dtype=np.int32)
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def model_of(case: Case) -> Model:
    """The model of a case."""
    config = PRESETS[case.preset]
    if case.num_layers:
        config = replace(config, num_layers=case.num_layers)
    return Model(config, case.seq_len)


def least_bytes(case: Case) -> int:
    """The least budget that the planner accepts, in steps of 8 MiB."""
    model = model_of(case)
    _, like = abstract_params(model.config)
    ready = prepare(model.loss_fn, like, model.batch())
    measure = partial(compiled_bytes, executables={})
    largest = max(ready.lifetimes.sizes[piece] for piece in ready.gradient_pieces)

    def is_accepted(count: int) -> bool:
        memory_bytes = count * STEP_BYTES
        try:
            division = divide(memory_bytes, store_memory_bytes(0), largest)
            ready.plan(division.programs, "recompute", measure)
        except StreamError:
            return False
        return True

    counts = range(1, (16 << 30) // STEP_BYTES)
    return counts[bisect.bisect_left(counts, True, key=is_accepted)] * STEP_BYTES


def peak_of(call: Callable[[], Any]) -> int:
    """Calls a function; returns the peak of resident memory meanwhile, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    jax.block_until_ready(call())
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def run(case: Case) -> dict[str, Any]:
    """Trains in this process, and returns its figures."""
    model = model_of(case)
    batch = model.batch()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    budget = case.memory_bytes
    with jaxinf.stream(model.loss_fn, tx, case.store, memory_bytes=budget) as step:
        seconds, peaks = [], [peak_of(lambda: step.init(model.new_params, batch=batch))]
        for _ in range(case.steps):
            began_s = time.perf_counter()
            peaks.append(peak_of(lambda: step(batch)))
            seconds.append(time.perf_counter() - began_s)
        assert step.plan is not None
        plan, peak = step.plan, max(peaks)
        evaluation = peak_of(lambda: step.function(model.loss_fn)(batch))
        after = peak_of(lambda: step(batch))
    return {
        "preset": case.preset,
        "num_layers": model.config.num_layers,
        "params_mib": round(4 * num_params(model.config) / MIB),
        "budget_mib": round(budget / MIB),
        "peak_mib": round(peak / MIB),
        "over_budget_mib": round((peak - budget) / MIB),
        "evaluation_mib": round(evaluation / MIB),
        "step_after_mib": round(after / MIB),
        "programs": len(plan.calls.programs),
        "calls": len(plan.calls.calls),
        "step_s": round(min(seconds), 2),
    }


def in_child(action: str, case: Case) -> Any:
    """Runs a function of this module in a process of its own."""
    fields = {**asdict(case), "store": str(case.store)}
    command = [sys.executable, __file__, "--child", action, json.dumps(fields)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        shutil.rmtree(case.store, ignore_errors=True)
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(frozen=True)
class Options:
    """Peak memory of streamed training: at a budget, at the least budget, by depth.

    Attributes:
      store: Directory on the drive, for stores that are removed.
      preset: GPT-2 of the first two cases.
      memory: Budget of the first case.
      deep_preset: GPT-2 whose width the models of other depths have.
      layers: These depths.
      deep_memory: Their budget.
      steps: Steps of each case.
    """

    store: Path
    preset: str = "medium"
    memory: str = "1GiB"
    deep_preset: str = "nano"
    layers: tuple[int, ...] = (24, 96)
    deep_memory: str = "128MiB"
    steps: int = 3


def main() -> None:
    """Prints a line for each case."""
    options = tyro.cli(Options, description=__doc__)
    options.store.mkdir(parents=True, exist_ok=True)
    place = options.store / "measure-streaming"
    case = Case(place, options.preset, steps=options.steps)
    least = in_child("least_bytes", case)
    deep_bytes = parse_bytes(options.deep_memory)
    cases = [
        replace(case, memory_bytes=parse_bytes(options.memory)),
        replace(case, memory_bytes=least),
        *(
            replace(
                case,
                preset=options.deep_preset,
                num_layers=num_layers,
                memory_bytes=deep_bytes,
            )
            for num_layers in options.layers
        ),
    ]
    for one in cases:
        print(json.dumps(in_child("run", one)), flush=True)


def child(action: str, text: str) -> None:
    """Prints what a function returns for a case given as JSON."""
    fields = json.loads(text)
    case = Case(**(fields | {"store": Path(fields["store"])}))
    print(json.dumps({"run": run, "least_bytes": least_bytes}[action](case)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
