"""Cards through the C functions of Xilinx's runtime (XRT); no call holds the GIL.

Invariant: every handle is closed exactly once, buffers before their device, also at the
interpreter's exit: if a handle outlives the library, XRT ends the process by a signal.
Nothing is loaded before a store of cards is opened. Kernels get buffers and 32-bit
words, nothing else.

The functions are the same from 2021.1 (2.11) to 2026.1, for any Python.
"""

import ctypes
import itertools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.csd.cards.xclbin import kernel_names
from jaxinf.errors import CsdError

LIBRARY = "libxrt_coreutil.so.2"
"""XRT's library, in ``lib`` below XILINX_XRT, or on the loader's path."""

DEVICE_BYTES = 4 << 30
"""Memory of a SmartSSD's card."""

P2P = 1 << 30
"""The flag of a buffer that drives can reach."""

_HANDLE, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_UUID_BYTES = 16
_TO_CARD, _FROM_CARD = 0, 1
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "xrtDeviceOpen": (_HANDLE, (ctypes.c_uint,)),
    "xrtDeviceOpenByBDF": (_HANDLE, (ctypes.c_char_p,)),
    "xrtDeviceClose": (_INT, (_HANDLE,)),
    "xrtDeviceLoadXclbinFile": (_INT, (_HANDLE, ctypes.c_char_p)),
    "xrtDeviceGetXclbinUUID": (_INT, (_HANDLE, ctypes.c_char_p)),
    "xrtPLKernelOpen": (_HANDLE, (_HANDLE, ctypes.c_char_p, ctypes.c_char_p)),
    "xrtKernelArgGroupId": (_INT, (_HANDLE, _INT)),
    "xrtKernelClose": (_INT, (_HANDLE,)),
    "xrtBOAlloc": (_HANDLE, (_HANDLE, _SIZE, ctypes.c_uint64, ctypes.c_uint32)),
    "xrtBOSubAlloc": (_HANDLE, (_HANDLE, _SIZE, _SIZE)),
    "xrtBOMap": (_HANDLE, (_HANDLE,)),
    "xrtBOSync": (_INT, (_HANDLE, _INT, _SIZE, _SIZE)),
    "xrtBOFree": (_INT, (_HANDLE,)),
    "xrtRunOpen": (_HANDLE, (_HANDLE,)),
    "xrtRunSetArg": (_INT, (_HANDLE, _INT)),  # then the argument, of any type
    "xrtRunStart": (_INT, (_HANDLE,)),
    "xrtRunState": (_INT, (_HANDLE,)),
    "xrtRunClose": (_INT, (_HANDLE,)),
}

_COMPLETED = 4
_PENDING = (1, 2, 3, 7)  # new, queued, running, submitted
_STATES = {5: "error", 6: "abort", 8: "timeout", 9: "no response"}
_FIRST_WAIT_S, _LONGEST_WAIT_S = 20e-6, 500e-6
_INSTALL = (
    "install XRT, and run `source /opt/xilinx/xrt/setup.sh` before Python. "
    "csd='emulated' runs the same kernels with no card"
)


class NoCardMemory(CsdError):
    """A card has no memory left."""


def has_runtime() -> bool:
    """Whether XRT seems to be set up; nothing is loaded."""
    prefix = os.environ.get("XILINX_XRT")
    return bool(prefix) and (Path(prefix) / "lib" / LIBRARY).exists()


def load_runtime() -> Any:
    """Returns XRT's C functions, with their types.

    Raises:
      CsdError: XRT is not installed or too old, or its environment is not set up.
    """
    prefix = os.environ.get("XILINX_XRT")
    if not prefix:  # without its environment the runtime would end the process
        raise CsdError(
            "csd='smartssd': expected the variable XILINX_XRT to name XRT's directory, "
            f"found it unset; {_INSTALL}"
        )
    own = Path(prefix) / "lib" / LIBRARY
    try:
        library: Any = ctypes.CDLL(
            str(own if own.exists() else LIBRARY), use_errno=True
        )
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except OSError as error:
        raise CsdError(
            f"csd='smartssd': expected Xilinx's runtime (XRT), found no {LIBRARY} "
            f"({error}); {_INSTALL}"
        ) from error
    except AttributeError as error:
        raise CsdError(
            "csd='smartssd': expected XRT 2021.1 (2.11) or newer, found a release "
            f"without a function: {error}; install a newer release of XRT"
        ) from error
    library.kernel_names = kernel_names
    return library


# --- handles ------------------------------------------------------------------------

_CLOSE = {
    "xrtDevice": "xrtDeviceClose",
    "xrtPLKer": "xrtKernelClose",
    "xrtBO": "xrtBOFree",
    "xrtRun": "xrtRunClose",
}
_LIVE: "weakref.WeakSet[_Owned]" = weakref.WeakSet()
_NUMBERS = itertools.count()


