"""Copies on an accelerator's stream, and the engine's side of them, in machine code.

    XLA ─► start ─► queue ─► next ─► update ─► release ─► finish ─► XLA

The code is ``cpp/stream_calls.cpp``, whose first comment shows how the two sides wait
for each other. It is compiled when it is first used, with the headers of the installed
XLA; NVIDIA's driver is loaded then, too. Invariant: every transfer that `Queue.next`
returns is released once.
"""

import ctypes
import functools
import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxinf.native import libraries, toolchain
from jaxinf.typing import Array

__all__ = [
    "ALIGNMENT",
    "DRIVER",
    "Queue",
    "Transfer",
    "driver_is_given",
    "handlers",
    "view",
]

ALIGNMENT = 64
"""Arrays of a transfer follow each other at multiples of this number of bytes."""

DRIVER = "JAXINF_CUDA_DRIVER"
"""Variable that names another library than NVIDIA's; a model of it, for tests."""

_TEXT_BYTES = 256


class _Arrival(ctypes.Structure):
    _fields_ = (
        ("transfer", ctypes.c_void_p),
        ("site", ctypes.c_int64),
        ("gradients", ctypes.c_void_p),
        ("results", ctypes.c_void_p),
        ("failure", ctypes.c_char * _TEXT_BYTES),
    )


class Transfer(NamedTuple):
    """Gradients that have arrived, or a failure.

    Attributes:
      pointer: of the transfer; None if it is a failure to fetch results.
      site: number of the call that sent them.
      gradients: address of the first array; None after a failure.
      results: address for the first result; None if there are none.
      failure: what the driver said; empty if nothing has failed.
    """

    pointer: int | None
    site: int
    gradients: int | None
    results: int | None
    failure: str


class Queue:
    """The transfers of one store; thread-safe.

    Args:
      headers: the folder of XLA's headers.
      limit_bytes: gradients of a device that wait take no more pinned memory, except
        for a single longer transfer.

    Raises:
      CompilerError: there is no compiler, or it failed.
      OSError: the driver cannot be loaded; or no folder has room for the library.
    """

    def __init__(self, headers: Path, limit_bytes: int) -> None:
        self._library = _library(headers, _driver())
        self.number: int = self._library.jaxinf_stream_open(limit_bytes)
        if self.number < 0:
            raise MemoryError

    def next(self, device: int) -> Transfer | None:
        """Waits for the next gradients of a device, or a failure; releases the GIL.

        Args:
          device: number of the device, in order of its first call.

        Returns:
          The transfer; None when the queue is closed and nothing is to come.
        """
        found = _Arrival()
        if self._library.jaxinf_stream_next(self.number, device, ctypes.byref(found)):
            return None
        failure = found.failure.decode(errors="replace")
        addresses = found.gradients, found.results
        return Transfer(found.transfer, found.site, *addresses, failure)

    def release(self, transfer: Transfer) -> None:
        """Ends a transfer: its gradients were taken, and its results are complete.

        After a failure: the store has stopped.
        """
        self._library.jaxinf_stream_release(self.number, transfer.pointer)

    def close(self) -> None:
        """Lets nothing be started or fetched any more; does not wait."""
        self._library.jaxinf_stream_close(self.number)

    def destroy(self) -> None:
        """Frees the memory of a closed queue whose transfers have all been released.

        Blocks until the last results have left.
        """
        self._library.jaxinf_stream_destroy(self.number)


def driver_is_given() -> bool:
    """Whether `DRIVER` names a library, which may be no GPU's."""
    return bool(os.environ.get(DRIVER))


def _driver() -> str:
    return os.environ.get(DRIVER) or "libcuda.so.1"


def handlers(headers: Path) -> tuple[int, int]:
    """Returns the addresses of XLA's handlers, start and finish; see `Queue`."""
    library = _library(headers, _driver())
    functions = library.jaxinf_stream_start, library.jaxinf_stream_finish
    start, finish = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions)
    return start, finish


def view(address: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """Returns an array of memory that a transfer has."""
    wanted = np.dtype(dtype)
    num_bytes = wanted.itemsize * int(np.prod(shape))
    memory: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
    return np.frombuffer(memory, np.uint8).view(wanted).reshape(shape)


@functools.cache
def _library(headers: Path, driver: str) -> Any:
    """Returns the code with its prototypes, and with the driver loaded."""
    compiler = toolchain.find_compiler()
    if compiler is None:
        raise toolchain.CompilerError(toolchain.NO_COMPILER)
    level = next(iter(toolchain.levels()), "")
    digest = hashlib.sha256()
    for path in (*sorted(toolchain.STREAM_CALLS.parent.glob("*.h")), *_of_xla(headers)):
        digest.update(path.read_bytes())
    source = toolchain.STREAM_CALLS
    key = toolchain.key_of_library(source.read_text(), compiler, level)
    digest.update(key.encode())

    def compile_(output: Path) -> None:
        toolchain.compile_source(
            source, output, compiler=compiler, level=level, headers=headers
        )

    path = libraries.cached_library(f"stream-{digest.hexdigest()}", compile_)
    library: Any = libraries.load_library(path)
    library.jaxinf_stream_open.restype = ctypes.c_int64
    for name, arguments in _PROTOTYPES.items():
        getattr(library, f"jaxinf_stream_{name}").argtypes = arguments
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    if library.jaxinf_stream_load(os.fsencode(driver), text):
        raise OSError(text.value.decode(errors="replace"))
    return library


_PROTOTYPES = {
    "load": [ctypes.c_char_p, ctypes.c_char_p],
    "open": [ctypes.c_int64],
    "next": [ctypes.c_int64, ctypes.c_int, ctypes.c_void_p],
    "release": [ctypes.c_int64, ctypes.c_void_p],
    "close": [ctypes.c_int64],
    "destroy": [ctypes.c_int64],
}


def _of_xla(headers: Path) -> list[Path]:
    return [headers / "xla" / "ffi" / "api" / "c_api.h"]
