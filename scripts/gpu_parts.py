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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from jaxinf.plan.device_updates import interval
from jaxinf.streaming.plan.memory import device_is_host
from jaxinf.streaming.update import store_sink
from jaxinf.streaming.update.choosing import Choosing

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


class Model:
    """A preset, and what trains it.

    Attributes:
      tx: The optimizer.
      num_bytes: Bytes of params and the optimizer's state.
    """

    tx = optax.adamw(1e-3)

    def __init__(self, preset: str) -> None:
        self._config = PRESETS[preset]
        self._graphdef, params = abstract_params(self._config)
        self.num_bytes = 12 * sum(leaf.size for leaf in jax.tree.leaves(params))

    def init(self) -> Any:
        """Returns its first params."""
        return split(make_model(self._config, rngs=nnx.Rngs(0)))[1]

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Returns the loss of a batch."""
        model = nnx.merge(self._graphdef, params)
        return model_loss(model, batch[:, :-1], batch[:, 1:])

    def batch(self, number: int) -> np.ndarray:
        """Returns a batch."""
        random = np.random.default_rng(number)
        shape = (4, min(256, self._config.num_positions) + 1)
        return random.integers(0, self._config.vocab_size, shape, np.int32)

    def streamed(self, store: Any, memory_bytes: int, **options: Any) -> Any:
        """Returns a step on a store, with its params."""
        step = jaxinf.stream(
            self.loss, self.tx, store, memory_bytes=memory_bytes, **options
        )
        step.init(self.init, batch=self.batch(0))
        return step

    def losses(self, num_steps: int) -> list[float]:
        """Returns the losses of plain optax in memory."""

        def one(params: Any, state: Any, batch: Any) -> Any:
            loss, gradients = jax.value_and_grad(self.loss)(params, batch)
            updates, state = self.tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, loss

        step, params, found = jax.jit(one, donate_argnums=(0, 1)), self.init(), []
        state = self.tx.init(params)
        for number in range(num_steps):
            params, state, loss = step(params, state, self.batch(number))
            found.append(float(loss))
        return found


def digest(params: Any) -> str:
    """Returns a digest of the bits of params."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def steps(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs a store's streamed steps up to a number; a digest of the params' bits."""
    model = Model(arguments.preset)
    with model.streamed(arguments.store / "streamed", arguments.memory) as step:
        first = step.store.step
        losses = [step(model.batch(n))[0] for n in range(first, arguments.steps)]
        shown = [float(loss).hex() for loss in losses]
        return {"first": first, "losses": shown, "params": digest(step.params())}


def memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """The peak of the device's memory in two steps, beside what is planned."""
    model = Model(arguments.preset)
    with model.streamed(arguments.store / "streamed", arguments.memory) as step:
        for number in range(2):
            step(model.batch(number))
        stats = jax.devices()[0].memory_stats() or {}
        return {
            "planned_bytes": step.plan.peak_bytes + step.plan.resident_bytes,
            "peak_bytes": stats.get("peak_bytes_in_use"),
            "limit_bytes": stats.get("bytes_limit"),
        }


@contextlib.contextmanager
def waiting_for_gradients(*, is_on: bool) -> Iterator[None]:
    """Has the device wait for the copy of each gradient to the host, if it is on."""
    handed_out = store_sink.handed_out

    def waiting(*arguments: Any, **named: Any) -> Any:
        gradient = handed_out(*arguments, **named)
        np.asarray(gradient)
        return gradient

    if is_on:
        store_sink.handed_out = waiting
    try:
        yield
    finally:
        store_sink.handed_out = handed_out


def swept(
    arguments: argparse.Namespace, model: Model, place: str, stays: Mapping[str, int]
) -> dict[str, Any]:
    """Median seconds of steps by who updates, in turns; the first turn does not count.

    Args:
      arguments: The program's.
      model: The model.
      place: Name of the store.
      stays: Bytes of state that stay, by tier.
    """
    store = jaxinf.open_store(
        arguments.store / place, tiers=dict(stays), durability="checkpoint"
    )
    memory_bytes = arguments.memory + stays["host"]
    seconds: dict[str, list[float]] = {}
    losses: list[float] = []
    with model.streamed(store, memory_bytes, device_updates="auto") as step:
        bound = step._last
        assign, measure = bound.ends._assigning._assigned, bound.sink.choosing._measure
        found = [] if measure is None else [measure() for _ in range(arguments.reps)]
        choices = [(every, False) for every in range(5)] + [(0, True), (2, True)]
        for _ in range(arguments.reps + 1):
            for every, is_on in choices:
                bound.sink.choosing = Choosing(assign, every)
                batch = model.batch(len(losses))
                with waiting_for_gradients(is_on=is_on):
                    began = time.perf_counter()
                    loss = float(step(batch)[0])
                    seconds.setdefault(f"{every}{' waits' * is_on}", []).append(
                        time.perf_counter() - began
                    )
                losses.append(loss)
        num_subgroups = [len(assign(every).subgroups) for every in range(5)]
    expected = model.losses(len(losses))
    differences = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
    return {
        "s_per_1e9_params": [
            {name: 1e9 * s for name, s in one._asdict().items()} for one in found
        ],
        "choices": [interval(one) for one in found],
        "subgroups_on_device": num_subgroups,
        "step_s": {k: statistics.median(v[1:]) for k, v in seconds.items()},
        "largest_loss_difference": max(differences),
        "last_loss": losses[-1],
    }


def tiers(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rates of updates; steps by k, without and with waiting for gradients; losses.

    Once with all state on the host, and on a device with memory of its own once more
    with half of it there. Losses are beside those of plain optax in memory.
    """
    model = Model(arguments.preset)
    num_bytes = model.num_bytes
    found = {"host": swept(arguments, model, "host", {"host": num_bytes})}
    if not device_is_host(jax.devices()[0]):
        stays = {"host": num_bytes, "device": num_bytes // 2}
        found["device"] = swept(arguments, model, "device", stays)
    return found


PARTS = {f.__name__: f for f in (link, callbacks, overlap, steps, memory, tiers)}


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
