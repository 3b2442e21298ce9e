"""Measures what `jaxinf plan` takes of a machine, for `jaxinf doctor`.

    write  ─►  fsync  ─►  read  ─►  mixed: each thread reads a block, then writes one

Invariant: a drive's file has no name while it is measured, so it disappears however the
  process ends; each phase ends after a few seconds, however slow the drive is.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
from jaxinf_models import PRESETS, abstract_params

import jaxinf
from jaxinf.kernels import Passage, compiled
from jaxinf.program import trace_update
from jaxinf.store import over
from jaxinf.streaming import num_operations
from jaxinf.train.config import TrainConfig
from jaxinf.train.machine import Machine, this_machine
from jaxinf.train.step import loss_of
from jaxinf.transfer import (
    PAGE_BYTES,
    BufferPool,
    allocate_file,
    fsync_file,
    read_into,
    write_from,
)
from jaxinf.typing import Array, ProgressCallback

NUM_THREADS = 4
BLOCK_BYTES = 16 << 20
_MOST_S = 20.0  # of all phases of a drive together
_LONG_ENOUGH_S = 1.0
_NUM_PARAMS = 1 << 22
_NUM_COMMITS = 8
_COPIED_BYTES = 256 << 20


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second of a file system, until durable.

    Attributes:
      moved_bytes: that it moved, in all phases.
      mixed: of reads and writes in equal parts.
    """

    moved_bytes: int
    read: float
    write: float
    mixed: float


