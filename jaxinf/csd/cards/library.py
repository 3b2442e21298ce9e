"""Xilinx's runtime (XRT) under pyxrt's names: its C functions, or pyxrt itself.

Invariant: every handle is closed exactly once, buffers before their device, also at the
interpreter's exit: if a handle outlives the library, XRT ends the process by a signal.
Nothing is loaded before a store of cards is opened.

pyxrt is built for one version of Python, and its calls hold the GIL; the C functions
work with any, and other threads run while bytes move to or from a card. They are the
same from 2021.1 (2.11) to 2026.1.
"""

import ctypes
import enum
import mmap
import os
import re
import weakref
from pathlib import Path
from typing import Any

from jaxinf.errors import CsdError

LIBRARY = "libxrt_coreutil.so.2"
"""XRT's library, in ``lib`` below XILINX_XRT, or on the loader's path."""

_KERNEL = re.compile(rb'<kernel\s(?:[^>]*\s)?name="(\w+)"')
_HANDLE, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_UUID_BYTES = 16
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
_INSTALL = (
    "install XRT, and run `source /opt/xilinx/xrt/setup.sh` before Python. "
    "csd='emulated' runs the same kernels with no card"
)


def load_runtime() -> Any:
    """Returns XRT's C functions under pyxrt's names, or pyxrt if one is missing.

    Raises:
      CsdError: XRT is not installed, or its environment is not set up.
    """
    prefix = os.environ.get("XILINX_XRT")
    if not prefix:  # without its environment the runtime would end the process
        raise CsdError(
            "csd='smartssd': expected the variable XILINX_XRT to name XRT's directory, "
            f"found it unset; {_INSTALL}"
        )
    installed = Path(prefix) / "lib" / LIBRARY
    try:
        return XrtLibrary(installed if installed.exists() else Path(LIBRARY))
    except (OSError, AttributeError) as error:
        refusal = error
    try:
        import pyxrt  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise CsdError(
            f"csd='smartssd': expected Xilinx's runtime (XRT), found neither {LIBRARY} "
            f"({refusal}) nor its Python module ({error}); {_INSTALL}"
        ) from error
    return pyxrt


class XrtLibrary:
    """The part of pyxrt's module that `jaxinf.csd.cards.xrt` uses.

    An `AttributeError` means a release older than 2021.1, or newer than those known.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path), use_errno=True)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.xclBOSyncDirection = Direction
        self.xclbin = _Xclbin
        for name, kind in (
            ("device", _Device), ("kernel", _Kernel), ("bo", _Bo), ("run", _Run),
        ):  # fmt: skip
            setattr(self, name, type(name, (kind,), {"xrt": library}))


class Direction(enum.IntEnum):
    XCL_BO_SYNC_BO_TO_DEVICE = 0
    XCL_BO_SYNC_BO_FROM_DEVICE = 1


class Flags(enum.IntEnum):
    normal = 0
    p2p = 1 << 30


class _Handle:
    """A handle that is closed once, and keeps the one that it was made from."""

    xrt: Any

    def _open(
        self, function: str, *arguments: Any, close: str, parent: "_Handle | None"
    ) -> None:
        ctypes.set_errno(0)
        self.handle = getattr(self.xrt, function)(*arguments)
        if not self.handle:
            raise _failure(function)
        self._parent = parent
        # At the program's exit the newest is closed first.
        weakref.finalize(self, getattr(self.xrt, close), self.handle)

    def _call(self, function: str, *arguments: Any) -> None:
        """Calls a function on the handle, which returns 0 if it succeeds."""
        ctypes.set_errno(0)
        if getattr(self.xrt, function)(self.handle, *arguments):
            raise _failure(function)


def _failure(function: str) -> RuntimeError:
    code = ctypes.get_errno()
    reason = os.strerror(code) if code else "XRT says why on standard error"
    return RuntimeError(f"{function}: {reason}")


class _Device(_Handle):
    def __init__(self, device: int | str) -> None:
        function, name = "xrtDeviceOpen", device
        if isinstance(device, str):
            function, name = "xrtDeviceOpenByBDF", device.encode()
        self._open(function, name, close="xrtDeviceClose", parent=None)

    def load_xclbin(self, xclbin: "_Xclbin") -> Any:
        self._call("xrtDeviceLoadXclbinFile", os.fsencode(xclbin.path))
        # A uuid may contain zero bytes, so it is passed by address, not as a string.
        uuid = ctypes.create_string_buffer(_UUID_BYTES)
        self._call("xrtDeviceGetXclbinUUID", uuid)
        return uuid


class _Xclbin:
    """The file; its metadata, which is XML, has the names of its kernels."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with content:
            names = dict.fromkeys(_KERNEL.findall(content))
        if not names:
            raise RuntimeError("there are no kernels in it")
        self.path, self._names = path, [name.decode() for name in names]

    def get_kernels(self) -> "list[KernelName]":
        return [KernelName(name) for name in self._names]


class KernelName:
    def __init__(self, name: str) -> None:
        self._name = name

    def get_name(self) -> str:
        return self._name


class _Kernel(_Handle):
    def __init__(self, device: _Device, uuid: Any, name: str) -> None:
        arguments = device.handle, uuid, name.encode()
        self._open("xrtPLKernelOpen", *arguments, close="xrtKernelClose", parent=device)

    def group_id(self, argument: int) -> int:
        group = self.xrt.xrtKernelArgGroupId(self.handle, argument)
        if group < 0:
            raise _failure("xrtKernelArgGroupId")
        return group


class _Bo(_Handle):
    """``bo(device, size, flags, group)``, or ``bo(parent, size, offset)``."""

    flags = Flags

    def __init__(self, parent: _Handle, num_bytes: int, *rest: int) -> None:
        function = "xrtBOSubAlloc" if isinstance(parent, _Bo) else "xrtBOAlloc"
        arguments = parent.handle, num_bytes, *rest
        self._open(function, *arguments, close="xrtBOFree", parent=parent)
        self._num_bytes = num_bytes

    def size(self) -> int:
        return self._num_bytes

    def map(self) -> memoryview:
        address = self.xrt.xrtBOMap(self.handle)
        if not address:
            raise _failure("xrtBOMap")
        memory = (ctypes.c_ubyte * self._num_bytes).from_address(address)
        return memoryview(memory).cast("B")

    def sync(self, direction: Direction, num_bytes: int, offset: int) -> None:
        """Copies between host and card; ctypes releases the GIL meanwhile."""
        self._call("xrtBOSync", direction, num_bytes, offset)


class _Run(_Handle):
    def __init__(self, kernel: _Kernel) -> None:
        self._open("xrtRunOpen", kernel.handle, close="xrtRunClose", parent=kernel)
        self._arguments: dict[int, Any] = {}  # buffers live as long as the run

    def set_arg(self, number: int, value: Any) -> None:
        if isinstance(value, _Bo):
            word: Any = _HANDLE(value.handle)
        elif isinstance(value, int) and -(1 << 31) <= value < 1 << 31:
            word = ctypes.c_int32(value)
        else:
            raise TypeError(f"argument {number}: expected a buffer or 32 bits")
        self._call("xrtRunSetArg", number, word)
        self._arguments[number] = value

    def start(self) -> None:
        self._call("xrtRunStart")

    def state(self) -> int:
        return int(self.xrt.xrtRunState(self.handle))
