"""The first hour on an accelerator: what works there, how fast, and with which bits.

Runs in this order, from what everything rests on to what takes long:

    contract, transform, streaming    tests, on the device
    link, callbacks, overlap          rates of copies; calls of the host; their overlap
    update-PRESET, stream-PRESET      GPT-2 small, medium, xl: beside plain optax
    bits                              of two runs, and of one that is resumed
    memory                            the device's peak beside the plan
    tiers                             updates on the device: rates, steps by k, losses

Each part has processes of its own, one at a time; this one never touches the device.
A part that fails or takes too long is noted, with the end of what it printed, and the
next one runs. The result is written after each part.

    python scripts/bench_gpu.py --store DIR --out result.json
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PACKAGES = ("jaxinf", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")
PACKAGES += ("libtpu", "optax", "flax", "numpy")
TESTS = {
    "contract": ("csd/test_contract.py", "optimizer/test_optimizer_contract.py"),
    "transform": ("optimizer/test_transform.py", "optimizer/test_restart.py"),
    "streaming": tuple(
        f"streaming/test_{name}.py"
        for name in ("streamed", "running", "saved_plans", "refused", "function")
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


def bits(options: Sequence[Any]) -> Callable[[Runner], Any]:
    """Returns what compares two runs, and a third that is resumed after three steps."""

    def run(runner: Runner) -> Any:
        found, whole = {}, runner.store
        for name, ends in (("first", [6]), ("second", [6]), ("resumed", [3, 6])):
            runner.store = whole / name
            for steps in ends:
                found[name] = runner.json("gpu_parts.py", *options, "--steps", steps)
        digests = {one["params"] for one in found.values()}
        return {"same": len(digests) == 1, "runs": found}

    return run


def parts(arguments: argparse.Namespace) -> Mapping[str, Callable[[Runner], Any]]:
    """Returns the parts in their order."""
    copies = ("--megabytes", arguments.megabytes, "--reps", arguments.reps)
    model = ("--preset", arguments.presets[0])
    found: dict[str, Callable[[Runner], Any]] = {k: tests(v) for k, v in TESTS.items()}
    for name in ("link", "callbacks", "overlap"):
        found[name] = lambda r, name=name: r.json("gpu_parts.py", name, *copies)
    for preset in arguments.presets:
        given = ("--preset", preset, "--json", "--reps", arguments.reps)
        found[f"update-{preset}"] = lambda r, given=given: r.json(
            "bench_train.py", *given
        )
        found[f"stream-{preset}"] = lambda r, given=given: r.json(
            "bench_stream.py", *given
        )
    found["bits"] = bits(["steps", *model])
    found["memory"] = lambda r: r.json("gpu_parts.py", "memory", *model)
    reps = ("--reps", arguments.reps)
    found["tiers"] = lambda r: r.json("gpu_parts.py", "tiers", *model, *reps)
    return found


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
    parts_run = parser.add_mutually_exclusive_group()
    parts_run.add_argument("--only", nargs="+", metavar="PART")
    parts_run.add_argument(
        "--tiers",
        action="store_const",
        const=["link", "tiers"],
        dest="only",
        help="as --only link tiers: what updates on the device rest on",
    )
    parser.add_argument("--list", action="store_true", help="the parts' names")
    arguments = parser.parse_args()
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
