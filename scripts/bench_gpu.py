"""Measures an accelerator's link to the host, and training and updates over it.

First it times, in turns, every way for a gradient to reach the host and for its result
to return: the bytes of both directions over the seconds of a round trip.

    io_callback       used by `jaxinf.smart_update` with an accelerator
    buffer_callback   XLA's own buffers; on a CPU only, where they are the host's memory
    device_get        outside jit: NumPy arrays of JAX's, and `device_put`
    pinned_host       outside jit: by `device_put` through the pinned host memory

Then scripts/bench_train.py runs with each form of the callbacks (`start`: gradients are
taken and results fetched later; `io`: each call waits), and scripts/bench_update.py,
with a preset for an accelerator. It prints one JSON object. It runs on any backend, and
says so if that is a CPU.

    python scripts/bench_gpu.py --store DIR --preset medium
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback
from jaxinf_models import PRESETS

HERE = Path(__file__).parent
RoundTrip = Callable[[jax.Array], jax.Array]


def halve(out: np.ndarray, values: np.ndarray) -> None:
    """Represents the host's work: it reads and writes every byte once."""
    np.multiply(values, np.float32(0.5), out=out)


def by_io_callback(values: jax.Array) -> jax.Array:
    """A round trip in jit, through JAX's copies."""

    def host(given: Any) -> np.ndarray:
        out = np.empty(given.shape, given.dtype)
        halve(out, np.asarray(given))
        return out

    return io_callback(host, jax.ShapeDtypeStruct(values.shape, values.dtype), values)


def by_buffer_callback(values: jax.Array) -> jax.Array:
    """A round trip in jit, without copies."""

    def host(context: Any, out: Any, given: Any) -> None:
        del context
        halve(np.asarray(out), np.asarray(given))

    aval = jax.ShapeDtypeStruct(values.shape, values.dtype)
    result = buffer_callback(host, aval, has_side_effect=True)(values)
    return result[0] if isinstance(result, (list, tuple)) else result


def by_device_get(out: np.ndarray, values: jax.Array) -> jax.Array:
    """A round trip outside jit, through pageable host memory."""
    halve(out, np.asarray(values))
    return jax.device_put(out)


def by_pinned_host(out: np.ndarray, values: jax.Array) -> jax.Array:
    """A round trip outside jit, through pinned host memory."""
    on_device = values.sharding
    pinned = on_device.with_memory_kind("pinned_host")
    halve(out, np.asarray(jax.device_put(values, pinned)))
    return jax.device_put(jax.device_put(out, pinned), on_device)


def ways(num_elements: int) -> dict[str, RoundTrip]:
    """Returns the ways that this backend supports."""
    out = np.empty(num_elements, np.float32)
    found: dict[str, RoundTrip] = {
        "io_callback": jax.jit(by_io_callback),
        "device_get": partial(by_device_get, out),
    }
    if jax.default_backend() == "cpu":
        found["buffer_callback"] = jax.jit(by_buffer_callback)
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if "pinned_host" in kinds:
        found["pinned_host"] = partial(by_pinned_host, out)
    return found


def link(num_bytes: int, reps: int) -> dict[str, float]:
    """Measures GB/s of each way, both directions counted; medians over the turns."""
    values = jnp.arange(num_bytes // 4, dtype=jnp.float32)
    found = ways(values.size)
    expected = np.asarray(values) * np.float32(0.5)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(reps + 1):
        for name, way in found.items():
            began = time.perf_counter()
            result = jax.block_until_ready(way(values))
            seconds[name].append(time.perf_counter() - began)
            np.testing.assert_array_equal(np.asarray(result), expected)
    return {
        name: round(2 * num_bytes / statistics.median(times[1:]) / 1e9, 3)
        for name, times in seconds.items()
    }


def run(script: str, *arguments: str, **environment: str) -> Any:
    """Runs a benchmark and returns its JSON line."""
    command = [sys.executable, str(HERE / script), *arguments, "--json"]
    result = subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, required=True, metavar="DIR")
    parser.add_argument("--preset", choices=[*PRESETS], default="medium")
    parser.add_argument("--params", default="200e6", help="of bench_update.py")
    parser.add_argument("--memory", type=int, default=1 << 30)
    parser.add_argument("--megabytes", type=int, default=256, help="of a round trip")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument(
        "--link-only", action="store_true", help="no training, no updates"
    )
    arguments = parser.parse_args()
    device = jax.devices()[0]
    rates = link(arguments.megabytes << 20, arguments.reps)
    result: dict[str, Any] = {
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "link_gb_per_s": rates,
        "fastest": max(rates, key=lambda name: rates[name]),
    }
    if not arguments.link_only:
        arguments.store.mkdir(parents=True, exist_ok=True)
        store = ("--store", str(arguments.store))
        memory = ("--memory", str(arguments.memory))
        train = ("bench_train.py", *store, *memory, "--preset", arguments.preset)
        result["train"] = {
            form: {
                "plain": run(*train, JAXINF_CALLBACK=form),
                "clipped": run(*train, "--clip-norm", "1", JAXINF_CALLBACK=form),
            }
            for form in ("start", "io")
        }
        result["update"] = run(
            "bench_update.py", *store, *memory, "--params", arguments.params
        )
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
