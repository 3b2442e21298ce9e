"""SSDTrain's measure: peak of activations and time of a step, by policy.

    keep        all values that backward needs stay in memory
    recompute   every segment runs forward again
    offload     all values that can leave are on the drive meanwhile
    … 0.40      as few values as fit in that share of keep's memory are on the drive

The stacks have the shape of the paper's BERT, GPT and T5 (2408.10013): 4 layers and a
hidden size of 8192, the latter divided by 16. Programs have one core, transfers and
Python the other. The drive is held to the write bandwidth that the paper requires of
one: the activations of a step in half its time (section III-D). --limit 0 takes the
drive as it is. The peak is that of values between programs, about which a policy
decides. Temporaries within a program are the same for all; the JSON has them. Times
are of steps of loss and gradients in turns: the median ratio to keep's of the same
round, and its 95 % interval by order statistics.
--rok measures all policies at batch sizes 1 to 8 instead (the ROK curve, section IV-C);
recompute has cuts of its own there, those with the lowest peak. Without options the
script takes some minutes on a quiet machine.
"""

# ruff: noqa: E402

import argparse
import json
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
import rok
from throttled import Passage, Server, held_up

from jaxinf.streaming.move.params import MemoryParams
from jaxinf.streaming.move.scratch import Scratch, ScratchRun
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.compiled import Executables, measured
from jaxinf.streaming.plan.fit import Prepared, plan_of, prepare
from jaxinf.streaming.plan.leaving import fitted
from jaxinf.streaming.program.cut import choose_cuts
from jaxinf.streaming.run import Runner
from jaxinf.transfer import page_ceil

sys.path.append(str(Path(__file__).parents[1]))
from ratios import interval

PAPER_HIDDEN, SCALE, LAYERS, HEAD = 8192, 16, 4, 64
SHARES = [0.40, 0.53]
LIMITS = [1 << n for n in range(28, 22, -1)]
# The memory of keep may be this much above that of the best cuts for keep, which is
# what peaks are compared with.
TOLERANCE = 1.15
MEASURED_STEPS = 3
PUBLISHED = "peak -28 to -40 %, -47 % at most, almost no time (2408.10013)"


# --- the stacks --------------------------------------------------------------------


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Layer norm without a bias."""
    centred = x - jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(centred * centred, -1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * scale


def attend(p: Any, x: jax.Array, y: jax.Array, *, is_causal: bool) -> jax.Array:
    """Attention of x over y."""
    batch, length, hidden = x.shape
    heads = hidden // HEAD

    def split(z: jax.Array) -> jax.Array:
        return z.reshape(batch, -1, heads, HEAD)

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


def gpt(params: Any, x: jax.Array) -> jax.Array:
    """Causal layers with norms before each part."""
    for p in params:
        z = norm(x, p["n1"])
        x = x + attend(p["self"], z, z, is_causal=True)
        x = x + mlp(p, norm(x, p["n2"]))
    return x


def t5(params: Any, x: jax.Array) -> jax.Array:
    """An encoder, and a decoder that attends to it; half of the layers each."""
    half = len(params) // 2
    seen = x
    for p in params[:half]:
        z = norm(seen, p["n1"])
        seen = seen + attend(p["self"], z, z, is_causal=False)
        seen = seen + mlp(p, norm(seen, p["n2"]))
    for p in params[half:]:
        z = norm(x, p["n1"])
        x = x + attend(p["self"], z, z, is_causal=True)
        x = x + attend(p["cross"], norm(x, p["n3"]), seen, is_causal=False)
        x = x + mlp(p, norm(x, p["n2"]))
    return x


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
class Policy:
    """A way to run a stack's step, and its times."""

    name: str
    runner: Runner
    seconds: list[float]

    @property
    def peak_bytes(self) -> int:
        """The most bytes of values in a step."""
        return max(value_bytes(self.runner.plan))


class SlowScratch(Scratch):
    """Values wait on a drive that moves so many bytes a second, one after another."""

    def __init__(self, folders: list[Path], drive: Server, bytes_per_s: float) -> None:
        super().__init__(folders)
        self._drive = drive
        self._bytes_per_s = bytes_per_s if math.isfinite(bytes_per_s) else None

    def write(self, part: ScratchRun, *arguments: Any, **named: Any) -> None:
        """As `Scratch.write`."""
        with held_up(Passage(self._drive, part.num_bytes, self._bytes_per_s)):
            super().write(part, *arguments, **named)

    def read(self, part: ScratchRun, *arguments: Any, **named: Any) -> None:
        """As `Scratch.read`."""
        with held_up(Passage(self._drive, part.num_bytes, self._bytes_per_s)):
            super().read(part, *arguments, **named)


