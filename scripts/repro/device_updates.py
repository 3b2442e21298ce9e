"""Updates that a device shares with the host, at emulated rates, beside their model.

One step after another is made with each choice, in turns: the host alone, and the
device with every k-th subgroup. State stays in memory, so drives are no bound. The
host's kernels, the device's, and each way of the link are token buckets; all else is as
in a run. The model takes the slower side's time. It is of the updates alone, from the
first gradient to the end of the step.

    python scripts/repro/device_updates.py --store /mnt/nvme0/tmp

--host and --device are params a second, --link bytes a second of each way.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from throttled import Server, wait

import jaxinf
from jaxinf.csd import HostCsd
from jaxinf.streaming.update import device_updates
from jaxinf.streaming.update.apply_gradients import StoreSink
from jaxinf.streaming.update.device_updates import DeviceUpdater

sys.path.append(str(Path(__file__).parents[1]))
import bench

SENT_BYTES = 12 + 4  # state and gradient of a param


def emulate(host: float, device: float, link: float, arrived_s: list[float]) -> None:
    """Slows the host's kernels, the device's and its link; notes when gradients come.

    For the rest of the process.
    """
    cores, up, kernels, down = (Server() for _ in range(4))
    compute, put = HostCsd.update, StoreSink.put

    def on_host(self: HostCsd, buffer: Any, update: Any) -> Any:
        outcome = compute(self, buffer, update)
        wait((cores, update.extents[0].num_elements, host))
        return outcome

    class Emulated(DeviceUpdater):
        def _up(self, arrays: Any) -> Any:
            wait((up, sum(array.nbytes for array in arrays), link))
            return super()._up(arrays)

        def _down(self, arrays: Any, **named: Any) -> Any:
            arrays = jax.block_until_ready(arrays)
            wait((kernels, max((array.size for array in arrays), default=0), device))
            wait((down, sum(array.nbytes for array in arrays), link))
            return super()._down(arrays, **named)

    def noting(self: StoreSink, piece: Any, gradient: Any) -> None:
        arrived_s.append(time.perf_counter())
        put(self, piece, gradient)

    HostCsd.update, StoreSink.put = on_host, noting
    device_updates.DeviceUpdater = Emulated


def loss(params: Any, scale: Any) -> Any:
    """Returns a loss of the params alone, which costs little beside its updates."""
    return scale * sum(jnp.sum(leaf**2) for leaf in params)


def opened(arguments: argparse.Namespace, place: Path, every: int) -> Any:
    """Opens a step on a store of its own."""
    num = arguments.leaves * arguments.elements
    memory_bytes = 32 * num + (64 << 20)
    store = jaxinf.open_store(
        place / f"every-{every}", memory_bytes=memory_bytes, durability="checkpoint"
    )
    memory_bytes = 80 * num + (256 << 20)
    options: Any = {"memory_bytes": memory_bytes, "device_updates": every or None}
    step = jaxinf.stream(loss, optax.adam(1e-3), store, **options)
    leaves = [np.ones(arguments.elements, np.float32) for _ in range(arguments.leaves)]
    step.load(leaves, batch=np.float32(1))
    step(np.float32(1))  # which reads state from drives
    return step


def measure(arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Runs steps with all choices in turns, beside the model's seconds."""
    arrived_s: list[float] = []
    emulate(arguments.host, arguments.device, arguments.link, arrived_s)
    steps = {every: opened(arguments, place, every) for every in arguments.every}
    whole: dict[int, list[float]] = {every: [] for every in steps}
    updates: dict[int, list[float]] = {every: [] for every in steps}
    for _ in range(arguments.reps):
        for every, step in steps.items():
            arrived_s.clear()
            began_s = time.perf_counter()
            step(np.float32(1))
            ended_s = time.perf_counter()
            whole[every].append(ended_s - began_s)
            updates[every].append(ended_s - arrived_s[0])
    for step in steps.values():
        step.close()
    num = arguments.leaves * arguments.elements
    host_s = 1 / arguments.host
    device_s = max(1 / arguments.device, SENT_BYTES / arguments.link)
    rows = []
    for every, seconds in whole.items():
        share = 1 / every if every else 0.0
        row = {"every": every, "found_s": statistics.median(seconds)}
        row |= {"least_s": min(seconds), "most_s": max(seconds)}
        row["updates_s"] = statistics.median(updates[every])
        row["model_s"] = num * max((1 - share) * host_s, share * device_s)
        rows.append(row)
    best = min(rows, key=lambda row: row["found_s"])["every"]
    return {"fastest": best, "rows": rows}


if __name__ == "__main__":
    bench.run(
        __doc__,
        measure,
        lambda found: bench.print_table(found["rows"]),
        leaves=24,
        elements=1 << 18,
        host=6.5e6,
        device=65e6,
        link=150e6,
        every={"type": int, "nargs": "+", "default": [0, 1, 2, 3, 4, 6]},
        reps=5,
    )
