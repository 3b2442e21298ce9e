"""The first minutes on an accelerator: what works there, how fast, with which bits.

Runs in this order:

    link                              rates of copies in GB/s
    bits                              losses of two runs, and of one that is resumed
    update-PRESET, stream-PRESET      GPT-2: beside plain optax; peaks of memory
    contract, streaming, transform    tests, on the device; the zoo among them

Each part has processes of its own, one at a time; this one never touches the device.
A part that fails or takes too long is noted, with the end of what it printed, and the
next one runs. The result is written after each part. All parts together take at most
--minutes; --presets small medium xl takes an hour (--minutes 60).

    python scripts/bench_gpu.py --store DIR --out result.json
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import bench
import jax
import jax.numpy as jnp
import numpy as np

from jaxinf import compat
from jaxinf.transfer import BufferPool

HERE = Path(__file__).parent
PACKAGES = ("jaxinf", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")
PACKAGES += ("libtpu", "optax", "flax", "numpy")
TESTS = {
    "contract": ("csd/test_contract.py", "optimizer/test_optimizer_contract.py"),
    "streaming": ("streaming/test_streamed.py", "streaming/test_zoo.py"),
    "transform": ("optimizer/test_transform.py", "optimizer/test_restart.py"),
}
TAIL = 4000
"""Characters of a failed part's output that are kept."""


