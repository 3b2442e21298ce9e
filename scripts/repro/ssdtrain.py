"""SSDTrain's measure: peak of activations and time of a step, by policy.

    keep        all values that backward needs stay in memory
    recompute   every segment runs forward again
    offload     all values that can leave are on the drive meanwhile
    … 0.40      as few values as fit in that share of keep's memory are on the drive
    plan 0.40   the same, and what the drive is too slow for is recomputed

The stacks have the shape of the paper's BERT, GPT and T5 (2408.10013): 4 layers and a
hidden size of 8192, the latter divided by 16. Programs have one core, transfers and
Python the other. The drive is held to the write bandwidth that the paper requires of
one: the activations of a step in half its time (section III-D). --limit 0 takes the
drive as it is. The peak is that of values between programs, about which a policy
decides. Temporaries within a program are the same for all; the JSON has them. Times
are of steps of loss and gradients in turns: the median ratio to keep's of the same
round, and its 95 % interval by order statistics. Recomputed work does not count as
throughput.

    python scripts/repro/ssdtrain.py --store DIR
    python scripts/repro/ssdtrain.py --store DIR --batch 1 2 4 8 --rounds 2 --plot F.png

The second draws the ROK curve (section IV-C): a point is a policy at a batch size.
"""

# ruff: noqa: E402

import argparse
import importlib
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

HOST_CORE, DEVICE_CORE = 1, 0
if len(os.sched_getaffinity(0)) > 1 and __name__ == "__main__":
    os.sched_setaffinity(0, {DEVICE_CORE})  # JAX's threads start here

import jax
import jax.numpy as jnp
import numpy as np
from throttled import Server, held_up

from jaxinf.streaming.move.scratch import ScratchFiles, ScratchRun
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.compiled import Executables, measure_memory
from jaxinf.streaming.plan.offload import evict_values
from jaxinf.streaming.plan.order import make_plan
from jaxinf.streaming.plan.recompute import (
    NUM_MEASURED,
    StepTimes,
    segments_to_recompute,
)
from jaxinf.streaming.program.cut import cuts_of
from jaxinf.streaming.program.lifetimes import OrderedProgram, order_program
from jaxinf.streaming.run import Runner
from jaxinf.transfer import page_ceil

sys.path.append(str(Path(__file__).parents[1]))
import bench

PAPER_HIDDEN, SCALE, HEAD = 8192, 16, 64
LIMITS = [1 << n for n in range(28, 22, -1)]
# The memory of keep may be this much above that of the best cuts for keep, which is
# what peaks are compared with.
TOLERANCE = 1.15
MEASURED_STEPS = 3


