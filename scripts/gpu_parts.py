"""Parts of scripts/bench_gpu.py that use the device, each in a process of its own.

    python scripts/gpu_parts.py link --store DIR --preset small --megabytes 256

Prints one line of JSON. It runs on any backend, and says which one.
"""

import argparse
import contextlib
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback
from jaxinf_models import PRESETS, abstract_params, make_model, split
from jaxinf_models import loss as model_loss

import jaxinf
from jaxinf import compat
from jaxinf.io import BufferPool

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


def round_trips(num_bytes: int, reps: int) -> dict[str, float]:
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


def seconds_of(function: Callable[[], Any], reps: int) -> float:
    """Returns the median time of a call, until its arrays are ready."""
    times = []
    for _ in range(reps + 1):
        began = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def both_ways(source: Any, values: jax.Array, host: Any, reps: int) -> dict[str, float]:
    """Seconds of copies: to the device, to the host, and both at once.

    Args:
      source: The array on the host.
      values: That on the device.
      host: The sharding on the host that it is copied to.
      reps: Number of copies.
    """
    return {
        "to_device": seconds_of(lambda: jax.device_put(source, values.sharding), reps),
        "to_host": seconds_of(lambda: jax.device_put(values, host), reps),
        "both": seconds_of(
            lambda: jax.device_put([source, values], [values.sharding, host]), reps
        ),
    }


def registered(values: jax.Array, pinned: Any, reps: int) -> dict[str, float]:
    """Seconds to register memory and to copy from it; none where that is not possible.

    JAX copies nothing into such memory: with `both`, what comes is in `pinned_host`.
    """
    registry = compat.memory_registry(jax.devices()[0])
    if registry is None:
        return {}
    began = time.perf_counter()
    pool = BufferPool(values.nbytes, registry=registry)
    with contextlib.closing(pool), pool.acquire(values.nbytes) as buffer:
        register_s = time.perf_counter() - began
        source = buffer.array.view(np.float32)
        source[...] = 1
        found = both_ways(source, values, pinned, reps)
        return {
            "register": register_s,
            "registered_to_device": found["to_device"],
            "registered_both": found["both"],
        }


