"""A streamed step beside one whose params are in memory and whose state is on a drive.

Both train the same GPT-2 from the same params on the same tokens in one process, one
counted step each in turns: `jaxinf.stream` with each policy, and a jit with
`jaxinf.smart_update`, as `python -m jaxinf.train --mode update` runs it. A step counts
from the end of the one before it, so it pays for its share of the commit. The first
step of each turn does not count; it pays for work that another has left over.

    python scripts/bench_stream.py --store DIR --preset small --memory 4GiB

    ratio            streamed step over the other's, the median of the pairs; then an
                     interval that has the median with 95 % confidence
    bytes_ratio      the same of bytes read and written on the drive
    dispatch_share   of a step: the host's time in calls of compiled programs
    clip_ratio       with --clip-norm: over a streamed step without clipping, in turns
    layers_ratio     with --order parts layers: a step in layer order over one of one
                     part after another, in turns
    compile_s        of all programs, and of one jit of loss and gradient; without trace

With --timeline FILE the spans of a step are kept, for scripts/plot_timeline.py.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
from bench_train import Trainer, batch, optimizer
from flax import nnx
from jaxinf_models import GPT2, PRESETS, abstract_params, loss, split
from ratios import interval, pairwise

import jaxinf
from jaxinf.io import timeline
from jaxinf.streaming import StreamedStep
from jaxinf.streaming.plan.calls import ORDERS, Order, Policy
from jaxinf.streaming.plan.plan import prepare
from jaxinf.streaming.run import compile_plan
from jaxinf.terminal import parse_bytes

DRAIN_S = 0.5
POLICIES: tuple[Policy, ...] = get_args(Policy)
LAYERS = " in layer order"


class Streamed:
    """A streamed model in training.

    Args:
      arguments: of the program.
      store: where it is; several may share one.
      policy, order: of `jaxinf.stream`.
      clip_norm: 0: none.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        store: jaxinf.Store,
        policy: Policy,
        order: Order,
        clip_norm: float,
    ) -> None:
        config = PRESETS[arguments.preset]
        graphdef, _ = abstract_params(config)

        def loss_fn(params: Any, data: Any) -> jax.Array:
            model = nnx.merge(graphdef, params)
            return loss(model, data["tokens"], data["targets"])

        self.loss_fn = loss_fn
        self.step: StreamedStep = jaxinf.stream(
            loss_fn,
            optimizer(clip_norm),
            store,
            memory_bytes=arguments.memory,
            policy=policy,
            resident=arguments.resident,
            micro_batches=arguments.micro_batches,
            order=order,
        )
        self.step.init(
            lambda: split(GPT2(config, rngs=nnx.Rngs(0)))[1], batch=batch(arguments, 0)
        )
        self.seconds: list[float] = []
        self.dispatched_s: list[float] = []
        self.drive_bytes = self.offloaded_bytes = 0
        self.first_s = self._step(batch(arguments, 0))  # traces, plans and compiles

    def turn(self, arguments: argparse.Namespace, first: int) -> None:
        """Two steps, of which the second counts."""
        self._step(batch(arguments, first))
        self.seconds.append(self._step(batch(arguments, first + 1)))
        assert self.step.metrics is not None
        self.dispatched_s.append(self.step.metrics.dispatched_s)
        self.offloaded_bytes = self.step.metrics.offloaded_drive_bytes
        self.step.store.wait()
        self.drive_bytes = drive_bytes(self.step.store)

    def _step(self, data: Any) -> float:
        """Seconds of a step."""
        began = time.perf_counter()
        self.step(data)
        return time.perf_counter() - began


