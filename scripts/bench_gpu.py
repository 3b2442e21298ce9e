"""The first hour on an accelerator: what works there, how fast, and with which bits.

Runs in this order, from what everything rests on to what takes long:

    contract, transform, streaming    tests, on the device
    link                              rates of copies in GB/s
    update-PRESET, stream-PRESET      GPT-2 small, medium, xl: beside plain optax
    bits                              losses of two runs, and of one that is resumed

Each part has processes of its own, one at a time; this one never touches the device.
A part that fails or takes too long is noted, with the end of what it printed, and the
next one runs. The result is written after each part.

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
    "transform": ("optimizer/test_transform.py", "optimizer/test_restart.py"),
    "streaming": tuple(
        f"streaming/test_{name}.py"
        for name in ("streamed", "running", "refused", "function")
    ),
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

    def output(self, command: Sequence[str | Path]) -> str:
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

    def json(self, script: str, *options: Any) -> Any:
        """Returns the last line of a script, which is JSON."""
        command = [HERE / script, "--store", self.store, *map(str, options)]
        lines = self.output(command).splitlines()
        return json.loads(next(line for line in reversed(lines) if line[:1] == "{"))


def tests(files: Sequence[str]) -> Callable[[Runner], Any]:
    """Returns what runs tests; those that JAX runs on the device."""
    paths = [HERE.parent / "tests" / file for file in files]

    def run(runner: Runner) -> Any:
        options = ("-q", "-p", "no:cacheprovider", "-W", "default")
        return runner.output(["-m", "pytest", *options, *paths]).splitlines()[-1]

    return run


def bits(preset: str) -> Callable[[Runner], Any]:
    """Returns what compares two runs, and a third that is resumed after three steps."""

    def run(runner: Runner) -> Any:
        losses = {}
        for name, ends in (("first", [6]), ("second", [6]), ("resumed", [3, 6])):
            place = runner.store / name
            words = ["--mode", "stream", "--memory", "4GiB", "--preset", preset]
            words += ["--store", place / "store", "--log-dir", place / "log"]
            for steps in ends:
                runner.output(["-m", "jaxinf.train", *words, "--steps", str(steps)])
            lines = (place / "log/metrics.jsonl").read_text().splitlines()
            found = [json.loads(line) for line in lines]
            losses[name] = [one["loss"] for one in found if "loss" in one]
        return {"same": len(set(map(tuple, losses.values()))) == 1, "losses": losses}

    return run


def parts(arguments: argparse.Namespace) -> Mapping[str, Callable[[Runner], Any]]:
    """Returns the parts in their order."""
    found: dict[str, Callable[[Runner], Any]] = {k: tests(v) for k, v in TESTS.items()}
    copies = ("--megabytes", arguments.megabytes, "--reps", arguments.reps)
    found["link"] = lambda r: r.json("bench_gpu.py", "--link", *copies)
    for preset in arguments.presets:
        given = ("--preset", preset, "--json", "--reps", arguments.reps)
        found[f"update-{preset}"] = lambda r, given=given: r.json(
            "bench_train.py", *given
        )
        found[f"stream-{preset}"] = lambda r, given=given: r.json(
            "bench_stream.py", *given
        )
    found["bits"] = bits(arguments.presets[0])
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


def version_of(package: str) -> str | None:
    """Returns the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def run_part(
    name: str, part: Callable[[Runner], Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Runs a part, whatever happens in it."""
    began, where = time.monotonic(), arguments.store / f"bench-gpu-{name}"
    outcome: dict[str, Any] = {}
    try:
        outcome["result"] = part(Runner(where, arguments.limit))
    except Exception as error:  # the next part runs in any case
        outcome["error"] = f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(where, ignore_errors=True)
    return {"seconds": round(time.monotonic() - began, 1), **outcome}


def main() -> None:
    """Runs the parts, and writes what they find."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, default=Path(), metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FILE", help="by default printed")
    parser.add_argument("--presets", nargs="+", default=["small", "medium", "xl"])
    parser.add_argument("--megabytes", type=int, default=256, help="of a copy")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds of a part")
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
    arguments.store = arguments.store.resolve()
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "versions": {name: version_of(name) for name in PACKAGES},
        "parts": {},
    }
    for name, part in known.items():
        if name in (arguments.only or known):
            result["parts"][name] = found = run_part(name, part, arguments)
            print(f"{name}: {'error' if 'error' in found else 'done'}", file=sys.stderr)
            if arguments.out:
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    if not arguments.out:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
