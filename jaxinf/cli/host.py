"""Describes the machine: processor, memory, compiler, JAX.

Invariant: nothing is changed; each problem has a remedy.
"""

import contextlib
import ctypes
import os
import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from jaxinf.native import toolchain
from jaxinf.terminal import format_bytes

_V2 = {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}
_CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_CUDA_DRIVER = "libcuda.so.1"
_PACKAGES = ("jaxinf", "jax", "jaxlib", "optax", "flax", "tensorstore", "numpy")


@dataclass(frozen=True)
class Problem:
    """A missing part or feature."""

    what: str
    remedy: str
    is_fatal: bool = False


def look_at_host(*, proc: Path = Path("/proc")) -> tuple[dict[str, str], list[Problem]]:
    """Examines the machine; starts JAX's clients, which may take seconds.

    Returns:
      What it has, by name, and what is missing.
    """
    cpu, memory = _facts(proc / "cpuinfo"), _facts(proc / "meminfo")
    isa = isa_level(cpu.get("flags", "").split())
    problems = _cpu_problems(isa)
    if foreign := toolchain.foreign_package():
        problems.append(Problem(*foreign))
    compiler = toolchain.find_compiler()
    if compiler is None:
        problems.append(_no_compiler())
    total, left = (
        format_bytes(int(memory.get(name, "0 kB").removesuffix("kB")) * 1024)
        for name in ("MemTotal", "MemAvailable")
    )
    model = cpu.get("model name", platform.processor() or "unknown")
    versions = {name: _version(name) for name in _PACKAGES}
    devices = Counter(_jax_devices(problems))
    rows = {
        "processor": f"{model}, cores: {len(os.sched_getaffinity(0))}, {isa}",
        "memory": f"{total}, {left} available",
        "packages": ", ".join(f"{name} {n}" for name, n in versions.items() if n),
        "JAX devices": ", ".join(f"{num} x {name}" for name, num in devices.items()),
        "compiler": compiler or "none",
    }
    return {name: text or "none" for name, text in rows.items()}, problems


def _no_compiler() -> Problem:
    levels = toolchain.levels_of_machine(platform.machine())
    chosen = os.environ.get("CXX", "").strip()
    where = f"CXX={chosen}" if chosen else f"{', '.join(toolchain.COMPILERS)} in PATH"
    without = (
        "optimizers other than the common ones cannot run"
        if any(toolchain.prebuilt_library(one).exists() for one in levels)
        else "jaxinf was built without kernels, and no optimizer can run"
    )
    remedy = (
        "set CXX to one, or unset it"
        if chosen
        else "install one (apt install g++, or pip install 'jaxinf[compiler]')"
    )
    return Problem(f"no C++ compiler was found (looked for {where}): {without}", remedy)


_COMPARE = "compare a short run with plain optax"


def _cpu_problems(isa: str) -> list[Problem]:
    if isa in ("x86-64-v3", "x86-64-v4"):
        return []
    what, remedy = f"the processor is {isa}: ", _COMPARE
    if isa.startswith("x86-64"):
        what += (
            "it has no AVX2 and no fused multiply-add. Kernels compute these in "
            "another way, more slowly. Their bits are those of newer processors, and "
            "not of jitted optax on this one"
        )
        remedy += ", or use an x86-64-v3 processor (2013 or later)"
    elif toolchain.levels_of_machine(platform.machine()):
        what += (
            "updates have the bits of jitted optax on an x86-64 of Intel's, and not "
            "of jitted optax here. They have been tested under emulation only"
        )
    else:
        what += "jaxinf's C++ is for x86-64 and aarch64. No store can be trained here"
        remedy = "train on an x86-64 or aarch64 machine"
    return [Problem(what, remedy)]


def isa_level(flags: list[str]) -> str:
    """Returns the highest x86-64 level whose flags the processor has."""
    machine = platform.machine()
    if machine != "x86_64":
        return machine
    levels = toolchain.levels_of(flags)
    if levels[0] != "x86-64":
        return levels[0]
    return "x86-64-v2" if set(flags) >= _V2 else "x86-64-v1"


def _facts(file: Path) -> dict[str, str]:
    """Returns the first entry of a file of ``name: value``; none if it is missing."""
    try:
        lines = file.read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _missing_driver() -> list[Problem]:
    """Returns the problem of a CUDA plugin beside which JAX falls back to the CPU."""
    plugin = next((name for name in _CUDA_PLUGINS if _version(name)), None)
    try:
        if plugin is not None:
            ctypes.CDLL(_CUDA_DRIVER)
    except OSError as error:
        what = f"{plugin} is installed, and NVIDIA's driver is not found: {error}; "
        what += "JAX uses the CPU, or fails if JAX_PLATFORMS names cuda"
        remedy = "install the driver (nvidia-smi then lists the GPUs), or give them to "
        remedy += "the container (docker run --gpus all)"
        return [Problem(what, remedy)]
    return []


def _jax_devices(problems: list[Problem]) -> list[str]:
    import jax

    from jaxinf.errors import DeviceConfigurationError
    from jaxinf.optimizer.callback import check_device_configuration

    devices: list[str] = []
    problems += _missing_driver()
    try:
        with _without_preallocation():
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


@contextlib.contextmanager
def _without_preallocation() -> Iterator[None]:
    """Keeps JAX's client from reserving an accelerator's memory in advance."""
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    if name in os.environ:
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]
