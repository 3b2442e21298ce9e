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
import statistics
import time
from pathlib import Path
from typing import Any, get_args

import bench
from bench_train import OPTIONS, Trainer, batch_of, model, optimizer

import jaxinf
from jaxinf.streaming import Policy, StreamedStep

DRAIN_S = 0.5
POLICIES: tuple[Policy, ...] = get_args(Policy)


class Streamed:
    """A streamed model in training; several may share a store."""

    def __init__(
        self, arguments: argparse.Namespace, store: jaxinf.Store, policy: Policy
    ) -> None:
        loss_fn, init = model(arguments.preset)
        self.step: StreamedStep = jaxinf.stream(
            loss_fn,
            optimizer(arguments.clip_norm),
            store,
            memory_bytes=arguments.memory,
            policy=policy,
            micro_batches=arguments.micro_batches,
        )
        self.step.init(init, batch=batch_of(arguments, 0))
        self.seconds: list[float] = []
        self.dispatched_s: list[float] = []
        self.drive_bytes = 0
        self._step(batch_of(arguments, 0))  # traces, plans and compiles

    def turn(self, arguments: argparse.Namespace, first: int) -> None:
        """Two steps, of which the second counts."""
        self._step(batch_of(arguments, first))
        self.seconds.append(self._step(batch_of(arguments, first + 1)))
        assert self.step.metrics is not None
        self.dispatched_s.append(self.step.metrics.dispatched_s)
        self.step.store.wait()
        self.drive_bytes = drive_bytes(self.step.store)

    def _step(self, data: Any) -> float:
        began = time.perf_counter()
        self.step(data)
        return time.perf_counter() - began

    def figures(self, update_s: list[float], update_bytes: int) -> dict[str, Any]:
        """Returns the figures, beside those of `smart_update`."""
        plan = self.step.plan
        assert plan is not None
        shares = zip(self.dispatched_s, self.seconds, strict=True)
        return bench.rounded(
            {
                "step_s": statistics.median(self.seconds),
                **bench.ratios("ratio", self.seconds, update_s),
                "drive_bytes": self.drive_bytes,
                "bytes_ratio": self.drive_bytes / update_bytes,
                "dispatch_share": statistics.median(a / b for a, b in shares),
                "peak_bytes": plan.peak_bytes,
            }
        )


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
        update.turn(arguments, 2 * turn, 1)
        update_store.wait()
        time.sleep(DRAIN_S)  # what is read ahead would be in the other's time
        for one in streamed.values():
            one.turn(arguments, 2 * turn)
            time.sleep(DRAIN_S)
    update_bytes = drive_bytes(update_store)
    found = {
        "preset": arguments.preset,
        "batch": f"{arguments.batch_size} x {arguments.seq_len}",
        "micro_batches": arguments.micro_batches,
        "clip_norm": arguments.clip_norm,
        "memory_bytes": arguments.memory,
        "load_average": bench.load_average(),
        "pairs": arguments.reps,
        "update_step_s": round(statistics.median(update.seconds), 4),
        "update_drive_bytes": update_bytes,
    }
    for name, one in streamed.items():
        found[name] = one.figures(update.seconds, update_bytes)
        one.step.close()
    update_store.close()
    return found


def drive_bytes(store: jaxinf.Store) -> int:
    """Bytes read and written in the last step."""
    assert store.metrics is not None
    counts = store.metrics.traffic
    return counts.drive_read_bytes + counts.drive_write_bytes


if __name__ == "__main__":
    bench.run(
        __doc__,
        measure,
        **OPTIONS,
        memory=bench.SIZE | {"default": 4 << 30, "help": "of the streamed step"},
        ring=bench.SIZE | {"default": 1 << 30, "help": "of the other's store"},
        micro_batches=1,
        policy={"nargs": "+", "choices": POLICIES, "default": POLICIES},
        reps=10,
    )
