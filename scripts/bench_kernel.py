"""Times the compiled adamw kernel against a loop written by hand.

Both run on one thread, over the same arrays, in turns; medians are printed. The loop
computes the kernel's results for fp32 params with the same instructions, but checks no
gradient and supports no other dtypes. `int8_ns_per_element` is the kernel's least time
with int8 moments and all checksums, on arrays that fit into the cache. `compile_s`
and `cached_s` are the times of a kernel's first load and of one from the cache, in a
process that has loaded no other.

With --parts it says instead where a kernel's time goes, in ns a param on one core: each
part alone, over a block as the kernel has it, and the kernel over arrays that fit into
the cache, with and without checksums and stores past the caches. Then over arrays in
memory: 32 bytes a param with fp32 state, 16 read and 16 written. Least times of many
turns.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

from jaxinf.cli.rates import least_s, update_int8
from jaxinf.kernels import compiled
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

PARTS = """
#include "adamw.cpp"
#include <time.h>
using namespace jaxinf;
using L = Lanes;

constexpr long num = block_elements, num_cached = 1 << 14, num_streamed = 1 << 15;
constexpr long num_long = 1 << 22;  // no cache has so many
alignas(64) static float gradient[num_long], params[num_long], given[num_long];
alignas(64) static float out[num_long], mu[num_long], nu[num_long];
alignas(64) static std::uint8_t codes[2][2 * num_long];
static float scales[2][num_long / code_block];
static volatile Word sink;

static double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static void set_numbers(long length) {
  for (Word i = 0; i < length; ++i) {
    const auto random = [&](Word key) {
      const float sum = uniform_of(i, key) + uniform_of(i, key + 1) +
                        uniform_of(i, key + 2) - 1.5f;
      return 2.0f * sum;
    };
    gradient[i] = random(1), params[i] = given[i] = random(4), mu[i] = random(7);
    nu[i] = random(10) * random(10);
  }
}

// Returns the ns a param of a part, by its number in the script's list.
extern "C" __attribute__((visibility("default"))) double part(int number,
                                                              std::int32_t dtype,
                                                              long num_runs) {
  const FlushToZero section;
  const Word constants[] = {0x3f666666, 0x3dcccccd, 0x3f7fbe77, 0x3a83126f,
                            0, 0x322bcc77, 0x38d1b717, 0xba83126f};
  const Word scalars[] = {bits_of_float(0.1f), bits_of_float(0.001f)};
  const Body<L> body(L(), constants, scalars);
  const long length = number > 9   ? num_long
                      : number > 8 ? num_streamed
                      : number > 6 ? num_cached
                                   : num;
  set_numbers(length);
  const Array given_gradient = {gradient, nullptr, float32, 0, 0};
  const Array stored = {params, nullptr, float32, 0, 0};
  const Array update = {out, nullptr, float32, 0, 0};
  Array slots[2];
  SideBySide none;
  for (int k = 0; k < 2; ++k) {
    float* const numbers = k ? nu : mu;
    const bool is_coded = dtype != float32;
    slots[k] = {is_coded ? (void*)codes[k] : numbers, scales[k], dtype, (Word)k, 0};
    narrowed(slots[k], 0, length, (const Word*)numbers, none);
  }
  Block<Body<L>> block = {gradient, params, out, {mu, nu}, {}};
  L::I32 bad = {};
  Sum sums[20];
  Word results[20];
  std::uint8_t wanted[20];
  std::memset(wanted, number != 7, sizeof wanted);
  const Passage passage = {given, results, wanted, 0};
  alignas(64) static float zeros[num];
  std::uint8_t no_codes[num];
  float no_scales[num / code_block];
  const double began = now();
  for (long run = 0; run < num_runs; ++run) {
    switch (number) {
      case 0:
        for (int k = 0; k < 2; ++k) widened(slots[k], 0, num, (Word*)(k ? nu : mu));
        break;
      case 1:
        for (long i = 0; i < num; i += L::size) elements<L>(body, block, i, bad);
        break;
      case 2:
        for (long i = 0; i < num; i += L::size) {
          const L::F32 x = L::load(nu + i), y = x / L::load(given + i);
          const L::F32 z = L::load(mu + i) / L::load(given + i), root = L::sqrt(x);
          __asm__ volatile("" : : "x"(y), "x"(z), "x"(root));
        }
        break;
      case 3:
        for (int k = 0; k < 2; ++k)
          narrowed(slots[k], 0, num, (const Word*)(k ? nu : mu), none);
        break;
      case 4:  // blocks of zeros have no codes
        for (int k = 0; k < 2; ++k)
          encode_blocks(zeros, 0, num, 0, 0, no_codes, no_scales, none);
        break;
      case 5:
        for (int k = 0; k < 2; ++k)
          for (Word i = 0; i < num; i += L::size) {
            const L::I32 random = (L::I32)random_bits(L::U32{} + i, (Word)run);
            __asm__ volatile("" : : "x"(random));
          }
        break;
      case 6:
        for (int k = 0; k < 2; ++k) {
          Span spans[6];
          const int num_spans = find_spans<2>(stored, params, slots, 0, num,
                                              sums + 8 * k, wanted, spans);
          add_to_sums(spans, num_spans);
        }
        break;
      case 11:
        for (long i = 0; i < length; i += L::size) {
          const L::F32 g = L::load(gradient + i), p = L::load(given + i);
          L::store(mu + i, L::load(mu + i) + g);
          L::store(nu + i, L::load(nu + i) + p);
          store_past_caches(g, params + i);
          store_past_caches(p, out + i);
        }
        order_stores();
        break;
      default:
        chunk<L, Body>(length, given_gradient, stored, update, slots, nullptr, scalars,
                       constants, passage);
    }
    __asm__ volatile("" : : : "memory");
  }
  const double ns = (now() - began) / (double)num_runs / (double)length;
  sink = bad[0] + sums[0].sum;
  return ns;
}
"""

FIRST_LOAD = """
import time
import jax.numpy as jnp, optax
from jaxinf.program import trace_update
from jaxinf.kernels.compiled import compile_kernel
from jaxinf.native.toolchain import find_compiler, levels
kernel = trace_update(optax.adamw(1e-3), jnp.zeros(8)).leaves[0].kernel
began = time.perf_counter()
compile_kernel(kernel, level=levels()[0], compiler=find_compiler())
print(time.perf_counter() - began)
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