class Runner:
    """Runs a part's programs within its time."""

    def __init__(self, store: Path, limit_s: float) -> None:
        self.store = store
        self._ends_s = time.monotonic() + limit_s

    def output(self, *words: object) -> str:
        """Returns what Python prints.

        Raises:
          RuntimeError: it failed or took too long; has the end of what it printed.
        """
        left_s = max(0.1, self._ends_s - time.monotonic())
        command = ["timeout", "--signal=KILL", f"{left_s}", sys.executable]
        done = subprocess.run(
            [*command, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=HERE.parent,
            env=os.environ | {"PYTHONSAFEPATH": ""},
            check=False,
        )
        if done.returncode:
            is_late = time.monotonic() >= self._ends_s
            what = "took too long" if is_late else f"ended with {done.returncode}"
            raise RuntimeError(f"{what}\n{done.stdout[-TAIL:]}")
        return done.stdout

    def json(self, script: str, *options: object) -> Any:
        """Returns the last line of a script, which is JSON."""
        lines = self.output(HERE / script, "--store", self.store, *options)
        found = (line for line in reversed(lines.splitlines()) if line[:1] == "{")
        return json.loads(next(found))

    def tests(self, *files: str) -> str:
        """Returns the last line of tests; JAX runs them on the device."""
        options = ("-q", "-p", "no:cacheprovider", "-W", "default")
        paths = [HERE.parent / "tests" / file for file in files]
        return self.output("-m", "pytest", *options, *paths).splitlines()[-1]

    def bits(self) -> dict[str, Any]:
        """Compares two runs, and a third that is resumed after three steps."""
        losses = {}
        for name, ends in (("first", [6]), ("second", [6]), ("resumed", [3, 6])):
            place = self.store / name
            words = ["--mode", "stream", "--memory", "4GiB", "--preset", "nano"]
            words += ["--store", place / "store", "--log-dir", place / "log"]
            for steps in ends:
                self.output("-m", "jaxinf.train", *words, "--steps", steps)
            lines = (place / "log/metrics.jsonl").read_text().splitlines()
            losses[name] = [json.loads(line)["loss"] for line in lines]
        return {"same": len(set(map(tuple, losses.values()))) == 1, "losses": losses}


def parts(arguments: argparse.Namespace) -> dict[str, Callable[[Runner], Any]]:
    """Returns the parts in their order."""
    reps = ("--reps", arguments.reps)
    copies = (
        "bench_gpu.py",
        "--json",
        "--link",
        "--megabytes",
        arguments.megabytes,
        *reps,
    )
    found = {"link": lambda r: r.json(*copies), "bits": Runner.bits}
    for preset in arguments.presets:
        for what, script in (("update", "bench_train"), ("stream", "bench_stream")):
            given = (f"{script}.py", "--preset", preset, "--json", *reps)
            found[f"{what}-{preset}"] = lambda r, given=given: r.json(*given)
    for name, files in TESTS.items():
        found[name] = lambda r, files=files: r.tests(*files)
    return found


# --- inside a process of its own ----------------------------------------------------


def seconds_of(function: Callable[[], Any], reps: int) -> float:
    """Returns the median time of a call, until its arrays are ready."""
    times = []
    for _ in range(reps + 1):
        began = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def both_ways(source: Any, values: Any, host: Any, reps: int) -> dict[str, float]:
    """Seconds to copy an array to the device, one there to the host, and both."""
    put, device = jax.device_put, values.sharding
    return {
        "to_device": seconds_of(lambda: put(source, device), reps),
        "to_host": seconds_of(lambda: put(values, host), reps),
        "both": seconds_of(lambda: put([source, values], [device, host]), reps),
    }


def registered(values: Any, pinned: Any, reps: int) -> dict[str, float]:
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


def link(arguments: argparse.Namespace) -> dict[str, float]:
    """Rates of copies in GB/s: of pageable, pinned and registered memory."""
    num_bytes, reps = arguments.megabytes << 20, arguments.reps
    values = jnp.arange(num_bytes // 4, dtype=jnp.float32)
    host = np.asarray(values)
    add = jax.jit(lambda x: x + 1)  # an array that has no copy on the host yet
    base_s = seconds_of(lambda: add(values), reps)
    ways = {
        "pageable_to_device": seconds_of(
            lambda: jax.device_put(host, values.sharding), reps
        ),
        "pageable_to_host": seconds_of(lambda: np.asarray(add(values)), reps) - base_s,
    }
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if "pinned_host" in kinds:
        pinned = values.sharding.with_memory_kind("pinned_host")
        there = jax.device_put(host, pinned)
        found = both_ways(there, values, pinned, reps)
        ways |= {f"pinned_{way}": seconds for way, seconds in found.items()}
        ways |= registered(values, pinned, reps)
    return {
        name: round((1 + name.endswith("both")) * num_bytes / max(s, 1e-9) / 1e9, 3)
        for name, s in ways.items()
    }


def measure(arguments: argparse.Namespace, place: Path) -> Any:
    """Runs the parts, and writes what they find."""
    if arguments.link:
        return link(arguments)
    known = parts(arguments)
    if arguments.list:
        return [*known]
    names = [name for name in known if name in (arguments.only or known)]
    if arguments.store is None or len(names) < len(arguments.only or ()):
        raise SystemExit("bench_gpu: expected --store DIR, and parts that --list names")
    installed = {one.name: one.version for one in metadata.distributions()}
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "versions": {name: installed.get(name) for name in PACKAGES},
        "parts": {},
    }
    ends_s = time.monotonic() + 60 * arguments.minutes
    for name in names:
        began_s, where = time.monotonic(), place.resolve() / name
        try:
            runner = Runner(where, min(arguments.limit, ends_s - began_s))
            found = {"result": known[name](runner)}
        except Exception as error:  # the next part runs in any case
            found = {"error": f"{type(error).__name__}: {error}"}
        shutil.rmtree(where, ignore_errors=True)
        seconds = round(time.monotonic() - began_s, 1)
        result["parts"][name] = {"seconds": seconds, **found}
        print(f"{name}: {'error' if 'error' in found else 'done'}", file=sys.stderr)
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    bench.run(
        __doc__,
        measure,
        needs_store=False,
        out={"type": Path, "metavar": "FILE", "help": "written after each part"},
        presets={"nargs": "+", "default": ["small"]},
        megabytes={"type": int, "default": 256, "help": "of a copy"},
        reps=3,
        limit={"type": float, "default": 150.0, "help": "seconds of a part"},
        minutes={"type": float, "default": 8.0, "help": "of all parts"},
        only={"nargs": "+", "metavar": "PART"},
        list=bench.FLAG | {"help": "the parts' names"},
        link=bench.FLAG | {"help": argparse.SUPPRESS},
    )
