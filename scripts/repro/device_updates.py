"""Updates that a device shares with the host, at emulated rates, beside their model.

One step after another is made with each choice, in turns: the host alone, and the
device with every k-th subgroup. State stays in memory, so drives are no bound. The
host's kernels, the device's, and each way of the link are token buckets; all else is as
in a run. The model takes the slower side's time. It is of the updates alone, from the
first gradient to the end of the step.

    python scripts/repro/device_updates.py --store /mnt/nvme0/tmp
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from throttled import Server

import jaxinf
from jaxinf.csd import HostCsd
from jaxinf.streaming.update import device_updates
from jaxinf.streaming.update.device_updates import DeviceUpdater
from jaxinf.streaming.update.store_sink import StoreSink

STATE_BYTES = 12
GRADIENT_BYTES = 4


def wait(server: Server, amount: float, rate: float) -> None:
    """Waits until a server has done its part."""
    until_s = server.reserve(round(amount), rate)
    time.sleep(max(0.0, until_s - time.monotonic()))


def emulate(host: float, device: float, link: float) -> None:
    """Slows the host's kernels, the device's and its link down.

    Args:
      host, device: Params a second.
      link: Bytes a second of each way.
    """
    cores, up, kernels, down = (Server() for _ in range(4))
    compute = HostCsd.update

    def on_host(self: HostCsd, buffer: Any, update: Any) -> Any:
        outcome = compute(self, buffer, update)
        wait(cores, update.extents[0].num_elements, host)
        return outcome

    class Emulated(DeviceUpdater):
        def _up(self, arrays: Any) -> Any:
            wait(up, sum(array.nbytes for array in arrays), link)
            return super()._up(arrays)

        def _down(self, arrays: Any, **named: Any) -> Any:
            arrays = jax.block_until_ready(arrays)
            wait(kernels, max((array.size for array in arrays), default=0), device)
            wait(down, sum(array.nbytes for array in arrays), link)
            return super()._down(arrays, **named)

    HostCsd.update = on_host
    device_updates.DeviceUpdater = Emulated


def update_s(host_s: float, device_s: float, every: int) -> float:
    """Returns the seconds of an update, on average, if the slower side sets them."""
    share = 1 / every if every else 0.0
    return max((1 - share) * host_s, share * device_s)


def loss(params: Any, scale: Any) -> Any:
    """Returns a loss of the params alone, which costs little beside its updates."""
    return scale * sum(jnp.sum(leaf**2) for leaf in params)


def opened(arguments: argparse.Namespace, every: int) -> Any:
    """Opens a step on a store of its own."""
    num = arguments.leaves * arguments.elements
    store = jaxinf.open_store(
        arguments.store / f"every-{every}",
        memory_bytes=32 * num + (64 << 20),
        durability="checkpoint",
    )
    step = jaxinf.stream(
        loss,
        optax.adam(1e-3),
        store,
        memory_bytes=80 * num + (256 << 20),
        device_updates=every or None,
    )
    leaves = [np.ones(arguments.elements, np.float32) for _ in range(arguments.leaves)]
    step.load(leaves, batch=np.float32(1))
    step(np.float32(1))  # which reads state from drives
    return step


def measured(
    arguments: argparse.Namespace,
) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """Returns the seconds of each step, and of the updates in it, by choice."""
    steps = {every: opened(arguments, every) for every in arguments.every}
    whole: dict[int, list[float]] = {every: [] for every in steps}
    updates: dict[int, list[float]] = {every: [] for every in steps}
    put, arrived_s = StoreSink.put, list[float]()

    def noting(self: StoreSink, piece: Any, gradient: Any) -> None:
        arrived_s.append(time.perf_counter())
        put(self, piece, gradient)

    StoreSink.put = noting
    for _ in range(arguments.reps):
        for every, step in steps.items():
            arrived_s.clear()
            began_s = time.perf_counter()
            step(np.float32(1))
            ended_s = time.perf_counter()
            whole[every].append(ended_s - began_s)
            updates[every].append(ended_s - arrived_s[0])
    StoreSink.put = put
    for step in steps.values():
        step.close()
    return whole, updates


def main() -> None:
    """Prints a line for each choice, or one JSON document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--store", type=Path, required=True, help="a directory")
    parser.add_argument("--leaves", type=int, default=24)
    parser.add_argument("--elements", type=int, default=1 << 18, help="of each leaf")
    parser.add_argument("--host", type=float, default=6.5e6, help="params/s")
    parser.add_argument("--device", type=float, default=65e6, help="params/s")
    parser.add_argument("--link", type=float, default=150e6, help="bytes/s each way")
    parser.add_argument("--every", type=int, nargs="+", default=[0, 1, 2, 3, 4, 6])
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    arguments = parser.parse_args()
    sent = STATE_BYTES + GRADIENT_BYTES
    slowest = max(1 / arguments.device, sent / arguments.link)
    emulate(arguments.host, arguments.device, arguments.link)
    num = arguments.leaves * arguments.elements
    whole, updates = measured(arguments)
    rows = [
        {
            "every": every,
            "found_s": statistics.median(seconds),
            "least_s": min(seconds),
            "most_s": max(seconds),
            "updates_s": statistics.median(updates[every]),
            "model_s": num * update_s(1 / arguments.host, slowest, every),
        }
        for every, seconds in whole.items()
    ]
    best = min(rows, key=lambda row: row["found_s"])["every"]
    if arguments.json:
        print(json.dumps({"fastest": best, "rows": rows}))
        return
    for row in rows:
        print(
            f"every {row['every']}: {row['found_s']:.3f} s "
            f"[{row['least_s']:.3f}, {row['most_s']:.3f}], of which updates "
            f"{row['updates_s']:.3f} s, {row['updates_s'] / row['model_s']:.2f} of the "
            f"model's {row['model_s']:.3f} s"
        )
    print(f"fastest here: {best}")


if __name__ == "__main__":
    main()
