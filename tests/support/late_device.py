"""A model of an asynchronous accelerator, on which code that waits too little is wrong.

``late_device.cpp`` is its driver, ``late_device_steps.cpp`` runs the handlers of a step
on it, and ``late_device_on_cpu.cpp`` lets XLA on a CPU call them. As a plugin of pytest
(``-p late_device``) it runs tests with copies on its streams, except for those with
programs of their own.
"""

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
MODEL = ("late_device.cpp", "late_device_on_cpu.cpp")
CPP = HERE.parents[1] / "jaxinf" / "native" / "cpp"


def compiled(output: Path, *sources: Path | str, defines: str = "") -> Path:
    """Compiles sources of this folder: a library, or a program; returns its path."""
    import jax

    kind = ["-shared", "-fPIC"] if output.suffix == ".so" else []
    includes = [f"-I{path}" for path in (CPP, jax.ffi.include_dir())]
    command = [os.environ.get("CXX") or "c++", "-std=c++17", "-O1", "-g", *kind]
    command += ["-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers"]
    command += [*includes, *([defines] if defines else [])]
    command += [str(HERE / source) for source in sources]
    subprocess.run([*command, "-o", output, "-lpthread", "-ldl"], check=True)
    return output


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="late-device-")


@functools.cache
def driver() -> Path:
    """Returns the driver's library, compiled once, and the same in child processes."""
    if given := os.environ.get("JAXINF_CUDA_DRIVER"):
        return Path(given)
    return compiled(Path(_folder().name) / "late_device.so", *MODEL)


@functools.cache
def library() -> Any:
    """Returns it loaded, with the functions for tests."""
    found = ctypes.CDLL(str(driver()))
    found.late_device_count.restype = ctypes.c_int64
    found.late_device_pinned.restype = ctypes.c_int64
    found.late_device_limit.argtypes = [ctypes.c_int64]
    found.late_device_fail.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    found.late_device_faults.restype = ctypes.c_char_p
    return found


@functools.cache
def connect() -> None:
    """Lets XLA on this machine's CPU call the handlers."""
    import jax

    from jaxinf.native import stream_calls
    from jaxinf.optimizer.on_stream import FINISH, START

    found = library()
    start, finish = stream_calls.handlers(Path(jax.ffi.include_dir()))
    found.late_device_use(ctypes.c_void_p(start), ctypes.c_void_p(finish))
    for name, function in (
        (START, found.late_device_start),
        (FINISH, found.late_device_finish),
    ):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")


def pytest_configure(config: pytest.Config) -> None:
    """Runs all tests with copies on the model's streams."""
    del config
    os.environ["JAXINF_CUDA_DRIVER"] = str(driver())
    os.environ["JAXINF_CALLBACK"] = "stream"
    connect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out tests whose programs XLA would run without the handlers."""
    items[:] = [x for x in items if "run_python" not in getattr(x, "fixturenames", ())]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how many copies there were, and what the model found wrong."""
    found = library()
    num = {n: found.late_device_count(n.encode()) for n in COUNTED}
    terminalreporter.write_line(f"late device: {num}")
    if found.late_device_faults():
        terminalreporter.write_line(found.late_device_faults().decode(), red=True)


COUNTED = ("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuStreamWaitValue32")
