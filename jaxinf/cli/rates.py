"""Measures what `jaxinf plan` needs of a machine, beside its drives.

Invariant: each figure is of several runs, of some seconds together; nothing that is
written is left.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxinf.cli.machine import Machine as Facts
from jaxinf.cli.place import Place
from jaxinf.cli.training_rates import measure_call, measure_programs, measure_training
from jaxinf.kernels import CompiledKernel, Passage, compiled
from jaxinf.layout import CodedSlot
from jaxinf.plan import Device, Drive, Machine, Rate
from jaxinf.program import trace_update

_SOURCE = "jaxinf doctor"
_COPIED_BYTES = 256 << 20
_WIDTH = 2048
_NUM_PARAMS = 4 << 20
_LONG_ENOUGH_S = 1.0
_LEAST_S = 1e-9  # what takes no time that can be measured


def measure_machine(name: str, facts: Facts, places: Sequence[Place]) -> Machine:
    """Measures processor and device; blocks for half a minute.

    Args:
      places: directories with a measured bandwidth. Of several on one drive the first
        counts.

    Raises:
      ValueError: no directory has one.
      CsdError: kernels are not made for this processor, or there is no compiler.
    """
    device = jax.devices()[0]
    drives = _drives(places)
    training = measure_training(next(p.path for p in places if p.bandwidth))
    call = measure_call(device)
    return Machine(
        name=name,
        num_cores=facts.num_cores,
        memory=_measured(facts.memory_bytes),
        copy=_measured(_COPIED_BYTES / _copy_s()),
        products={
            dtype: _measured(2 * _WIDTH**3 / _product_s(device, dtype))
            for dtype in ("float32", "bfloat16")
        },
        updates=_updates(),
        programs={
            dtype: _measured(measure_programs(device, dtype))
            for dtype in ("float32", "bfloat16")
        },
        drives=drives,
        commits=_measured(1 / training.commit_s),
        launches=_measured(1 / call.program_s),
        calls=_measured(1 / max(call.beside_s, _LEAST_S)),
        moves=_measured(1 / max(training.move_s, _LEAST_S)),
        process={m: _measured(n) for m, n in training.process_bytes.items()},
        device=None if device.platform == "cpu" else _device(device),
    )


def _measured(value: float) -> Rate:
    return Rate(float(f"{value:.4g}"), _SOURCE, "measured")


def least_s(run: Callable[[], object], num_runs: int = 5) -> float:
    """Returns the least time of some runs, after one that does not count."""
    run()
    times: list[float] = []
    while len(times) < num_runs or sum(times) < _LONG_ENOUGH_S / 4:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
        if sum(times) > _LONG_ENOUGH_S:
            break
    return min(times)


def _copy_s() -> float:
    source = np.ones(_COPIED_BYTES, np.uint8)
    target = np.empty_like(source)
    return least_s(lambda: np.copyto(target, source))


def _product_s(device: Any, dtype: str) -> float:
    factor = jax.device_put(jnp.ones((_WIDTH, _WIDTH), dtype), device)
    product = jax.jit(jnp.matmul)
    return least_s(lambda: jax.block_until_ready(product(factor, factor)))


def _updates() -> dict[str, Rate]:
    kernel = compiled(trace_update(optax.adamw(1e-3), jnp.zeros(8)).leaves[0].kernel)
    runs = {"fp32": update_state(kernel, _NUM_PARAMS)}
    runs["int8"] = update_int8(kernel, _NUM_PARAMS)
    return {
        f"adamw {state}": _measured(_NUM_PARAMS / least_s(run))
        for state, run in runs.items()
    }


def update_state(kernel: CompiledKernel, num: int) -> Callable[[], object]:
    """Returns a run of AdamW's kernel on `num` params with float32 moments.

    The run has the checksums that a store asks for, and one thread.
    """
    gradient, params, mu = _random(num)
    return _run(kernel, gradient, params, [mu, mu * mu], num_arrays=3)


def update_int8(kernel: CompiledKernel, num: int) -> Callable[[], object]:
    gradient, params, mu = _random(num)
    slots = []
    for values in (mu, mu * mu):
        scales = np.zeros(-(-num // 256), np.float32)
        slots.append(CodedSlot(np.zeros(num, np.uint8), scales, key=3))
        slots[-1].encode(values)
    return _run(kernel, gradient, params, slots, num_arrays=5)


def _random(num: int) -> Any:
    return np.random.default_rng(0).standard_normal((3, num), np.float32)


def _run(
    kernel: CompiledKernel, gradient: Any, params: Any, slots: Any, *, num_arrays: int
) -> Callable[[], object]:
    out, wanted = np.empty_like(gradient), [True] * num_arrays
    return lambda: kernel.run(
        gradient=gradient,
        params=params,
        slots=slots,
        arrays=[],
        out=out,
        scalars=[np.float32(0.1), np.float32(0.001)],
        passage=Passage(reads=wanted, writes=wanted),
    )


def _drives(places: Sequence[Place]) -> tuple[Drive, ...]:
    found: dict[Any, Drive] = {}
    for place in places:
        if place.bandwidth is None:
            continue
        one = place.bandwidth
        key = place.path.stat().st_dev
        made = Drive(
            read=_measured(one.read),
            write=_measured(one.taken_write),
            mixed=_measured(one.taken_mixed),
            flush=_measured(one.flush),
            file=_measured(one.file_bytes),
        )
        found.setdefault(key, made)
    if not found:
        raise ValueError(
            "expected a directory whose bandwidth was measured, found none: give one "
            "that can be written, and a --size above 0"
        )
    return tuple(found.values())


def _device(device: Any) -> Device:
    host = np.ones(_COPIED_BYTES // 4, np.float32)
    array = jax.device_put(host, device)
    stats = device.memory_stats() or {}
    bytes_limit = stats.get("bytes_limit")
    memory = (
        _measured(bytes_limit)
        if bytes_limit
        else Rate(16e9, "the device does not tell its memory", "guessed")
    )

    def to_device() -> None:
        jax.block_until_ready(jax.device_put(host, device))

    def to_host() -> None:
        # A copy of the array: JAX keeps what it has copied to the host.
        np.asarray(array + 0)

    return Device(
        memory=memory,
        to_device=_measured(_COPIED_BYTES / least_s(to_device)),
        to_host=_measured(_COPIED_BYTES / least_s(to_host)),
    )
