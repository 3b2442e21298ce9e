"""The longest sequence that a GPT-shaped stack takes in a given memory, by policy.

    python scripts/longest_sequence.py --store DIR

The stack is that of scripts/repro_ssdtrain.py, trained by SGD with
`jaxinf.stream_in_memory`, one sequence at a time. Its attention makes all scores of a
layer at once: 4 x heads x length^2 bytes. --chunk computes it for so many queries at a
time, and again in backward, so that memory is linear in the length. Lengths are tried
in steps of --grain; a length is taken if its programs are compiled and planned within
the memory. --run trains one step at the longest length, in a process of its own, and
prints its time and the growth of the process's resident memory beside the budget of the
plan. --policy and --length train one step of that length instead, without a search.
--turns and --length train steps of all policies in turns, "plan" included. If --memory
is too small for one, it gets twice as much until that is enough.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from repro_ssdtrain import HEAD, attend, make_params, mlp, norm

import jaxinf
from jaxinf.errors import StreamError
from jaxinf.streaming import budgets
from jaxinf.streaming.plan.forms import FORMS
from jaxinf.terminal import format_bytes, parse_bytes

budgets.MOST_PLANS = 0  # lengths are searched here, not budgets

POLICIES = ("keep", "recompute", "offload")
LEAVING = ("offload", "plan")
# A plan is made of what the first steps measure.
NUM_FIRST = 4


def chunked(p: Any, x: jax.Array, chunk: int) -> jax.Array:
    """Causal attention for `chunk` queries at a time."""
    batch, length, hidden = x.shape
    shape = (batch, length, hidden // HEAD, HEAD)
    q, k, v = ((x @ p[name]).reshape(shape) for name in "qkv")
    places = jnp.arange(length)

    @jax.checkpoint
    def some(own: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, at = own
        scores = jnp.einsum("bqnd,bknd->bnqk", queries, k) / np.sqrt(HEAD)
        scores = jnp.where(at[:, None] >= places, scores, -1e30)
        return jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores), v)

    parts = q.reshape(batch, -1, chunk, *shape[2:]).swapaxes(0, 1)
    mixed = jax.lax.map(some, (parts, places.reshape(-1, chunk)))
    return mixed.swapaxes(0, 1).reshape(x.shape) @ p["o"]


class Stack:
    """The stack of one run, and its step."""

    def __init__(
        self, arguments: argparse.Namespace, policy: Any, memory_bytes: int = 0
    ) -> None:
        self.hidden, self.chunk = arguments.hidden, arguments.chunk
        self.params = make_params("gpt", self.hidden, arguments.layers)
        self.step = jaxinf.stream_in_memory(
            self.loss,
            optax.sgd(0.1),
            memory_bytes=memory_bytes or arguments.memory,
            policy=policy,
            activations=arguments.activations if policy in LEAVING else None,
            scratch=arguments.store,
        )
        self.step.load(self.params)

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """The mean square of the difference to a target."""
        x = batch["x"]
        for p in params:
            z = norm(x, p["n1"])
            if self.chunk:
                x = x + chunked(p["self"], z, self.chunk)
            else:
                x = x + attend(p["self"], z, z, is_causal=True)
            x = x + mlp(p, norm(x, p["n2"]))
        return jnp.mean((x - batch["y"]) ** 2)

    def fits(self, length: int) -> bool:
        """Whether a plan of the length fits; compiles it."""
        shape = jax.ShapeDtypeStruct((1, length, self.hidden), np.float32)
        try:
            self.step.compile({"x": shape, "y": shape})
        except StreamError:
            return False
        finally:
            self.step.close()
        return True

    def batch(self, length: int) -> dict[str, np.ndarray]:
        """A sequence and its target, of shape `(1, length, hidden)`."""
        rng = np.random.default_rng(1)
        shape = (1, length, self.hidden)
        return {k: rng.standard_normal(shape).astype(np.float32) for k in "xy"}

    def seconds(self, batch: dict[str, np.ndarray]) -> float:
        """Seconds of a step."""
        began_s = time.perf_counter()
        loss, _ = self.step(batch)
        assert np.isfinite(float(loss))
        return time.perf_counter() - began_s

    def run(self, length: int) -> dict[str, Any]:
        """Trains one step; returns its time, traffic and memory."""
        batch = self.batch(length)
        self.step.compile(batch)
        Path("/proc/self/clear_refs").write_text("5")
        before, step_s = status_bytes("VmRSS"), self.seconds(batch)
        return {
            "step_s": round(step_s, 1),
            "grown_bytes": status_bytes("VmHWM") - before,
            "written_bytes": self.written_bytes,
        }

    @property
    def written_bytes(self) -> int:
        """Bytes that a step writes to the drive."""
        traffic = self.step.traffic
        return 0 if traffic is None else traffic.drive_write_bytes


def status_bytes(name: str) -> int:
    """A size from the process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(name))
    return int(line.split()[1]) << 10


