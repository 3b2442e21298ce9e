"""Times the compiled adamw kernel on one thread, and prints one JSON document.

`int8_ns_per_element` is that of int8 moments and all checksums, on arrays that fit into
the cache.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np
import optax

from jaxinf.kernels import CompiledKernel, Passage, compiled
from jaxinf.layout import CodedSlot
from jaxinf.program import trace_update

SHORT = 1 << 15


def run_of(kernel: CompiledKernel, num: int, *, coded: bool) -> partial[object]:
    """Returns a run of the kernel, with the moments in float32 or int8."""
    gradient, params, mu = np.random.default_rng(0).standard_normal(
        (3, num), np.float32
    )
    slots, passage = [mu, mu * mu], None
    if coded:
        wanted = [True] * 5
        passage = Passage(reads=wanted, writes=wanted)
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
        passage=passage,
    )


def usual_s(run: Callable[[], object], num_runs: int) -> float:
    """Returns the median time of some runs, of a second at most, after a first one."""
    run()
    times: list[float] = []
    while len(times) < num_runs and sum(times) < 1:
        began_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=4 << 20)
    parser.add_argument("--repetitions", type=int, default=21)
    given = parser.parse_args()
    kernel = compiled(trace_update(optax.adamw(1e-3), jnp.zeros(8)).leaves[0].kernel)
    plain = run_of(kernel, given.elements, coded=False)
    int8_s = usual_s(run_of(kernel, SHORT, coded=True), 10 * given.repetitions)
    plain_s = usual_s(plain, given.repetitions)
    result = {
        "elements": given.elements,
        "level": kernel.level,
        "origin": kernel.origin,
        "melements_per_s": round(given.elements / plain_s / 1e6, 1),
        "int8_ns_per_element": round(int8_s / SHORT * 1e9, 2),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