# --- the stacks --------------------------------------------------------------------


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Layer norm without a bias."""
    centred = x - jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(centred * centred, -1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * scale


def attend(p: Any, x: jax.Array, y: jax.Array, *, is_causal: bool) -> jax.Array:
    """Attention of x over y."""
    batch, length, hidden = x.shape

    def split(z: jax.Array) -> jax.Array:
        return z.reshape(batch, -1, hidden // HEAD, HEAD)

    q, k, v = split(x @ p["q"]), split(y @ p["k"]), split(y @ p["v"])
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k) / math.sqrt(HEAD)
    if is_causal:
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(seen, scores, -1e30)
    mixed = jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores), v)
    return mixed.reshape(batch, length, hidden) @ p["o"]


def mlp(p: Any, x: jax.Array) -> jax.Array:
    """The two-layer perceptron."""
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def bert(params: Any, x: jax.Array) -> jax.Array:
    """Layers with norms after each part."""
    for p in params:
        x = norm(x + attend(p["self"], x, x, is_causal=False), p["n1"])
        x = norm(x + mlp(p, x), p["n2"])
    return x


def gpt(
    params: Any, x: jax.Array, seen: Any = None, *, is_causal: bool = True
) -> jax.Array:
    """Layers with norms before each part, which may attend to what is seen."""
    for p in params:
        z = norm(x, p["n1"])
        x = x + attend(p["self"], z, z, is_causal=is_causal)
        if seen is not None:
            x = x + attend(p["cross"], norm(x, p["n3"]), seen, is_causal=False)
        x = x + mlp(p, norm(x, p["n2"]))
    return x


def t5(params: Any, x: jax.Array) -> jax.Array:
    """An encoder, and a decoder that attends to it; half of the layers each."""
    half = len(params) // 2
    return gpt(params[half:], x, gpt(params[:half], x, is_causal=False))


STACKS: dict[str, Callable[..., jax.Array]] = {"bert": bert, "gpt": gpt, "t5": t5}


def make_params(name: str, hidden: int, layers: int) -> Any:
    """Random params; a decoder's layers have two attentions."""
    rng = np.random.default_rng(0)

    def dense(*shape: int) -> Any:
        scale = 0.5 / math.sqrt(shape[0])
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    def attention() -> Any:
        return {key: dense(hidden, hidden) for key in "qkvo"}

    found = []
    for layer in range(layers):
        one = {"up": dense(hidden, 4 * hidden), "down": dense(4 * hidden, hidden)}
        one |= {key: np.ones(hidden, np.float32) for key in ("n1", "n2")}
        one["self"] = attention()
        if name == "t5" and layer >= layers // 2:
            one |= {"cross": attention(), "n3": np.ones(hidden, np.float32)}
        found.append(one)
    return found


# --- runs --------------------------------------------------------------------------


@dataclass
class Way:
    """A stack's step by a policy, and its times."""

    runner: Runner
    seconds: list[float]


class SlowScratch(ScratchFiles):
    """Values wait on a drive that moves so many bytes a second, one after another."""

    def __init__(self, folders: list[Path], bytes_per_s: float | None) -> None:
        super().__init__(folders)
        self._drive, self._bytes_per_s = Server(), bytes_per_s

    def write(self, part: ScratchRun, *arguments: Any, **named: Any) -> None:
        with held_up((self._drive, part.num_bytes, self._bytes_per_s)):
            super().write(part, *arguments, **named)

    def read(self, part: ScratchRun, *arguments: Any, **named: Any) -> None:
        with held_up((self._drive, part.num_bytes, self._bytes_per_s)):
            super().read(part, *arguments, **named)