def longest(arguments: argparse.Namespace, policy: str) -> int:
    """The longest length in steps of the grain; 0 if not even that fits."""
    low, high = 0, 1
    while Stack(arguments, policy).fits(high * arguments.grain):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if Stack(arguments, policy).fits(middle * arguments.grain):
            low = middle
        else:
            high = middle
    return low * arguments.grain


def in_process(policy: str, length: int) -> dict[str, Any]:
    """Trains a step in a process of its own, with the same arguments."""
    command = [sys.executable, *sys.argv, "--policy", policy, "--length", str(length)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def fitting(arguments: argparse.Namespace, policy: str) -> tuple[Stack, int]:
    """A stack whose plan fits, and its memory."""
    memory_bytes = arguments.memory
    while True:
        stack = Stack(arguments, policy, memory_bytes)
        try:
            stack.step.compile(stack.batch(arguments.length))
        except StreamError:
            stack.step.close()
            memory_bytes *= 2
        else:
            return stack, memory_bytes


def in_turns(arguments: argparse.Namespace) -> dict[str, Any]:
    """Times and traffic of steps of all policies, one after another in each turn."""
    stacks = {name: fitting(arguments, name) for name in (*POLICIES, "plan")}
    times: dict[str, list[float]] = {name: [] for name in stacks}
    for name, (stack, _) in stacks.items():
        for _ in range(NUM_FIRST if name == "plan" else 1):
            stack.seconds(stack.batch(arguments.length))
    for turn in range(arguments.turns):
        for name in list(stacks)[:: 1 if turn % 2 else -1]:
            stack, _ = stacks[name]
            times[name].append(stack.seconds(stack.batch(arguments.length)))
    found: dict[str, Any] = {}
    for name, (stack, memory_bytes) in stacks.items():
        ratios = [a / b for a, b in zip(times[name], times["keep"], strict=True)]
        one = found[name] = {
            "memory_bytes": memory_bytes,
            "step_s": round(statistics.median(times[name]), 2),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
            "written_bytes": stack.written_bytes,
        }
        print(
            f"{name:10} {format_bytes(memory_bytes):>9}  {one['step_s']:7.2f} s  "
            f"{one['ratio']:.2f} of keep's {one['ratio_range']}  "
            f"{format_bytes(one['written_bytes'])} written"
        )
        if name == "plan":
            print(stack.step.plan)
            print(stack.step.forecast)
        stack.step.close()
    return found


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--store", type=Path, required=True, help="place on the drive")
    parser.add_argument("--memory", type=parse_bytes, default=2 << 30)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=0, help="queries; 0: all at once")
    parser.add_argument("--grain", type=int, default=256)
    parser.add_argument("--activations", choices=FORMS)
    parser.add_argument("--run", action="store_true", help="train a step of each")
    parser.add_argument("--policy", choices=POLICIES, help="of one step; with --length")
    parser.add_argument("--turns", type=int, help="of steps of all; with --length")
    parser.add_argument("--length", type=int, help="tokens, with --policy or --turns")
    arguments = parser.parse_args()
    options = (arguments.policy, arguments.turns, arguments.length)
    if sum(option is not None for option in options) not in (0, 2) or (
        arguments.policy and arguments.turns
    ):
        parser.error("--length goes with one of --policy and --turns")
    if arguments.chunk and (arguments.length or arguments.grain) % arguments.chunk:
        parser.error("--length or --grain: not a multiple of --chunk")
    return arguments


def main() -> None:
    """Prints a line for each policy, and JSON at the end."""
    arguments = parse()
    arguments.store.mkdir(parents=True, exist_ok=True)
    if arguments.policy:
        found = Stack(arguments, arguments.policy).run(arguments.length)
        print(json.dumps({**found, "memory_bytes": arguments.memory}))
        return
    if arguments.turns:
        print(json.dumps(in_turns(arguments)))
        return
    found: dict[str, Any] = {}
    for policy in POLICIES:
        length = longest(arguments, policy)
        one = found[policy] = {"length": length}
        kept = found["keep"]["length"]
        line = f"{policy:10} {length:7} tokens, {length / max(kept, 1):.2f} of keep's"
        if arguments.run and length:
            one |= in_process(policy, length)
            line += (
                f"; {one['step_s']} s, {format_bytes(one['grown_bytes'])} more "
                f"resident of {format_bytes(arguments.memory)} planned, "
                f"{format_bytes(one['written_bytes'])} written"
            )
        print(line, flush=True)
    sizes = {k: getattr(arguments, k) for k in ("memory", "hidden", "layers", "chunk")}
    print(json.dumps(sizes | found))


if __name__ == "__main__":
    main()