def close_all() -> None:
    """Closes every handle, the newest first; the interpreter does so at its exit.

    A program that ends another way calls it itself. No object of this module may be
    used afterwards.
    """
    for owned in sorted(_LIVE, key=lambda owned: owned.number, reverse=True):
        owned.close()


class _Owned:
    """What a function of XRT's opens. It is closed once, after all made from it.

    Args:
      xrt: the runtime.
      of: what it is made from, which it keeps.
      function: opens it, and is given the arguments.

    Raises:
      RuntimeError: the function failed; has the system's reason.
    """

    def __init__(
        self, xrt: Any, of: "_Owned | None", function: str, *arguments: Any
    ) -> None:
        ctypes.set_errno(0)
        self.handle = getattr(xrt, function)(*arguments)
        if not self.handle:
            raise _failure(function)
        self.xrt, self.of, self.number = xrt, of, next(_NUMBERS)
        close = next(c for start, c in _CLOSE.items() if function.startswith(start))
        self._end = weakref.finalize(self, getattr(xrt, close), self.handle)
        # A stand-in needs no order at the exit, where threads may use its memory.
        self._end.atexit = isinstance(xrt, ctypes.CDLL)
        _LIVE.add(self)

    def call(self, function: str, *arguments: Any) -> None:
        """Calls a function on the handle, which returns 0 if it succeeds."""
        ctypes.set_errno(0)
        if getattr(self.xrt, function)(self.handle, *arguments):
            raise _failure(function)

    def close(self) -> None:
        """Closes the handle; a second call does nothing."""
        self._end()


def _failure(what: str) -> RuntimeError:
    code = ctypes.get_errno()
    reason = os.strerror(code) if code else "XRT says why on standard error"
    return RuntimeError(f"{what}: {reason}")


class XrtBuffer:
    """Memory of a card that the host has mapped, until no view is left.

    Attributes:
      array: uint8, the host's view: the memory itself for a P2P buffer, else a copy
        that `to_card` and `from_card` synchronise.
    """

    def __init__(self, bo: _Owned, num_bytes: int) -> None:
        self.bo = bo
        address = bo.xrt.xrtBOMap(bo.handle)
        if not address:
            raise _failure("xrtBOMap")
        mapped: Any = (ctypes.c_ubyte * num_bytes).from_address(address)
        mapped.bo = bo  # a view of the mapping keeps it
        self.array = np.frombuffer(mapped, np.uint8)

    def to_card(self, num_bytes: int) -> None:
        """Copies the host's first bytes to the card; blocks."""
        self.bo.call("xrtBOSync", _TO_CARD, num_bytes, 0)

    def from_card(self, num_bytes: int) -> None:
        """Copies the card's first bytes to the host; blocks."""
        self.bo.call("xrtBOSync", _FROM_CARD, num_bytes, 0)


class XrtKernel:
    """A kernel of a card's xclbin. Thread-safe: each call makes its own run."""

    def __init__(self, kernel: _Owned, name: str, card: str) -> None:
        self._kernel = kernel
        self._name = name
        self._card = card

    def bank(self, argument: int) -> int:
        """Returns the number of the memory bank that a pointer is connected to."""
        group = self._kernel.xrt.xrtKernelArgGroupId(self._kernel.handle, argument)
        if group < 0:
            raise _failure("xrtKernelArgGroupId")
        return group

    def run(
        self, buffers: Sequence[_Owned], words: Sequence[int], timeout_s: float
    ) -> None:
        """Runs the kernel once; blocks, without the GIL most of the time.

        Args:
          buffers: for the pointers, which come first.
          words: signed 32-bit integers for the scalars.

        Raises:
          CsdError: the run failed, or did not end in time.
        """
        values: list[Any] = [_HANDLE(one.handle) for one in buffers]
        values += [ctypes.c_int32(word) for word in words]
        kernel = self._kernel
        try:
            run = _Owned(kernel.xrt, kernel, "xrtRunOpen", kernel.handle)
            for number, value in enumerate(values):
                run.call("xrtRunSetArg", number, value)
            run.call("xrtRunStart")
        except RuntimeError as error:
            raise CsdError(
                f"card {self._card}: kernel {self._name} did not start: {error}; see "
                "`dmesg` and `xbutil examine`"
            ) from error
        self._wait(run, timeout_s)

    def _wait(self, run: _Owned, timeout_s: float) -> None:
        pause_s, deadline_s = _FIRST_WAIT_S, time.monotonic() + timeout_s
        while (state := self._kernel.xrt.xrtRunState(run.handle)) in _PENDING:
            if time.monotonic() > deadline_s:
                raise CsdError(
                    f"card {self._card}: kernel {self._name} has not ended after "
                    f"{timeout_s:.0f} s; reset the card (`xbutil reset --device "
                    f"{self._card}`) and open the store again: it is at its last "
                    "committed step"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)
        if state != _COMPLETED:
            raise CsdError(
                f"card {self._card}: kernel {self._name} ended as "
                f"{_STATES.get(state, f'state {state}')}; see `dmesg`, and reset the "
                f"card (`xbutil reset --device {self._card}`)"
            )