def measure_bandwidth(
    scratch: Path, file_bytes: int, progress: ProgressCallback
) -> Bandwidth:
    """Measures with direct I/O, by at most three times the file's length; blocks.

    Args:
      file_bytes: length of the temporary file; cut to an even number of blocks, of
        which each thread has at least two.

    Raises:
      ValueError: the file is too short to measure with.
      StoreError: no room, or the drive failed.
    """
    block_bytes = min(BLOCK_BYTES, file_bytes // (2 * NUM_THREADS))
    block_bytes -= block_bytes % PAGE_BYTES
    if block_bytes <= 0:
        raise ValueError(
            f"a file of {file_bytes} bytes is too short to measure with; give at least "
            f"{2 * NUM_THREADS * PAGE_BYTES} bytes"
        )
    half = file_bytes // (2 * block_bytes)
    file_bytes, moved_bytes, rates = 2 * half * block_bytes, 0, dict[str, float]()
    arrays, path = _random_arrays(block_bytes), scratch / "data"
    allocate_file(path, file_bytes, file_bytes)
    with path.open("rb") as nameless:
        path.unlink()
        file = f"/proc/self/fd/{nameless.fileno()}"

        def read(block: int, array: Array) -> int:
            read_into(file, array, block * block_bytes, block_bytes)
            return block_bytes

        def write(block: int, array: Array) -> int:
            write_from(file, array, block * block_bytes, block_bytes)
            return block_bytes

        def mixed(block: int, array: Array) -> int:
            return read(block, array) + write(half + block, array)

        for transfer, num_blocks in (write, 2 * half), (read, 2 * half), (mixed, half):
            began_s, before = time.perf_counter(), moved_bytes
            for done in _moved(transfer, num_blocks, arrays):
                moved_bytes += done
                progress(moved_bytes, 3 * file_bytes)
            if transfer is not read:
                fsync_file(file)
            took_s = time.perf_counter() - began_s
            rates[transfer.__name__] = (moved_bytes - before) / took_s
    return Bandwidth(moved_bytes, **rates)


def _random_arrays(block_bytes: int) -> list[Array]:
    """Returns an array for each thread, of bytes that no drive can compress."""
    pool, rng = BufferPool(NUM_THREADS * block_bytes), np.random.default_rng()
    arrays = [pool.acquire(block_bytes).array for _ in range(NUM_THREADS)]
    for array in arrays:
        array[:] = np.frombuffer(rng.bytes(block_bytes), np.uint8)
    return arrays


def _moved(
    transfer: Callable[[int, Array], int], num_blocks: int, arrays: Sequence[Array]
) -> Iterator[int]:
    """Yields the bytes of each block that threads have moved, for seconds at most."""
    until_s, idle = time.perf_counter() + _MOST_S / 3, [*arrays]

    def one(block: int) -> int:
        if block >= NUM_THREADS and time.perf_counter() > until_s:
            return 0
        array = idle.pop()
        num_bytes = transfer(block, array)
        idle.append(array)
        return num_bytes

    yield from (done for _, done in over(range(num_blocks), one, NUM_THREADS))


# --- the rest of a machine -----------------------------------------------------------


def measure_machine(path: Path, drives: Sequence[Bandwidth]) -> Machine:
    """Measures programs, updates and commits; blocks for some ten seconds.

    Args:
      path: a directory on a drive, for a store that is removed.
      drives: of the directories; the slowest counts.
    """
    found = this_machine()
    is_apart = found.device_bytes is not None
    rates = {
        "drive_bytes_per_s": min(one.mixed for one in drives),
        "operations_per_s": _operations_per_s("bfloat16" if is_apart else "float32"),
        "params_per_s": _params_per_s(),
        "commit_s": _commit_s(path),
    }
    if is_apart:
        host = np.ones(_COPIED_BYTES // 4, np.float32)
        copy_s = usual_s(lambda: jax.block_until_ready(jax.device_put(host)))
        rates["link_bytes_per_s"] = _COPIED_BYTES / copy_s
    rounded = {name: float(f"{rate:.4g}") for name, rate in rates.items()}
    return msgspec.structs.replace(found, **rounded)


def usual_s(run: Callable[[], object], num_runs: int = 8) -> float:
    """Returns the median time of some runs, after one that does not count."""
    run()
    times: list[float] = []
    while len(times) < num_runs and sum(times) < _LONG_ENOUGH_S:
        began_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def _operations_per_s(dtype: str) -> float:
    """Returns the usual operations a second of loss and gradient of a small model."""
    size = replace(PRESETS["small"], vocab_size=256, num_layers=2, dtype=dtype)
    graphdef, params = abstract_params(size)
    tokens = jnp.zeros((2, 128), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    gradients_of = jax.value_and_grad(loss_of(TrainConfig(), graphdef))
    operations = num_operations(jax.make_jaxpr(gradients_of)(params, batch))
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, leaf.dtype), params)
    program = jax.jit(gradients_of)
    return operations / usual_s(lambda: jax.block_until_ready(program(params, batch)))


def _commit_s(path: Path) -> float:
    """Returns the usual seconds of a commit of next to nothing."""
    params, ones = {"a": jnp.ones(8)}, {"a": jnp.ones(8)}
    with (
        tempfile.TemporaryDirectory(prefix=".jaxinf-doctor-", dir=path) as place,
        jaxinf.open_store(Path(place, "store")) as store,
    ):
        tx = jaxinf.smart_update(optax.sgd(1e-3), store)
        state, times = tx.init(params), []
        for step in range(1, _NUM_COMMITS + 1):
            updates, state = tx.update(ones, state, params)
            params = optax.apply_updates(params, updates)
            store.wait(state)
            metrics = store.metrics_of(step)
            assert metrics is not None
            times.append(metrics.commit_s)
    return statistics.median(times)


def _params_per_s() -> float:
    """Returns the params that AdamW's kernel updates on all cores in a second.

    The kernel makes the checksums that a store asks for.
    """
    kernel = compiled(trace_update(optax.adamw(1e-3), jnp.zeros(8)).leaves[0].kernel)
    rng, count = np.random.default_rng(0), len(os.sched_getaffinity(0))
    passage, given = Passage(reads=[True] * 3, writes=[True] * 3), []
    for _ in range(count):
        gradient, params, mu = rng.standard_normal((3, _NUM_PARAMS), np.float32)
        given.append((gradient, params, [mu, mu * mu], np.empty_like(gradient)))

    def run(arrays: tuple[Array, Array, list[Array], Array]) -> None:
        gradient, params, slots, out = arrays
        scalars = [np.float32(0.1), np.float32(0.001)]
        kernel.run(
            gradient=gradient,
            params=params,
            slots=slots,
            arrays=[],
            out=out,
            scalars=scalars,
            passage=passage,
        )

    run_s = usual_s(lambda: [*over(given, run, count)])
    return count * _NUM_PARAMS / run_s
