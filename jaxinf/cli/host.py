"""What `jaxinf doctor` says of the machine: processor, memory, compiler, JAX.

Invariant: nothing is changed; each problem has a remedy.
"""

import os
import platform
import re
from collections import Counter
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from jaxinf.errors import DeviceConfigurationError
from jaxinf.native import toolchain
from jaxinf.optimizer import check_device_configuration
from jaxinf.terminal import format_bytes
from jaxinf.transfer import MACHINE_MEMORY_BYTES, free_memory

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_PACKAGES = ("jaxinf", "jax", "jaxlib", "optax", "flax", "tensorstore", "numpy")


class Problem(NamedTuple):
    """A missing part or feature."""

    what: str
    remedy: str
    is_fatal: bool = False


@dataclass
class Finding:
    """What was found of the machine or a directory, and what is missing."""

    title: str
    facts: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def is_usable(self) -> bool:
        """Whether no problem is fatal."""
        return not any(problem.is_fatal for problem in self.problems)


def look_at_host() -> Finding:
    """Examines the machine; starts JAX's clients, which may take seconds."""
    isa = platform.machine()
    if isa == "x86_64":
        isa = toolchain.levels()[0]
    compiler = toolchain.find_compiler()
    found = Finding("this machine", problems=_cpu_problems(isa))
    if compiler is None:
        what, _, remedy = toolchain.NO_COMPILER.partition("; ")
        what += ": optimizers that this package has no kernels for cannot run"
        found.problems.append(Problem(what, remedy))
    named = re.search(r"(?m)^model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    model = named[1] if named else platform.processor() or "unknown"
    total = format_bytes(MACHINE_MEMORY_BYTES)
    left, limit = free_memory() or (MACHINE_MEMORY_BYTES, "the machine")
    devices = Counter(_jax_devices(found.problems))
    found.facts = {
        "processor": f"{model}, cores: {len(os.sched_getaffinity(0))}, {isa}",
        "memory": f"{total}, of which {limit} leaves {format_bytes(left)}",
        "packages": ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES),
        "JAX devices": ", ".join(f"{num} x {name}" for name, num in devices.items())
        or "none",
        "compiler": compiler or "none",
    }
    return found


def _cpu_problems(isa: str) -> list[Problem]:
    if isa in ("x86-64-v3", "x86-64-v4"):
        return []
    what = "updates have the bits of jitted optax on an x86-64-v3, and not of that here"
    remedy = "compare a short run with plain optax, or use an x86-64 of 2013 or later"
    if not toolchain.levels():
        what = "jaxinf's C++ is for x86-64 and aarch64. No store can be trained here"
        remedy = "train on an x86-64 or aarch64 machine"
    return [Problem(f"the processor is {isa}: {what}", remedy)]


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