PART_NAMES = {
    "decode both moments": 0,
    "update": 1,
    "of it a square root and two divisions": 2,
    "encode both moments": 3,
    "of it the largest of each block": 4,
    "of it random bits": 5,
    "checksums, read and written": 6,
    "kernel without checksums": 7,
    "kernel": 8,
    "kernel with stores past the caches": 9,
    "kernel over arrays in memory": 10,
    "their bytes moved, nothing computed": 11,
}
# As in shell.hpp: the dtype of both moments, and the parts that it does not have.
STATES = {"fp32": (0, (0, 3, 4, 5)), "bf16": (10, (4, 11)), "int8": (11, (11,))}


def measure_parts(num_turns: int) -> dict[str, dict[str, float]]:
    """Returns the ns a param of each part, by state."""
    compiler = toolchain.find_compiler()
    if compiler is None:
        raise SystemExit("bench_kernel: --parts needs a C++ compiler")
    with tempfile.TemporaryDirectory(prefix="jaxinf-bench-") as name:
        source, library = Path(name) / "parts.cpp", Path(name) / "parts.so"
        source.write_text(PARTS)
        toolchain.compile_source(
            source, library, compiler=compiler, level=toolchain.levels()[0],
            headers=toolchain.GENERATED,
        )  # fmt: skip
        part = ctypes.CDLL(str(library)).part
    part.argtypes = [ctypes.c_int, ctypes.c_int32, ctypes.c_long]
    part.restype = ctypes.c_double
    found: dict[str, dict[str, float]] = {state: {} for state in STATES}
    for turn in range(num_turns):
        for state, (dtype, missing) in STATES.items():
            for text, number in PART_NAMES.items():
                is_skipped = number > 9 and turn % 20  # they take long
                if number not in missing and not is_skipped:
                    ns = part(number, dtype, 2 if number > 6 else 50)
                    found[state][text] = min(ns, found[state].get(text, ns))
    return found


def print_parts(found: dict[str, dict[str, float]]) -> None:
    """Prints a row for each part, a column for each state."""
    print(f"{'ns a param':40}", *(f"{state:>6}" for state in found))
    for text in PART_NAMES:
        times = (found[state].get(text) for state in found)
        print(f"{text:40}", *("     -" if t is None else f"{t:6.2f}" for t in times))


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


def load_seconds(directory: Path) -> tuple[float, float]:
    """Times a first load of a kernel not in the package, and one from the cache."""
    environment = {**os.environ, "JAXINF_CACHE_DIR": str(directory / "cache")}
    runs = [
        subprocess.run(
            [sys.executable, "-c", FIRST_LOAD],
            env=environment, check=True, capture_output=True, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    first, second = (float(run.stdout) for run in runs)
    return first, second


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
        compile_s, cached_s = load_seconds(Path(name))
    return {
        "elements": num,
        "level": kernel.level,
        "origin": kernel.origin,
        "kernel_melements_per_s": round(num / kernel_s / 1e6, 1),
        "handwritten_melements_per_s": round(num / loop_s / 1e6, 1),
        "ratio": round(loop_s / kernel_s, 3),
        "int8_ns_per_element": round(int8_s / short * 1e9, 2),
        "compile_s": round(compile_s, 3),
        "cached_s": round(cached_s, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="compiled adamw against a loop")
    parser.add_argument("--elements", type=int, default=4 << 20)
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--parts", action="store_true", help="where the time goes")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    if arguments.parts:
        parts = measure_parts(20 * arguments.repetitions)
        print(json.dumps(parts)) if arguments.json else print_parts(parts)
        return
    result = measure(arguments.elements, arguments.repetitions)
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
