"""Measures what `jaxinf plan` takes of a machine, for `jaxinf doctor`.

    write  ─►  fsync  ─►  read  ─►  mixed: each thread reads a block, then writes one

Invariant: a drive's file has no name while it is measured, so it disappears however the
  process ends; each phase ends after a few seconds, however slow the drive is.
"""

import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxinf_models import PRESETS, abstract_params

import jaxinf
from jaxinf.io import (
    PAGE_BYTES,
    BufferPool,
    allocate_file,
    fsync_file,
    read_into,
    write_from,
)
from jaxinf.kernels import CompiledKernel, Passage, compiled
from jaxinf.program import trace_update
from jaxinf.streaming.count import num_operations
from jaxinf.train.machine import Machine, this_machine
from jaxinf.train.step import loss_of
from jaxinf.typing import Array, ProgressCallback

NUM_THREADS = 4
BLOCK_BYTES = 16 << 20
_MOST_S = 20.0  # of all phases of a drive together
_LONG_ENOUGH_S = 1.0
_NUM_PARAMS = 1 << 22
_NUM_COMMITS = _NUM_RUNS = 8
_COPIED_BYTES = 256 << 20

_Transfer = Callable[[int, Array], int]


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
    all_bytes, moved_bytes = 6 * half * block_bytes, 0
    with _nameless_file(scratch, 2 * half * block_bytes) as file:

        def read(block: int, array: Array) -> int:
            read_into(file, array, block * block_bytes, block_bytes)
            return block_bytes

        def write(block: int, array: Array) -> int:
            write_from(file, array, block * block_bytes, block_bytes)
            return block_bytes

        def update(block: int, array: Array) -> int:
            return read(block, array) + write(half + block, array)

        rates = []
        phases = (write, 2 * half), (read, 2 * half), (update, half)
        for transfer, num_blocks in phases:
            began_s, before = time.perf_counter(), moved_bytes
            for done in _moved(transfer, num_blocks, block_bytes):
                moved_bytes += done
                progress(moved_bytes, all_bytes)
            if transfer is not read:
                fsync_file(file)
            taken_s = time.perf_counter() - began_s
            rates.append((moved_bytes - before) / taken_s)
    return Bandwidth(moved_bytes, rates[1], rates[0], rates[2])


def _moved(transfer: _Transfer, num_blocks: int, block_bytes: int) -> Iterator[int]:
    """Yields the bytes of each block that threads have moved, for seconds at most."""
    until_s = time.perf_counter() + _MOST_S / 3
    arrays = threading.local()
    pool = BufferPool(NUM_THREADS * block_bytes)

    def one(block: int) -> int:
        if block >= NUM_THREADS and time.perf_counter() > until_s:
            return 0
        if not hasattr(arrays, "own"):
            arrays.own = pool.acquire(block_bytes).array
            arrays.own.view(np.uint64)[:] = np.random.default_rng().integers(
                0, 2**64, block_bytes // 8, np.uint64
            )  # bytes that no drive can compress
        return transfer(block, arrays.own)

    executor = ThreadPoolExecutor(NUM_THREADS)
    try:
        yield from executor.map(one, range(num_blocks))
    finally:
        executor.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _nameless_file(scratch: Path, num_bytes: int) -> Iterator[str]:
    """Yields a path by which this process opens an unlinked file."""
    path = scratch / "data"
    allocate_file(path, num_bytes, num_bytes)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        path.unlink()
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


# --- the rest of a machine -----------------------------------------------------------


def measure_machine(path: Path, drives: Sequence[Bandwidth]) -> Machine:
    """Measures programs, updates and commits; blocks for some ten seconds.

    Args:
      path: a directory on a drive, for a store that is removed.
      drives: of the directories; the slowest counts.
    """
    found = this_machine()
    is_apart = found.device_bytes is not None
    dtype = "bfloat16" if is_apart else "float32"
    return replace(
        found,
        drive_bytes_per_s=_rounded(min(one.mixed for one in drives)),
        link_bytes_per_s=_rounded(_COPIED_BYTES / _copy_s()) if is_apart else None,
        operations_per_s=_rounded(_operations_per_s(dtype)),
        params_per_s=_rounded(_params_per_s()),
        commit_s=_rounded(_commit_s(path)),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def least_s(run: Callable[[], object], num_runs: int = 5) -> float:
    """Returns the least time of some runs, after one that does not count."""
    run()
    times: list[float] = []
    while len(times) < num_runs and sum(times) < _LONG_ENOUGH_S:
        began_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - began_s)
    return min(times)


def _copy_s() -> float:
    host = np.ones(_COPIED_BYTES // 4, np.float32)
    return least_s(lambda: jax.block_until_ready(jax.device_put(host)))


def _operations_per_s(dtype: str) -> float:
    """Returns the usual operations a second of loss and gradient of a small model."""
    size = replace(PRESETS["small"], vocab_size=256, num_layers=2, dtype=dtype)
    graphdef, params = abstract_params(size)
    tokens = jnp.zeros((2, 128), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    gradients_of = jax.value_and_grad(loss_of(graphdef))
    operations = num_operations(jax.make_jaxpr(gradients_of)(params, batch))
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, leaf.dtype), params)
    program, times = jax.jit(gradients_of), []
    for _ in range(_NUM_RUNS):
        began_s = time.perf_counter()
        jax.block_until_ready(program(params, batch))
        times.append(time.perf_counter() - began_s)
    return operations / statistics.median(times)  # as busy as the machine usually is


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
    """Returns the params that AdamW's kernel updates on all cores in a second."""
    num_cores = len(os.sched_getaffinity(0))
    kernel = compiled(trace_update(optax.adamw(1e-3), jnp.zeros(8)).leaves[0].kernel)
    runs = [_update(kernel) for _ in range(num_cores)]
    with ThreadPoolExecutor(num_cores) as executor:
        run_s = least_s(lambda: [*executor.map(lambda run: run(), runs)])
    return num_cores * _NUM_PARAMS / run_s


def _update(kernel: CompiledKernel) -> Callable[[], object]:
    """Returns a run of the kernel, with the checksums that a store asks for."""
    rng = np.random.default_rng(0)
    gradient, params, mu = rng.standard_normal((3, _NUM_PARAMS), np.float32)
    out, nu, wanted = np.empty_like(gradient), mu * mu, [True] * 3
    return lambda: kernel.run(
        gradient=gradient,
        params=params,
        slots=[mu, nu],
        arrays=[],
        out=out,
        scalars=[np.float32(0.1), np.float32(0.001)],
        passage=Passage(reads=wanted, writes=wanted),
    )
