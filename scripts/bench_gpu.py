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
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

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


class PartError(Exception):
    """A part has failed."""


class Runner:
    """Runs a part's programs within its time."""

    def __init__(self, store: Path, limit_s: float) -> None:
        self.store = store
        self._ends = time.monotonic() + limit_s

    def output(self, command: Sequence[object]) -> str:
        """Returns what a program prints; raises `PartError` with the end of it."""
        with tempfile.TemporaryFile("w+") as printed:
            process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                stdout=printed,
                stderr=subprocess.STDOUT,
                cwd=HERE.parent,
                env=os.environ | {"PYTHONSAFEPATH": ""},
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(max(0, self._ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            printed.seek(0)
            text = printed.read()
        if status == 0:
            return text
        what = "took too long" if status is None else f"ended with status {status}"
        raise PartError(f"{what}\n{text[-TAIL:]}")

    def json(self, script: str, *options: object) -> Any:
        """Returns the last line of a script, which is JSON."""
        lines = self.output([HERE / script, "--store", self.store, *options])
        found = (line for line in reversed(lines.splitlines()) if line[:1] == "{")
        return json.loads(next(found))

    def tests(self, *files: str) -> str:
        """Returns the last line of tests; JAX runs them on the device."""
        options = ("-q", "-p", "no:cacheprovider", "-W", "default")
        paths = [HERE.parent / "tests" / file for file in files]
        return self.output(["-m", "pytest", *options, *paths]).splitlines()[-1]

    def bits(self) -> dict[str, Any]:
        """Compares two runs, and a third that is resumed after three steps."""
        losses = {}
        for name, ends in (("first", [6]), ("second", [6]), ("resumed", [3, 6])):
            place = self.store / name
            words = ["--mode", "stream", "--memory", "4GiB", "--preset", "nano"]
            words += ["--store", place / "store", "--log-dir", place / "log"]
            for steps in ends:
                self.output(["-m", "jaxinf.train", *words, "--steps", steps])
            lines = (place / "log/metrics.jsonl").read_text().splitlines()
            found = [json.loads(line) for line in lines]
            losses[name] = [one["loss"] for one in found if "loss" in one]
        return {"same": len(set(map(tuple, losses.values()))) == 1, "losses": losses}


def parts(arguments: argparse.Namespace) -> Mapping[str, Callable[[Runner], Any]]:
    """Returns the parts in their order."""
    reps = ("--reps", arguments.reps)
    copies = ("bench_gpu.py", "--link", "--megabytes", arguments.megabytes, *reps)
    found: dict[str, Callable[[Runner], Any]] = {"link": lambda r: r.json(*copies)}
    found["bits"] = Runner.bits
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
    """Seconds of copies: to the device, to the host, and both at once.

    Args:
      source: The array on the host.
      values: That on the device.
      host: The sharding on the host that it is copied to.
      reps: Number of copies.
    """
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


def main() -> None:
    """Runs the parts, and writes what they find."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, default=Path(), metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FILE", help="by default printed")
    parser.add_argument("--presets", nargs="+", default=["small"])
    parser.add_argument("--megabytes", type=int, default=256, help="of a copy")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of a part")
    parser.add_argument("--minutes", type=float, default=8.0, help="of all parts")
    parser.add_argument("--only", nargs="+", metavar="PART")
    parser.add_argument("--list", action="store_true", help="the parts' names")
    parser.add_argument("--link", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.link:
        print(json.dumps(link(arguments)))
        return
    known = parts(arguments)
    if arguments.list:
        print("\n".join(known))
        return
    if unknown := set(arguments.only or known) - set(known):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; --list names them")
    installed = {one.name: one.version for one in metadata.distributions()}
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "versions": {name: installed.get(name) for name in PACKAGES},
        "parts": {},
    }
    ends = time.monotonic() + 60 * arguments.minutes
    for name in [name for name in known if name in (arguments.only or known)]:
        began, where = time.monotonic(), arguments.store.resolve() / f"bench-gpu-{name}"
        try:
            runner = Runner(where, min(arguments.limit, ends - began))
            found = {"result": known[name](runner)}
        except Exception as error:  # the next part runs in any case
            found = {"error": f"{type(error).__name__}: {error}"}
        shutil.rmtree(where, ignore_errors=True)
        seconds = round(time.monotonic() - began, 1)
        result["parts"][name] = {"seconds": seconds, **found}
        print(f"{name}: {'error' if 'error' in found else 'done'}", file=sys.stderr)
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    if not arguments.out:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