class XrtCard:
    """A card with its xclbin loaded. Thread-safe.

    Args:
      xrt: the result of `load_runtime`, or an object with XRT's functions.
      device: PCI address, or index if cards cannot be listed (emulation).

    Raises:
      CsdError: the card or the file is missing, or the card refuses the file.
    """

    def __init__(self, xrt: Any, device: str | int, xclbin: Path) -> None:
        self.name = str(device)
        self._xrt = xrt
        self.xclbin = xclbin
        self._kernels: dict[str, XrtKernel] = {}
        self._lock = threading.Lock()
        try:
            if isinstance(device, str):
                name = device.encode()
                self._device = _Owned(xrt, None, "xrtDeviceOpenByBDF", name)
            else:
                self._device = _Owned(xrt, None, "xrtDeviceOpen", device)
        except RuntimeError as error:
            raise CsdError(
                f"card {device}: cannot be opened: {error}; see `xbutil examine` for "
                "the cards of this machine, and whether this user may open them"
            ) from error
        # A uuid may contain zero bytes, so it is passed by address, not as a string.
        self._uuid = ctypes.create_string_buffer(_UUID_BYTES)
        try:
            self.kernel_names = tuple(xrt.kernel_names(xclbin))
            self._device.call("xrtDeviceLoadXclbinFile", os.fsencode(xclbin))
            self._device.call("xrtDeviceGetXclbinUUID", self._uuid)
        except (OSError, RuntimeError, ValueError) as error:
            raise CsdError(
                f"card {device}: refuses {xclbin}: {error}; give the xclbin that was "
                "built for the card's platform (`xbutil examine` names it; make -C hls "
                "hw PLATFORM=…)"
            ) from error

    @property
    def default_bank(self) -> int:
        """The memory bank that its kernels' ports are expected to use."""
        return self.kernel(self.kernel_names[0]).bank(0)

    def kernel(self, name: str) -> XrtKernel:
        """Returns the kernel of that name.

        Raises:
          CsdError: the xclbin lacks it; names the command that builds it.
        """
        with self._lock:
            if name not in self._kernels:
                self._kernels[name] = self._find(name)
            return self._kernels[name]

    def _find(self, name: str) -> XrtKernel:
        device = self._device
        where = device.handle, self._uuid, name.encode()
        try:
            kernel = _Owned(self._xrt, device, "xrtPLKernelOpen", *where)
        except RuntimeError as error:
            raise CsdError(
                f"card {self.name}: {self.xclbin} has no kernel {name}, only "
                f"{', '.join(self.kernel_names) or 'none'} ({error}); build one that "
                f"has it: make -C hls hw KERNELS={name}"
            ) from error
        return XrtKernel(kernel, name, self.name)

    def allocate(self, num_bytes: int, bank: int, *, p2p: bool = False) -> XrtBuffer:
        """Allocates and maps memory of the card; with `p2p`, drives can reach it.

        Raises:
          NoCardMemory: no memory is left, or P2P is off.
        """
        what = self._device.handle, num_bytes, P2P if p2p else 0, bank
        try:
            bo = _Owned(self._xrt, self._device, "xrtBOAlloc", *what)
            return XrtBuffer(bo, num_bytes)
        except RuntimeError as error:
            raise NoCardMemory(self._no_memory(num_bytes, p2p, error)) from error

    def _no_memory(self, num_bytes: int, p2p: bool, error: Exception) -> str:
        what = f"card {self.name}: {num_bytes:,} bytes of its memory"
        if p2p:
            return (
                f"{what} for P2P: {error}; if P2P is off, `sudo xbutil configure "
                f"--device {self.name} --p2p enable` and a warm reboot switch it on; "
                "if the memory is full, lower memory_bytes or end other users"
            )
        return f"{what}: {error}; lower memory_bytes, or end who else uses the card"

    def part(self, buffer: XrtBuffer, offset_bytes: int, num_bytes: int) -> _Owned:
        """Returns a part of a buffer, for a kernel."""
        what = buffer.bo.handle, num_bytes, offset_bytes
        return _Owned(self._xrt, buffer.bo, "xrtBOSubAlloc", *what)


_OPEN: dict[str | int, XrtCard] = {}
_OPEN_LOCK = threading.Lock()


def open_card(device: str | int, xclbin: Path) -> XrtCard:
    """Returns a card of this machine, opened once in a process, as XRT demands.

    Raises:
      CsdError: as `XrtCard`, or the card is open with another xclbin; loading this one
        would unmap the buffers in use.
    """
    with _OPEN_LOCK:
        if device not in _OPEN:
            _OPEN[device] = XrtCard(load_runtime(), device, xclbin)
        card = _OPEN[device]
    if card.xclbin != xclbin:
        raise CsdError(
            f"card {device}: expected the xclbin that is open in this process, "
            f"{card.xclbin}, found a request for {xclbin}; use one xclbin that has all "
            "kernels, or another process"
        )
    return card
