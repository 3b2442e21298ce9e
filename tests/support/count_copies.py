"""Counts the bytes that a training step copies on the host, by the sizes of the copies.

    python tests/support/count_copies.py --store DIR --mode update --clip-norm 1

memcpy and memmove of 16 KiB and more are counted, by a library that is loaded before
all others (so on Linux, with a C compiler). Copies that XLA compiles into loops are
found in the text of the compiled step, with --mode update. Both are printed beside the
sizes of the leaves: a gradient or param that is copied shows as a copy of its size.

    needed          4 bytes a param: its gradient is made once, whatever is copied
    copied          a step's bytes by memcpy, and of those the copies of a leaf's size
    compiled        bytes of copies and transpositions of a leaf's size in the program
"""

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
enum { LEAST = 16384, SLOTS = 4096 };
static _Atomic size_t sizes[SLOTS];
static _Atomic size_t counts[SLOTS];
static void *(*real)(void *, const void *, size_t);
static void note(size_t n) {
  for (size_t i = n % SLOTS, tried = 0; tried < SLOTS; i = (i + 1) % SLOTS, ++tried) {
    size_t none = 0;
    if (atomic_load(&sizes[i]) == n ||
        atomic_compare_exchange_strong(&sizes[i], &none, n) || none == n) {
      atomic_fetch_add(&counts[i], 1);
      return;
    }
  }
}
static void *moved(void *to, const void *from, size_t n) {
  if (n >= LEAST) note(n);
  if (real) return real(to, from, n);
  volatile char *d = to;  /* before the library is ready */
  const volatile char *s = from;
  if (d < s) for (size_t i = 0; i < n; ++i) d[i] = s[i];
  else for (size_t i = n; i--;) d[i] = s[i];
  return to;
}
__attribute__((constructor)) static void ready(void) {
  real = dlsym(RTLD_NEXT, "memmove");
}
void *memcpy(void *to, const void *from, size_t n) { return moved(to, from, n); }
void *memmove(void *to, const void *from, size_t n) { return moved(to, from, n); }
size_t copies_take(size_t *found) {
  size_t num = 0;
  for (size_t i = 0; i < SLOTS; ++i) {
    size_t count = atomic_exchange(&counts[i], 0);
    if (!count) continue;
    found[2 * num] = atomic_load(&sizes[i]);
    found[2 * num++ + 1] = count;
  }
  return num;
}
"""
SLOTS = 4096
MEASURED = "JAXINF_COUNT_COPIES"


def preload(folder: Path) -> Path:
    """Builds the library that counts."""
    source, built = folder / "copies.c", folder / "copies.so"
    source.write_text(SOURCE)
    flags = ["-O2", "-fno-builtin", "-shared", "-fPIC", "-o", str(built)]
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, *flags, str(source), "-ldl"], check=True)
    return built


def taken() -> Counter[int]:
    """Returns the number of copies since the last call, by size in bytes."""
    found = (ctypes.c_size_t * (2 * SLOTS))()
    take = ctypes.CDLL(None).copies_take
    take.restype = ctypes.c_size_t
    number = take(found)
    return Counter({found[2 * i]: found[2 * i + 1] for i in range(number)})


def compiled_copies(text: str, sizes: Mapping[int, str]) -> Counter[int]:
    """Returns the copies of a leaf's size in a compiled program, by bytes.

    Args:
      text: the program, as XLA prints it.
      sizes: names of leaves by bytes.
    """
    found: Counter[int] = Counter()
    made = re.compile(r"= f32\[([\d,]+)\]\S* (?:copy|transpose|fusion)\((.*)")
    for line in text[text.index("\nENTRY ") :].splitlines():
        match = made.search(line)
        if match is None:
            continue
        is_copy = " fusion(" not in line or re.search(
            r"calls=%?(?:wrapped_)?(?:copy|transpose)", line
        )
        num_bytes = 4 * prod(map(int, match[1].split(",")))
        if is_copy and num_bytes in sizes:
            found[num_bytes] += 1
    return found


def measure(arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Runs steps and counts; in the process that has the library."""
    import jax
    from bench_stream import Streamed
    from bench_train import Trainer, batch, optimizer
    from jaxinf_models import PRESETS, abstract_params

    import jaxinf

    arguments.steps, arguments.micro_batches = 1, 1
    arguments.order = "parts"
    _, avals = abstract_params(PRESETS[arguments.preset])
    leaves = jax.tree_util.tree_leaves_with_path(avals)
    sizes = {4 * x.size: jax.tree_util.keystr(path) for path, x in leaves}
    compiled: Counter[int] = Counter()
    store = jaxinf.open_store(place / "store")
    if arguments.mode == "stream":
        step = Streamed(arguments, store, arguments.policy).step
    else:
        tx = jaxinf.smart_update(optimizer(arguments.clip_norm), store)
        trainer = Trainer(arguments, tx)
        step = trainer.step
        text = trainer.compiled.as_text()
        compiled = compiled_copies(text, sizes)
    for number in range(2):
        step(batch(arguments, number))
    store.wait()
    taken()
    for number in range(arguments.reps):
        step(batch(arguments, number))
    store.wait()
    found = Counter({n: c / arguments.reps for n, c in taken().items()})
    store.close()
    of_leaves = {n: c for n, c in found.items() if n in sizes}
    num_params = sum(x.size for _, x in leaves)
    return {
        "mode": arguments.mode,
        "clip_norm": arguments.clip_norm,
        "params": num_params,
        "needed_bytes": 4 * num_params,
        "copied_bytes": round(sum(n * c for n, c in found.items())),
        "copied_bytes_of_leaves": round(sum(n * c for n, c in of_leaves.items())),
        "compiled_bytes": sum(n * c for n, c in compiled.items()),
        "largest": {
            f"{n}": [round(c, 2), sizes.get(n, "")]
            for n, c in sorted(found.items(), key=lambda x: -x[0] * x[1])[:12]
        },
    }


def main() -> None:
    """Prints the figures, or with --json one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, required=True, metavar="DIR")
    parser.add_argument("--mode", choices=("update", "stream"), default="update")
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--memory", type=int, default=256 << 20)
    parser.add_argument("--policy", choices=("recompute", "keep"), default="recompute")
    parser.add_argument("--clip-norm", type=float, default=0.0, help="0: none")
    parser.add_argument("--reps", type=int, default=3, help="steps that count")
    parser.add_argument("--json", action="store_true", help="one line")
    arguments = parser.parse_args()
    arguments.store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.store, prefix="copies-") as place:
        if MEASURED not in os.environ:
            beside = {"LD_PRELOAD": str(preload(Path(place))), MEASURED: "1"}
            done = subprocess.run(
                [sys.executable, *sys.argv], env={**os.environ, **beside}, check=False
            )
            if done.returncode:
                raise SystemExit(done.returncode)
            return
        result = measure(arguments, Path(place))
    print(json.dumps(result, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