def measure(arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    """All in turns."""
    tx = optimizer(arguments.clip_norm)
    update_store = jaxinf.open_store(place / "update", memory_bytes=arguments.ring)
    update = Trainer(arguments, jaxinf.smart_update(tx, update_store))
    streamed = streamed_steps(arguments, place / "stream", arguments.clip_norm)
    unclipped: dict[str, Streamed] = {}
    if arguments.clip_norm:
        unclipped = streamed_steps(arguments, place / "unclipped", 0.0)
    for turn in range(arguments.reps):
        update.turn(arguments, 2 * turn)
        update_store.wait()
        time.sleep(DRAIN_S)  # what is read ahead would be in the other's time
        for one in (*streamed.values(), *unclipped.values()):
            one.turn(arguments, 2 * turn)
            time.sleep(DRAIN_S)
        show_pair(turn, update, streamed)
    found = {
        "preset": arguments.preset,
        "batch": f"{arguments.batch_size} x {arguments.seq_len}",
        "micro_batches": arguments.micro_batches,
        "clip_norm": arguments.clip_norm,
        "memory_bytes": arguments.memory,
        "resident": arguments.resident,
        "load_average": round(os.getloadavg()[0], 2),
        "pairs": arguments.reps,
        "update_step_s": round(statistics.median(update.seconds), 4),
        "update_drive_bytes": drive_bytes(update_store),
        **compile_seconds(next(iter(streamed.values()))),
    }
    for name, one in streamed.items():
        found[name] = figures(one, update.seconds, found["update_drive_bytes"])
        parts = streamed.get(name.removesuffix(LAYERS), one)
        if parts is not one:
            ratios = pairwise(one.seconds, parts.seconds)
            found[name] |= {
                "layers_ratio": round(statistics.median(ratios), 4),
                "layers_interval": [round(one, 4) for one in interval(ratios)],
            }
    for name, one in unclipped.items():
        clipped_ratios = pairwise(streamed[name].seconds, one.seconds)
        found[name] |= {
            "clip_ratio": round(statistics.median(clipped_ratios), 4),
            "clip_interval": [round(one, 4) for one in interval(clipped_ratios)],
            "unclipped_drive_bytes": one.drive_bytes,
        }
    if arguments.timeline:
        keep_timeline(arguments, next(iter(streamed.values())))
    for one in (*streamed.values(), *unclipped.values()):
        one.step.close()
    update_store.close()
    return found


def streamed_steps(
    arguments: argparse.Namespace, place: Path, clip_norm: float
) -> dict[str, Streamed]:
    """One for each policy and order, all on one store."""
    store = jaxinf.open_store(place)
    return {
        policy + (LAYERS if order == "layers" else ""): Streamed(
            arguments, store, policy, order, clip_norm
        )
        for policy in arguments.policy
        for order in arguments.order
    }


def keep_timeline(arguments: argparse.Namespace, streamed: Streamed) -> None:
    """Spans of the second of two steps, in seconds from its beginning."""
    streamed.turn(arguments, 0)
    timeline.start()
    began_s = time.perf_counter()
    streamed.step(batch(arguments, 0))
    step_s = time.perf_counter() - began_s
    streamed.step.store.wait()
    time.sleep(DRAIN_S)
    spans = [span._asdict() for span in timeline.stop()]
    for span in spans:
        span["began_s"] -= began_s
        span["ended_s"] -= began_s
    document = {"step_s": step_s, "spans": spans}
    arguments.timeline.write_text(json.dumps(document, default=str) + "\n")


def show_pair(turn: int, update: Trainer, streamed: Mapping[str, Streamed]) -> None:
    """Prints the last counted steps, so that a run that is ended has shown some."""
    times = {"update": update.seconds[-1]}
    times |= {name: one.seconds[-1] for name, one in streamed.items()}
    text = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items())
    print(f"pair {turn + 1}: {text}", file=sys.stderr)


def compile_seconds(streamed: Streamed) -> dict[str, float]:
    """Seconds to compile every program anew, and one jit of the whole."""
    plan = streamed.step.plan
    assert plan is not None
    traced = plan.traced
    params = traced.params_tree.unflatten(traced.params)
    data = traced.batch_tree.unflatten(traced.batch)
    anew = prepare(streamed.loss_fn, params, data).plan_of(plan.cuts, plan.policy)
    began = time.perf_counter()
    compile_plan(anew, {})
    programs_s = time.perf_counter() - began
    lowered = jax.jit(jax.value_and_grad(streamed.loss_fn)).lower(params, data)
    began = time.perf_counter()
    lowered.compile()
    return {
        "compile_s": round(programs_s, 2),
        "one_jit_compile_s": round(time.perf_counter() - began, 2),
    }


def drive_bytes(store: jaxinf.Store) -> int:
    """Bytes read and written in the last step."""
    assert store.metrics is not None
    counts = store.metrics.traffic
    return counts.drive_read_bytes + counts.drive_write_bytes


def figures(
    streamed: Streamed, update_s: Sequence[float], update_bytes: int
) -> dict[str, Any]:
    """Returns the figures of one policy."""
    plan = streamed.step.plan
    assert plan is not None
    ratios = pairwise(streamed.seconds, update_s)
    shares = pairwise(streamed.dispatched_s, streamed.seconds)
    return {
        "step_s": round(statistics.median(streamed.seconds), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_interval": [round(one, 4) for one in interval(ratios)],
        "drive_bytes": streamed.drive_bytes,
        "bytes_ratio": round(streamed.drive_bytes / update_bytes, 4),
        "dispatch_share": round(statistics.median(shares), 5),
        "first_step_s": round(streamed.first_s, 2),
        "calls": len(plan.calls.calls),
        "programs": len(plan.calls.programs),
        "peak_bytes": plan.peak_bytes,
        "offloaded_bytes": streamed.offloaded_bytes,
        "forecast": str(streamed.step.forecast or ""),
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
    parser.add_argument(
        "--memory", type=parse_bytes, default=4 << 30, help="of the streamed step"
    )
    parser.add_argument(
        "--ring", type=parse_bytes, default=1 << 30, help="of the other's store"
    )
    parser.add_argument(
        "--policy", nargs="+", choices=POLICIES, default=POLICIES, help="by default all"
    )
    parser.add_argument(
        "--resident", metavar="{params,BYTES}", help="params that stay between steps"
    )
    parser.add_argument("--micro-batches", type=int, default=1, help="parts of a batch")
    parser.add_argument(
        "--order", nargs="+", choices=ORDERS, default=["parts"], help="of the parts"
    )
    parser.add_argument("--clip-norm", type=float, default=0.0, help="0: none")
    parser.add_argument("--reps", type=int, default=10, help="pairs of steps")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="of one step")
    parser.add_argument("--json", action="store_true", help="one line")
    arguments = parser.parse_args()
    arguments.steps = 1
    arguments.store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=arguments.store, prefix="bench-stream-"
    ) as place:
        result = measure(arguments, Path(place))
    print(json.dumps(result, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
