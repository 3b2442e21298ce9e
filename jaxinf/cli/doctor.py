"""``jaxinf doctor``: examines this machine and its drives.

Invariant: nothing is changed, no file made for a measurement is left behind, and each
problem has a remedy.
"""

import os
import platform
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import tyro
from rich.text import Text

from jaxinf.cli.arguments import PathArg
from jaxinf.cli.directories import Finding, Problem, examine_directory
from jaxinf.cli.display import facts_table, heading, show_progress
from jaxinf.command_line import ByteSize
from jaxinf.errors import DeviceConfigurationError, printable
from jaxinf.native import toolchain
from jaxinf.optimizer import check_device_configuration
from jaxinf.terminal import format_bytes, make_console
from jaxinf.transfer import MACHINE_MEMORY_BYTES, existing_parent, free_memory

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_PACKAGES = ("jaxinf", "jax", "jaxlib", "optax", "flax", "tensorstore", "numpy")


@dataclass(frozen=True)
class Doctor:
    """Test this machine and its drives, and give a remedy for each problem.

    Measures the read, write and mixed bandwidth of each directory's file system with
    direct I/O in a temporary file. The exit status is 1 if a directory cannot hold a
    store.
    """

    # Directories where a store or a CSD root could be.
    paths: Annotated[
        tyro.conf.Positional[tuple[PathArg, ...]],
        tyro.conf.arg(metavar="[PATH ...]"),
    ] = (Path(),)
    # Length of the temporary file; shorter if space is short. 0 measures nothing.
    size: Annotated[int, ByteSize] = 1 << 30

    def run(self) -> int:
        places = []
        for path in [path.absolute() for path in self.paths]:
            with show_progress(f"measuring {printable(str(path))}") as progress:
                places.append(examine_directory(path, self.size, progress))
        host = examine_host()
        for finding in (*places, host):
            _print(finding)
        unusable = ", ".join(place.title for place in places if not place.is_usable)
        verdict = f"cannot hold a store: {printable(unusable)}" if unusable else ""
        if not unusable and not host.is_usable:
            verdict = "no run can start here"
        style = "bold red" if verdict else "bold green"
        make_console().print(Text(f"\n{verdict or 'ready'}", style=style))
        return 1 if verdict else 0


def _print(finding: Finding) -> None:
    rows: list[tuple[str, str | Text]] = []
    rows += [(name, printable(fact)) for name, fact in finding.facts.items()]
    for problem in finding.problems:
        what = Text(printable(problem.what), "red" if problem.is_fatal else "yellow")
        what.append(f"\nremedy: {printable(problem.remedy)}", style="default")
        rows.append(("error" if problem.is_fatal else "note", what))
    console = make_console()
    console.print(heading(printable(finding.title)), soft_wrap=True)
    console.print(facts_table(rows))


def examine_host() -> Finding:
    """Examines the machine; starts JAX's clients, which may take seconds."""
    isa = platform.machine()
    if isa == "x86_64":
        isa = toolchain.levels()[0]
    compiler = toolchain.find_compiler()
    problems = _cpu_problems(isa) + _cache_problems()
    if compiler is None:
        what, _, remedy = toolchain.NO_COMPILER.partition("; ")
        what += ": optimizers that this package has no kernels for cannot run"
        problems.append(Problem(what, remedy))
    match = re.search(r"(?m)^model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    model = match[1] if match else platform.processor() or "unknown"
    total = format_bytes(MACHINE_MEMORY_BYTES)
    left, limit = free_memory() or (MACHINE_MEMORY_BYTES, "the machine")
    devices = Counter(_jax_devices(problems))
    facts = {
        "processor": f"{model}, cores: {len(os.sched_getaffinity(0))}, {isa}",
        "memory": f"{total}, of which {limit} leaves {format_bytes(left)}",
        "packages": ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES),
        "JAX devices": ", ".join(f"{num} x {name}" for name, num in devices.items())
        or "none",
        "compiler": compiler or "none",
    }
    return Finding("this machine", facts, problems)


def _cpu_problems(isa: str) -> list[Problem]:
    if isa in ("x86-64-v3", "x86-64-v4"):
        return []
    what = "updates have the bits of jitted optax on an x86-64-v3, and not of that here"
    remedy = "compare a short run with plain optax, or use an x86-64 of 2013 or later"
    if not toolchain.levels():
        what = "jaxinf's C++ is for x86-64 and aarch64. No store can be trained here"
        remedy = "train on an x86-64 or aarch64 machine"
    return [Problem(f"the processor is {isa}: {what}", remedy)]


def _cache_problems() -> list[Problem]:
    """Tests whether compiled kernels can be kept on this machine."""
    cache = toolchain.cache_directory()
    try:
        tempfile.TemporaryDirectory(dir=existing_parent(cache)).cleanup()
    except OSError as error:
        what = f"{cache}: compiled kernels cannot be kept there ({error.strerror})"
        remedy = "name a directory that this user can write in JAXINF_CACHE_DIR"
        prebuilt = map(toolchain.prebuilt_library, toolchain.levels()[:1])
        if has_prebuilt := any(library.exists() for library in prebuilt):
            what += ": optimizers that this package has no kernels for cannot run"
        return [Problem(what, remedy, is_fatal=not has_prebuilt)]
    return []


def _jax_devices(problems: list[Problem]) -> list[str]:
    import jax

    os.environ.setdefault(_PREALLOCATE, "false")  # not all of an accelerator's memory
    devices: list[str] = []
    try:
        devices = [f"{d.platform}: {d.device_kind}" for d in jax.devices()]
        check_device_configuration()
    except DeviceConfigurationError as error:
        what, _, remedy = str(error).partition(". ")
        problems.append(Problem(what, remedy))
    except Exception as error:  # a backend that fails to start may raise anything
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        setting = os.environ.get("JAX_PLATFORMS")
        where = f" (JAX_PLATFORMS={setting})" if setting else ""
        what = f"JAX found no device{where}: {first_line}"
        remedy = "set JAX_PLATFORMS=cpu, or install the jax build of your accelerator"
        problems.append(Problem(what, remedy, is_fatal=True))
    return devices
