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
from jaxinf.streaming import StreamedStep
from jaxinf.streaming.plan.calls import Policy
from jaxinf.terminal import parse_bytes

DRAIN_S = 0.5
POLICIES: tuple[Policy, ...] = get_args(Policy)


class Streamed:
    """A streamed model in training.

    Args:
      arguments: of the program.
      store: where it is; several may share one.
      policy: of `jaxinf.stream`.
    """

    def __init__(
        self, arguments: argparse.Namespace, store: jaxinf.Store, policy: Policy
    ) -> None:
        config = PRESETS[arguments.preset]
        graphdef, _ = abstract_params(config)

        def loss_fn(params: Any, data: Any) -> jax.Array:
            model = nnx.merge(graphdef, params)
            return loss(model, data["tokens"], data["targets"])

        self.step: StreamedStep = jaxinf.stream(
            loss_fn,
            optimizer(arguments.clip_norm),
            store,
            memory_bytes=arguments.memory,
            policy=policy,
            micro_batches=arguments.micro_batches,
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
    store = jaxinf.open_store(place / "stream")  # of all policies
    streamed = {
        policy: Streamed(arguments, store, policy) for policy in arguments.policy
    }
    for turn in range(arguments.reps):
        update.turn(arguments, 2 * turn)
        update_store.wait()
        time.sleep(DRAIN_S)  # what is read ahead would be in the other's time
        for one in streamed.values():
            one.turn(arguments, 2 * turn)
            time.sleep(DRAIN_S)
        show_pair(turn, update, streamed)
    found = {
        "preset": arguments.preset,
        "batch": f"{arguments.batch_size} x {arguments.seq_len}",
        "micro_batches": arguments.micro_batches,
        "clip_norm": arguments.clip_norm,
        "memory_bytes": arguments.memory,
        "load_average": round(os.getloadavg()[0], 2),
        "pairs": arguments.reps,
        "update_step_s": round(statistics.median(update.seconds), 4),
        "update_drive_bytes": drive_bytes(update_store),
    }
    for name, one in streamed.items():
        found[name] = figures(one, update.seconds, found["update_drive_bytes"])
    for one in streamed.values():
        one.step.close()
    update_store.close()
    return found


def show_pair(turn: int, update: Trainer, streamed: Mapping[str, Streamed]) -> None:
    """Prints the last counted steps, so that a run that is ended has shown some."""
    times = {"update": update.seconds[-1]}
    times |= {name: one.seconds[-1] for name, one in streamed.items()}
    text = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items())
    print(f"pair {turn + 1}: {text}", file=sys.stderr)


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
        "calls": len(plan.calls),
        "programs": len(plan.programs),
        "peak_bytes": plan.peak_bytes,
        "offloaded_bytes": streamed.offloaded_bytes,
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
    parser.add_argument("--micro-batches", type=int, default=1, help="parts of a batch")
    parser.add_argument("--clip-norm", type=float, default=0.0, help="0: none")
    parser.add_argument("--reps", type=int, default=10, help="pairs of steps")
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