class Stack:
    """One stack at one batch size, with a plan's programs for all policies."""

    def __init__(self, name: str, arguments: argparse.Namespace, batch: int) -> None:
        hidden, layers = arguments.hidden, arguments.layers
        params = make_params(name, hidden, layers)
        rng = np.random.default_rng(1)
        shape = (batch, arguments.length, hidden)
        self.batch = {k: rng.standard_normal(shape).astype(np.float32) for k in "xy"}

        def loss(params: Any, batch: Any) -> jax.Array:
            return jnp.mean((STACKS[name](params, batch["x"]) - batch["y"]) ** 2)

        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(params)]
        self.params = MemoryParams(lambda: leaves)
        self.params.begin()
        self.name, self.place = name, arguments.store
        self.ready: Prepared = prepare(loss, params, self.batch)
        self.plan, self.most_bytes = self._cut()
        self.executables: Executables = {}
        self.plan = measured(self.plan, self.executables)
        self.keep = self.policy("keep", self.planned("keep"))
        self.drive, self.bytes_per_s = Server(), self._measured(arguments.limit)

    def _cut(self) -> tuple[Plan, int]:
        """The cuts with which offloading saves most, and the lowest peak of keep.

        The cuts are among those that suit keep.
        """
        make = partial(plan_of, self.ready, policy="offload")
        plans = {cuts: make(cuts) for cuts in self._all_cuts()}
        kept = {cuts: max(value_bytes(plan)) for cuts, plan in plans.items()}
        least = min(kept.values())
        good = [cuts for cuts, most in kept.items() if most <= TOLERANCE * least]
        return plans[min(good, key=lambda cuts: least_bytes(plans[cuts]))], least

    def _all_cuts(self) -> list[tuple[int, ...]]:
        """Cuts to choose from, from long segments to short ones."""
        times, tokens = self.ready.lifetimes, self.ready.tokens
        return list(dict.fromkeys(choose_cuts(times, tokens, n) for n in LIMITS))

    def planned(self, policy: Any) -> Plan:
        """The plan with the same programs under another policy."""
        return plan_of(self.ready, self.plan.cuts, policy)

    def policy(self, name: str, plan: Plan, values: Values | None = None) -> Policy:
        """A policy, compiled."""
        return Policy(name, Runner(plan, self.executables, values=values), [])

    def leaving(self, name: str, plan: Plan) -> Policy:
        """A policy whose values may leave for the drive."""
        scratch = SlowScratch([self.place], self.drive, self.bytes_per_s)
        return self.policy(name, plan, Values(plan, scratch))

    def chosen(self, share: float) -> Policy:
        """Offload in a share of keep's memory; ends the program if it does not fit."""
        policy = self.find(share)
        if policy is None:
            sys.exit(
                f"{self.name}: {share:.2f} of {self.most_bytes} bytes, but no "
                f"plan takes less than {least_bytes(self.plan)}"
            )
        return policy

    def find(self, share: float) -> Policy | None:
        """Offload in a share of keep's memory; None if it does not fit."""
        budget = int(share * self.most_bytes)
        found = fitted(self.plan, budget, value_bytes)
        if max(value_bytes(found)) > budget:
            return None
        return self.leaving(f"offload {share:.2f}", found)

    def recompute(self) -> Policy:
        """Recomputation of all segments, at the cuts with which its peak is lowest."""
        plans = [plan_of(self.ready, cuts, "recompute") for cuts in self._all_cuts()]
        best = min(plans, key=lambda plan: max(value_bytes(plan)))
        return self.policy("recompute", best)

    def step(self, policy: Policy) -> float:
        """Seconds of a step."""
        began_s = time.perf_counter()
        loss, _ = policy.runner(self.batch, self.params, lambda piece, gradient: None)
        assert loss is not None, "a step has a loss"
        loss.block_until_ready()
        return time.perf_counter() - began_s

    def _measured(self, limit: float) -> float:
        """The drive's bandwidth, from the time of a step that keeps its values."""
        times = [self.step(self.keep) for _ in range(1 + MEASURED_STEPS)]
        half_s = statistics.median(times[1:]) / 2
        return limit * self.most_bytes / half_s if limit else math.inf


def least_bytes(plan: Plan) -> int:
    """Peak of values if all that can are on the drive meanwhile."""
    return max(value_bytes(fitted(plan, 0, value_bytes)))


def value_bytes(plan: Plan) -> list[int]:
    """Bytes of values during each call: held ones, new ones, and those of the next."""
    made = [0] * (len(plan.calls) + 1)
    for life in plan.lives.values():
        made[life.made] += life.num_bytes
    held = plan.held_bytes()
    return [own + made[n] + made[n + 1] for n, own in enumerate(held)]


def in_turns(stack: Stack, policies: list[Policy], rounds: int) -> None:
    """Steps of all policies in turns; every other round the other way round."""
    for policy in policies:
        stack.step(policy)
    for turn in range(rounds):
        order = policies if turn % 2 else policies[::-1]
        for policy in order:
            policy.seconds.append(stack.step(policy))


def written_bytes(plan: Plan) -> int:
    """Bytes that a step writes, and reads again, at most."""
    return sum(page_ceil(plan.lives[slot].num_bytes) for slot in plan.evictions)