def link(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rates of copies in GB/s: each way, and round trips by all ways."""
    num_bytes, reps = arguments.megabytes << 20, arguments.reps
    values = jnp.arange(num_bytes // 4, dtype=jnp.float32)
    on_device, host = values.sharding, np.asarray(values)
    add = jax.jit(lambda x: x + 1)  # an array that has no copy on the host yet
    base_s = seconds_of(lambda: add(values), reps)
    ways: dict[str, float] = {
        "pageable_to_device": seconds_of(lambda: jax.device_put(host, on_device), reps),
        "pageable_to_host": seconds_of(lambda: np.asarray(add(values)), reps) - base_s,
    }
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if "pinned_host" in kinds:
        pinned = on_device.with_memory_kind("pinned_host")
        there = jax.device_put(host, pinned)
        ways |= {
            f"pinned_{way}": seconds
            for way, seconds in both_ways(there, values, pinned, reps).items()
        }
        ways |= registered(values, pinned, reps)
    rates = round_trips(num_bytes, reps)
    return {
        "gb_per_s": {
            k: round((1 + k.endswith("both")) * num_bytes / max(s, 1e-9) / 1e9, 3)
            for k, s in ways.items()
        },
        "round_trip_gb_per_s": rates,
        "fastest": max(rates, key=lambda name: rates[name]),
    }


def callbacks(arguments: argparse.Namespace) -> dict[str, Any]:
    """Calls of the host a second, each with one short array, in one program."""
    count = 64
    aval = jax.ShapeDtypeStruct((256,), jnp.float32)

    def called(values: jax.Array) -> jax.Array:
        for _ in range(count):
            values = io_callback(lambda x: np.asarray(x), aval, values)
        return values

    function, values = jax.jit(called), jnp.zeros(256)
    seconds = seconds_of(lambda: function(values), arguments.reps)
    return {"calls_per_s": round(count / seconds)}


def overlap(arguments: argparse.Namespace) -> dict[str, Any]:
    """Copies to the device, products on it, and both at once; a profile of these.

    `hidden` is the share of the shorter one that the other covers.
    """
    host = np.ones(arguments.megabytes << 18, np.float32)
    matrix = jnp.ones((1024, 1024))

    def products(x: jax.Array, count: int) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, y: y @ x / 1024, x)

    multiply = jax.jit(products)
    copy_s = seconds_of(lambda: jax.device_put(host), arguments.reps)
    one_s = seconds_of(lambda: multiply(matrix, 16), arguments.reps) / 16
    count = max(1, round(copy_s / one_s))  # as long as the copy
    compute_s = seconds_of(lambda: multiply(matrix, count), arguments.reps)

    def both() -> Any:
        return multiply(matrix, count), jax.device_put(host)

    both_s = seconds_of(both, arguments.reps)
    with jax.profiler.trace(str(arguments.store / "profile")):
        jax.block_until_ready(both())
    hidden = (copy_s + compute_s - both_s) / min(copy_s, compute_s)
    return {
        "copy_s": round(copy_s, 4),
        "compute_s": round(compute_s, 4),
        "both_s": round(both_s, 4),
        "hidden": round(hidden, 3),
    }


def streamed(arguments: argparse.Namespace) -> tuple[Any, Callable[[int], Any], Any]:
    """Returns a streamed step of a preset, its batches by number, and its params."""
    config = PRESETS[arguments.preset]
    graphdef, _ = abstract_params(config)

    def loss(params: Any, batch: Any) -> jax.Array:
        return model_loss(nnx.merge(graphdef, params), batch[:, :-1], batch[:, 1:])

    def batch_of(number: int) -> np.ndarray:
        random = np.random.default_rng(number)
        shape = (4, min(256, config.num_positions) + 1)
        return random.integers(0, config.vocab_size, shape, np.int32)

    tx = optax.adamw(1e-3)
    step = jaxinf.stream(
        loss, tx, arguments.store / "streamed", memory_bytes=arguments.memory
    )
    step.init(lambda: split(make_model(config, rngs=nnx.Rngs(0)))[1], batch=batch_of(0))
    return step, batch_of, step.params


def digest(params: Any) -> str:
    """Returns a digest of the bits of params."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def steps(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs a store's streamed steps up to a number; a digest of the params' bits."""
    step, batch_of, params = streamed(arguments)
    with step:
        first = step.store.step
        losses = [step(batch_of(n))[0] for n in range(first, arguments.steps)]
        shown = [float(loss).hex() for loss in losses]
        return {"first": first, "losses": shown, "params": digest(params())}


def memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """The peak of the device's memory in two steps, beside what is planned."""
    step, batch_of, _ = streamed(arguments)
    with step:
        for number in range(2):
            step(batch_of(number))
        stats = jax.devices()[0].memory_stats() or {}
        return {
            "planned_bytes": step.plan.peak_bytes + step.plan.resident_bytes,
            "peak_bytes": stats.get("peak_bytes_in_use"),
            "limit_bytes": stats.get("bytes_limit"),
        }


PARTS = {f.__name__: f for f in (link, callbacks, overlap, steps, memory)}


def main(given: Sequence[str] | None = None) -> None:
    """Prints the figures of a part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=[*PARTS])
    parser.add_argument("--store", type=Path, required=True, metavar="DIR")
    parser.add_argument("--preset", choices=[*PRESETS], default="small")
    parser.add_argument("--memory", type=int, default=4 << 30)
    parser.add_argument("--megabytes", type=int, default=256, help="of a copy")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of the part steps")
    arguments = parser.parse_args(given)
    arguments.store.mkdir(parents=True, exist_ok=True)
    device = {"backend": jax.default_backend(), "device": jax.devices()[0].device_kind}
    print(json.dumps(device | PARTS[arguments.part](arguments)))


if __name__ == "__main__":
    main()