class Stack:
    """One stack at one batch size, with a plan's programs for all policies."""

    def __init__(
        self, name: str, arguments: argparse.Namespace, batch: int, place: Path
    ) -> None:
        hidden = arguments.hidden
        params = make_params(name, hidden, arguments.layers)
        rng = np.random.default_rng(1)
        shape = (batch, arguments.length, hidden)
        self.batch = {k: rng.standard_normal(shape).astype(np.float32) for k in "xy"}

        def loss(params: Any, batch: Any) -> jax.Array:
            return jnp.mean((STACKS[name](params, batch["x"]) - batch["y"]) ** 2)

        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(params)]
        self.leaves = leaves
        self.place = place
        self.ready: OrderedProgram = order_program(loss, params, self.batch)
        self.cuts = {cuts_of(self.ready, n): None for n in LIMITS}
        self.plan, self.most_bytes = self._cut()
        self.executables = Executables()
        self.plan = measure_memory(self.plan, self.executables)
        self.keep = self._way(make_plan(self.ready, self.plan.cuts, "keep"))
        # The drive's bandwidth, from the time of a step that keeps its values.
        times = [self.step(self.keep) for _ in range(1 + MEASURED_STEPS)]
        half_s = statistics.median(times[1:]) / 2
        rate = arguments.limit * self.most_bytes / half_s
        self.bytes_per_s = rate or None

    def _cut(self) -> tuple[Plan, int]:
        """The cuts with which offloading saves most, and the lowest peak of keep.

        The cuts are among those that suit keep.
        """
        make = partial(make_plan, self.ready, policy="offload")
        plans = [make(cuts) for cuts in self.cuts]
        least = min(map(peak, plans))
        good = [plan for plan in plans if peak(plan) <= TOLERANCE * least]
        best = min(good, key=lambda plan: peak(evict_values(plan, 0, value_bytes)))
        return best, least

    def _way(self, plan: Plan, values: Values | None = None) -> Way:
        return Way(Runner(plan, self.executables, values=values), [])

    def ways(self, shares: list[float]) -> dict[str, Way]:
        """Keep, recompute, offload all, and as few as fit in shares of keep's memory.

        Recompute has the cuts with which its peak is lowest. With "plan" some of what
        leaves in the last is recomputed, by measured steps, if any should be.
        """
        plans = [make_plan(self.ready, cuts, "recompute") for cuts in self.cuts]
        found = {"keep": self.keep, "recompute": self._way(min(plans, key=peak))}
        budgets = {f"offload {one:.2f}": int(one * self.most_bytes) for one in shares}
        for name, budget in {"offload": 0, **budgets}.items():
            plan = evict_values(self.plan, budget, value_bytes)
            if not budget or peak(plan) <= budget:
                found[name] = self._offloaded(plan)
        for name in [name for name in found if name.startswith("offload ")]:
            recomputed = self._to_recompute(found[name])
            plan = make_plan(self.ready, self.plan.cuts, "plan", recomputed=recomputed)
            plan = evict_values(plan, budgets[name], value_bytes)
            if recomputed and peak(plan) <= budgets[name]:
                found[name.replace("offload", "plan")] = self._offloaded(plan)
        return found

    def _offloaded(self, plan: Plan) -> Way:
        scratch = SlowScratch([self.place], self.bytes_per_s)
        return self._way(plan, Values(plan, scratch))

    def _to_recompute(self, way: Way) -> frozenset[int]:
        """The segments that ``policy="plan"`` recomputes, by measured steps."""
        times = []
        for _ in range(1 + NUM_MEASURED):
            self.step(way, max_in_flight=1)
            runner = way.runner
            times.append(StepTimes([*runner.call_s], [*runner.waited_inputs_s]))
        return segments_to_recompute(way.runner.plan, times[1:])

    def step(self, way: Way, **how: Any) -> float:
        """Seconds of a step."""
        began_s = time.perf_counter()
        loss, _ = way.runner(
            self.batch,
            lambda number, piece: piece.of(self.leaves[piece.leaf]),
            lambda piece, gradient: None,
            **how,
        )
        assert loss is not None, "a step has a loss"
        loss.block_until_ready()
        return time.perf_counter() - began_s


def peak(plan: Plan) -> int:
    """The most bytes of values."""
    return max(value_bytes(plan))


def value_bytes(plan: Plan) -> list[int]:
    """Bytes of values during each call: held ones, new ones, and those of the next."""
    made = [0] * (len(plan.calls) + 1)
    for life in plan.lives.values():
        made[life.made] += life.num_bytes
    held = plan.value_bytes()
    return [own + made[n] + made[n + 1] for n, own in enumerate(held)]


def compared(stack: Stack, arguments: argparse.Namespace) -> dict[str, Any]:
    """Peaks and times, over those of keep; every other round the other way round."""
    ways = stack.ways(arguments.share)
    for way in ways.values():
        stack.step(way)
    for turn in range(arguments.rounds):
        for way in [*ways.values()][:: 1 if turn % 2 else -1]:
            way.seconds.append(stack.step(way))
    found = {}
    for name, way in ways.items():
        plan = way.runner.plan
        lives = [plan.lives[value] for value in plan.evictions]
        found[name] = {
            "peak_bytes": peak(plan),
            "peak_ratio": round(peak(plan) / stack.most_bytes, 4),
            **bench.ratios("time_ratio", way.seconds, stack.keep.seconds),
            "step_s": round(statistics.median(way.seconds), 4),
            "written_bytes": sum(page_ceil(life.num_bytes) for life in lives),
            "temporary_bytes": max((stack.plan.temp_bytes or {}).values()),
        }
        way.runner.values.close()
    return found