def compared(stack: Stack, policies: list[Policy]) -> dict[str, Any]:
    """Peaks and times, over those of keep."""
    keep = stack.keep
    found = {}
    for policy in policies:
        pairs = zip(policy.seconds, keep.seconds, strict=True)
        ratios = [own / kept for own, kept in pairs]
        ratio, (low, high) = statistics.median(ratios), interval(ratios)
        one: dict[str, Any] = {
            "peak_bytes": policy.peak_bytes,
            "peak_ratio": round(policy.peak_bytes / stack.most_bytes, 4),
            "time_ratio": round(ratio, 4),
            "time_interval": [round(low, 4), round(high, 4)],
            "step_s": round(statistics.median(policy.seconds), 4),
            "written_bytes": written_bytes(policy.runner.plan),
            "temporary_bytes": max((stack.plan.temp_bytes or {}).values()),
        }
        found[policy.name] = one
    return found


def show(name: str, found: dict[str, Any]) -> None:
    """Prints a table of policies."""
    print(f"\n{name:14} {'peak MiB':>9} {'of keep':>8} {'s/step':>8} {'of keep':>20}")
    for policy, one in found.items():
        low, high = one["time_interval"]
        print(
            f"{policy:14} {one['peak_bytes'] / 2**20:9.1f} {one['peak_ratio']:8.2f} "
            f"{one['step_s']:8.3f} {one['time_ratio']:6.3f} [{low:.3f}, {high:.3f}]"
        )


def curve(arguments: argparse.Namespace) -> dict[str, Any]:
    """The ROK curve: all policies at batch sizes 1 to 8."""
    points: dict[str, Any] = {}
    for name in arguments.stack:
        for batch in (1, 2, 4, 8):
            stack = Stack(name, arguments, batch)
            policies = all_policies(stack, arguments.share)
            in_turns(stack, policies, arguments.rok)
            found = points[f"{name} {batch}"] = compared(stack, policies)
            show(f"{name} x {batch}", found)
            for policy in policies:
                policy.runner.values.close()
    return {"points": points, "statements": rok.statements(points)}


def all_policies(stack: Stack, shares: list[float]) -> list[Policy]:
    """Keep, recompute, offload all, and as few as fit in shares of keep's memory."""
    least = fitted(stack.plan, 0, value_bytes)
    planned = (stack.find(share) for share in shares)
    return [
        stack.keep,
        stack.recompute(),
        stack.leaving("offload", least),
        *(policy for policy in planned if policy is not None),
    ]


def described(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sizes of the stacks."""
    names = ("length", "hidden", "layers")
    sizes: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    return sizes | {"scale": PAPER_HIDDEN / arguments.hidden}


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--store", type=Path, required=True, help="place on the drive")
    parser.add_argument("--json", action="store_true", help="print JSON at the end")
    parser.add_argument(
        "--limit", type=float, default=1.0, help="of the drive; 0: none"
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=PAPER_HIDDEN // SCALE)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--stack", nargs="+", choices=STACKS, default=list(STACKS))
    parser.add_argument("--share", type=float, nargs="+", default=SHARES)
    parser.add_argument(
        "--rok", type=int, nargs="?", const=5, metavar="ROUNDS", help="the ROK curve"
    )
    parser.add_argument("--plot", type=Path, help="picture of the ROK curve")
    arguments = parser.parse_args()
    if arguments.plot is not None and arguments.rok is None:
        parser.error("--plot: it draws the ROK curve; give --rok")
    return arguments


def main() -> None:
    """Measures all stacks."""
    arguments = parse()
    arguments.store.mkdir(parents=True, exist_ok=True)
    jnp.zeros(1).block_until_ready()  # JAX's threads now have their core
    if len(os.sched_getaffinity(0)) == 1 and (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {HOST_CORE})
        print(f"programs on core {DEVICE_CORE}, Python and transfers on {HOST_CORE}")
    if arguments.rok is not None:
        found = described(arguments) | {"rounds": arguments.rok} | curve(arguments)
        rok.show(found["points"], arguments.plot)
        if arguments.json:
            print(json.dumps(found))
        return
    print(f"published: {PUBLISHED}")
    stacks = {}
    for name in arguments.stack:
        stack = Stack(name, arguments, arguments.batch)
        policies = [stack.keep, *(stack.chosen(share) for share in arguments.share)]
        in_turns(stack, policies, arguments.rounds)
        stacks[name] = compared(stack, policies)
        stacks[name]["drive_bytes_per_s"] = stack.bytes_per_s
        show(name, {p.name: stacks[name][p.name] for p in policies})
        for policy in policies:
            policy.runner.values.close()
    found = described(arguments) | {"batch": arguments.batch}
    found |= {"rounds": arguments.rounds}
    worst = {}
    for share in arguments.share:
        ones = [one[f"offload {share:.2f}"] for one in stacks.values()]
        worst[share] = {
            "peak_ratio": max(one["peak_ratio"] for one in ones),
            "time_ratio": max(one["time_ratio"] for one in ones),
            "time_ratio_upper": max(one["time_interval"][1] for one in ones),
        }
    found |= {**worst[arguments.share[0]], "shares": worst}
    found |= {"load_average": round(os.getloadavg()[0], 2), "stacks": stacks}
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
