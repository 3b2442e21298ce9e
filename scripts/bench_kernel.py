"""Times the compiled adamw kernel against a loop written by hand.

Both run on one thread, over the same arrays, in turns; medians are printed. The loop
computes the kernel's results for fp32 params with the same instructions, but checks no
gradient and supports no other dtypes. `int8_ns_per_element` is the kernel's least time
with int8 moments and all checksums, on arrays that fit into the cache.
"""

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

from jaxinf.cli.probe import least_s
from jaxinf.kernels import CompiledKernel, Passage, compiled
from jaxinf.layout import CodedSlot
from jaxinf.native import toolchain
from jaxinf.program import trace_update

LOOP = """
#include <cmath>
#include <immintrin.h>
extern "C" __attribute__((noinline, visibility("default"))) void loop(
    long n, const float* __restrict g, float* __restrict p, float* __restrict m,
    float* __restrict v, float* __restrict u, float b1, float b2, float r1, float r2,
    float eps, float wd, float lr) {
  for (long i = 0; i < n; ++i) {
    const float m1 = __builtin_fmaf(g[i], 1 - b1, m[i] * b1);
    const float v1 = __builtin_fmaf(g[i] * g[i], 1 - b2, v[i] * b2);
    const float q = m1 * r1 / (__builtin_sqrtf(v1 * r2) + eps);
    const float u1 = __builtin_fmaf(p[i], wd, q) * -lr;
    m[i] = m1;
    v[i] = v1;
    u[i] = u1;
    p[i] = p[i] + u1;
  }
}
"""


def handwritten(level: str, directory: Path):
    """Compiles the loop above."""
    compiler = toolchain.find_compiler()
    if compiler is None:
        raise SystemExit("bench_kernel: expected a C++ compiler for the loop by hand")
    source, library = directory / "loop.cpp", directory / "loop.so"
    source.write_text(LOOP)
    toolchain.compile_source(source, library, compiler=compiler, level=level)
    function = ctypes.CDLL(str(library)).loop
    function.argtypes = [ctypes.c_long, *[ctypes.c_void_p] * 5, *[ctypes.c_float] * 7]
    function.restype = None
    return function


def median_seconds(functions, repetitions):
    """Returns each function's median time.

    Every repetition calls all functions, in alternating order.
    """
    times = [[] for _ in functions]
    order = list(enumerate(functions))
    for _ in range(repetitions + 1):
        for index, function in order:
            began = time.perf_counter()
            function()
            times[index].append(time.perf_counter() - began)
        order.reverse()
    return [statistics.median(values[1:]) for values in times]


def update_int8(kernel: CompiledKernel, num: int) -> Callable[[], object]:
    """Returns a run with moments in 8 bits, and the checksums that a store asks for."""
    rng = np.random.default_rng(0)
    gradient, params, mu = rng.standard_normal((3, num), np.float32)
    slots = []
    for values in (mu, mu * mu):
        scales = np.zeros(-(-num // 256), np.float32)
        slots.append(CodedSlot(np.zeros(num, np.uint8), scales, key=3))
        slots[-1].encode(values)
    out, wanted = np.empty_like(gradient), [True] * 5
    return lambda: kernel.run(
        gradient=gradient,
        params=params,
        slots=slots,
        arrays=[],
        out=out,
        scalars=[np.float32(0.1), np.float32(0.001)],
        passage=Passage(reads=wanted, writes=wanted),
    )


def measure(num: int, repetitions: int) -> dict[str, object]:
    kernel = compiled(trace_update(optax.adamw(1e-3), jnp.zeros(8)).leaves[0].kernel)
    rng = np.random.default_rng(0)
    gradient, params, mu, nu = rng.standard_normal((4, num), np.float32)
    nu, out = np.abs(nu), np.empty(num, np.float32)
    scalars = [np.float32(0.1), np.float32(0.001)]
    with tempfile.TemporaryDirectory(prefix="jaxinf-bench-") as name:
        loop = handwritten(kernel.level, Path(name))
        pointers = [array.ctypes.data for array in (gradient, params, mu, nu, out)]
        kernel_s, loop_s = median_seconds(
            [
                lambda: kernel.run(
                    gradient=gradient, params=params, slots=[mu, nu],
                    scalars=scalars, arrays=[], out=out,
                ),
                lambda: loop(
                    num, *pointers, 0.9, 0.999, 10.0, 1000.0, 1e-8, 1e-4, 1e-3
                ),
            ],
            repetitions,
        )  # fmt: skip
        short = 1 << 15
        int8_s = least_s(update_int8(kernel, short), 10 * repetitions)
    return {
        "elements": num,
        "level": kernel.level,
        "origin": kernel.origin,
        "kernel_melements_per_s": round(num / kernel_s / 1e6, 1),
        "handwritten_melements_per_s": round(num / loop_s / 1e6, 1),
        "ratio": round(loop_s / kernel_s, 3),
        "int8_ns_per_element": round(int8_s / short * 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="compiled adamw against a loop")
    parser.add_argument("--elements", type=int, default=4 << 20)
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    result = measure(arguments.elements, arguments.repetitions)
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