def measure(arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Measures all policies of all stacks and batch sizes."""
    if arguments.plot is not None:  # an extra, which is missed before the runs
        importlib.import_module("matplotlib")
    jnp.zeros(1).block_until_ready()  # JAX's threads now have their core
    if len(os.sched_getaffinity(0)) == 1 and (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {HOST_CORE})
    points = {}
    for name in arguments.stack:
        for batch in arguments.batch:
            stack = Stack(name, arguments, batch, place)
            points[f"{name} {batch}"] = compared(stack, arguments)
            print(f"{name} x {batch} is measured", file=sys.stderr)
    if arguments.plot is not None:
        plot(points, arguments.plot)
    sizes = {n: getattr(arguments, n) for n in ("length", "hidden", "layers", "rounds")}
    return {**sizes, "load_average": bench.load_average(), "points": points}


# --- what is shown ------------------------------------------------------------------


def show(found: dict[str, Any]) -> None:
    """Prints a table of policies for each stack, beside what the paper states."""
    print("published: peak -28 to -40 %, -47 % at most, almost no time (2408.10013)")
    for where, point in found["points"].items():
        columns = ("peak MiB", "of keep", "s/step", "of keep")
        print(f"\n{where:14}", *(f"{name:>9}" for name in columns))
        for policy, one in point.items():
            low, high = one["time_ratio_interval"]
            cells = one["peak_bytes"] / 2**20, one["peak_ratio"], one["step_s"]
            texts = (f"{cell:9.3f}" for cell in (*cells, one["time_ratio"]))
            print(f"{policy:14}", *texts, f"[{low:.3f}, {high:.3f}]")


def plot(points: dict[str, dict[str, Any]], path: Path) -> None:
    """Draws throughput over the peak, with a panel for each stack.

    Measures are by stack and batch size, such as ``gpt 4``, and by policy.
    """
    import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]: an extra

    stacks = list(dict.fromkeys(where.split()[0] for where in points))
    figure, panels = plt.subplots(
        1, len(stacks), figsize=(3.4 * len(stacks), 3.2), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for stack, axes in zip(stacks, panels.flat, strict=True):
        own = {w.split()[1]: one for w, one in points.items() if w.split()[0] == stack}
        for name in dict.fromkeys(name for one in own.values() for name in one):
            measures = {batch: one[name] for batch, one in own.items() if name in one}
            peaks = [one["peak_bytes"] / 2**20 for one in measures.values()]
            rates = [1 / one["time_ratio"] for one in measures.values()]
            axes.plot(peaks, rates, "o-", label=name, markersize=4)
            if name in ("keep", "offload"):
                for batch, x, y in zip(measures, peaks, rates, strict=True):
                    place = {"textcoords": "offset points", "xytext": (0, 6)}
                    axes.annotate(batch, (x, y), fontsize=7, **place)
        axes.set_title(stack.upper(), fontsize=10)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_ylim(0, 1.2)
        axes.grid(alpha=0.3)
    panels.flat[0].set_ylabel("throughput over keep's")
    panels.flat[-1].legend(fontsize=7, loc="lower right")
    figure.supxlabel("peak of values, MiB (numbers: batch size)", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    bench.run(
        __doc__,
        measure,
        show,
        limit={"type": float, "default": 1.0, "help": "of the drive; 0: none"},
        rounds=50,
        batch={"type": int, "nargs": "+", "default": [4]},
        length=256,
        hidden=PAPER_HIDDEN // SCALE,
        layers=4,
        stack={"nargs": "+", "choices": STACKS, "default": list(STACKS)},
        share={"type": float, "nargs": "+", "default": [0.40, 0.53]},
        plot={"type": Path, "help": "picture of the ROK curve"},
    )
