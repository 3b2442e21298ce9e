"""Times the compiled adamw kernel on one thread, and prints one JSON document.

`int8_ns_per_element` is that of int8 moments and all checksums, on arrays that fit into
the cache.
"""

import argparse
import statistics
import timeit
from functools import partial
from pathlib import Path
from typing import Any

import bench
import jax.numpy as jnp
import numpy as np
import optax

from jaxinf.kernels import Checksums, CompiledKernel, compiled
from jaxinf.layout import CodedSlot
from jaxinf.program import trace_update

SHORT = 1 << 15


def run_of(kernel: CompiledKernel, num: int, *, coded: bool) -> partial[object]:
    """Returns a run of the kernel, with the moments in float32 or int8."""
    gradient, params, mu = np.random.default_rng(0).standard_normal(
        (3, num), np.float32
    )
    slots, checksums = [mu, mu * mu], None
    if coded:
        wanted = [True] * 5
        checksums = Checksums(wants_before=wanted, wants_after=wanted)
        for n, values in enumerate(slots):
            scales = np.zeros(-(-num // 256), np.float32)
            slots[n] = CodedSlot(np.zeros(num, np.uint8), scales, key=3)
            slots[n].encode(values)
    return partial(
        kernel.run,
        gradient=gradient,
        params=params,
        slots=slots,
        arrays=[],
        out=np.empty(num, np.float32),
        scalars=[np.float32(0.1), np.float32(0.001)],
        checksums=checksums,
    )


def measure(given: argparse.Namespace, _: Path) -> dict[str, Any]:
    """Runs both."""
    kernel = compiled(trace_update(optax.adamw(1e-3), jnp.zeros(8)).leaves[0].kernel)
    plain = run_of(kernel, given.elements, coded=False)
    coded, count = run_of(kernel, SHORT, coded=True), given.repetitions
    int8_s = statistics.median(timeit.repeat(coded, number=1, repeat=10 * count))
    plain_s = statistics.median(timeit.repeat(plain, number=1, repeat=count))
    return {
        "elements": given.elements,
        "melements_per_s": round(given.elements / plain_s / 1e6, 1),
        "int8_ns_per_element": round(int8_s / SHORT * 1e9, 2),
    }


if __name__ == "__main__":
    bench.run(__doc__, measure, needs_store=False, elements=4 << 20, repetitions=21)
