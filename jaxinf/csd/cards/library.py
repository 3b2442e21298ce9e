"""XRT's C functions under pyxrt's names: no call here holds the GIL.

Invariant: every handle is closed exactly once, buffers before their device, also at the
interpreter's exit: if a handle outlives the library, XRT ends the process by a signal.

pyxrt is built for one version of Python; this works with any. Other threads run while
bytes move to or from a card. The functions are the same from 2021.1 (2.11) to 2026.1.
"""

import ctypes
import enum
import itertools
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinf.csd.cards.xclbin import kernel_names

_HANDLE, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_UUID_BYTES = 16

_FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
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


class XrtLibrary:
    """The part of pyxrt's module that `jaxinf.csd.cards.xrt` uses.

    Args:
      path: the file ``libxrt_coreutil.so.2``.

    Raises:
      OSError: it cannot be loaded.
      AttributeError: it lacks a function: its release is older than 2021.1, or newer
        than those known here.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path), use_errno=True)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.xclBOSyncDirection = _Direction
        self.xclbin = _Xclbin
        for name, kind in (
            ("device", _Device), ("kernel", _Kernel), ("bo", _Bo), ("run", _Run),
        ):  # fmt: skip
            setattr(self, name, type(name, (kind,), {"xrt": library}))


class _Direction(enum.IntEnum):
    XCL_BO_SYNC_BO_TO_DEVICE = 0
    XCL_BO_SYNC_BO_FROM_DEVICE = 1


class _Flags(enum.IntEnum):
    normal = 0
    p2p = 1 << 30


_LIVE: "weakref.WeakSet[_Owned]" = weakref.WeakSet()
_NUMBERS = itertools.count()


def close_all() -> None:
    """Closes every handle, the newest first; the interpreter calls it at its exit.

    A program that ends another way calls it itself. No object of this module may be
    used afterwards.
    """
    for owned in sorted(_LIVE, key=lambda owned: owned.number, reverse=True):
        owned.close()


class _Owned:
    """A handle that is closed once. It keeps the object it was made from (`_of`)."""

    xrt: Any

    def _own(
        self, handle: int | None, what: str, close: str, of: "_Owned | None"
    ) -> None:
        if not handle:
            raise _failure(what)
        self.handle = handle
        self.number = next(_NUMBERS)
        self._of = of  # a device is closed after its buffers
        self._end = weakref.finalize(self, getattr(self.xrt, close), handle)
        _LIVE.add(self)

    def close(self) -> None:
        """Closes the handle; a second call does nothing."""
        self._end()


def _failure(what: str) -> RuntimeError:
    code = ctypes.get_errno()
    reason = os.strerror(code) if code else "XRT says why on standard error"
    return RuntimeError(f"{what}: {reason}")


class _Device(_Owned):
    def __init__(self, device: int | str) -> None:
        ctypes.set_errno(0)
        if isinstance(device, str):
            handle = self.xrt.xrtDeviceOpenByBDF(device.encode())
        else:
            handle = self.xrt.xrtDeviceOpen(device)
        self._own(handle, "xrtDeviceOpen", "xrtDeviceClose", None)

    def load_xclbin(self, xclbin: "_Xclbin") -> bytes:
        ctypes.set_errno(0)
        if self.xrt.xrtDeviceLoadXclbinFile(self.handle, os.fsencode(xclbin.path)):
            raise _failure("xrtDeviceLoadXclbinFile")
        uuid = ctypes.create_string_buffer(_UUID_BYTES)
        if self.xrt.xrtDeviceGetXclbinUUID(self.handle, uuid):
            raise _failure("xrtDeviceGetXclbinUUID")
        return uuid.raw


class _Xclbin:
    """The file; the names of its kernels are read in Python."""

    def __init__(self, path: str) -> None:
        try:
            self._names = kernel_names(Path(path))
        except (OSError, ValueError) as error:
            raise RuntimeError(f"cannot read xclbin: {error}") from error
        self.path = path

    def get_kernels(self) -> "list[_Name]":
        return [_Name(name) for name in self._names]


class _Name:
    def __init__(self, name: str) -> None:
        self._name = name

    def get_name(self) -> str:
        return self._name


class _Kernel(_Owned):
    def __init__(self, device: _Device, uuid: bytes, name: str) -> None:
        ctypes.set_errno(0)
        # A uuid may contain zero bytes, so it is passed by address, not as a string.
        words = ctypes.create_string_buffer(uuid, _UUID_BYTES)
        handle = self.xrt.xrtPLKernelOpen(device.handle, words, name.encode())
        self._own(handle, "xrtPLKernelOpen", "xrtKernelClose", device)

    def group_id(self, argument: int) -> int:
        group = self.xrt.xrtKernelArgGroupId(self.handle, argument)
        if group < 0:
            raise _failure("xrtKernelArgGroupId")
        return group


class _Bo(_Owned):
    """``bo(device, size, flags, group)``, or ``bo(parent, size, offset)``."""

    flags = _Flags

    def __init__(self, owner: Any, num_bytes: int, *rest: int) -> None:
        ctypes.set_errno(0)
        if isinstance(owner, _Bo):
            handle = self.xrt.xrtBOSubAlloc(owner.handle, num_bytes, *rest)
        else:
            handle = self.xrt.xrtBOAlloc(owner.handle, num_bytes, *rest)
        self._own(handle, "xrtBOAlloc", "xrtBOFree", owner)
        self._num_bytes = num_bytes

    def size(self) -> int:
        return self._num_bytes

    def map(self) -> memoryview:
        address = self.xrt.xrtBOMap(self.handle)
        if not address:
            raise _failure("xrtBOMap")
        memory = (ctypes.c_ubyte * self._num_bytes).from_address(address)
        return memoryview(memory).cast("B")

    def sync(self, direction: _Direction, num_bytes: int, offset: int) -> None:
        """Copies between host and card; ctypes releases the GIL meanwhile."""
        if self.xrt.xrtBOSync(self.handle, direction, num_bytes, offset):
            raise _failure("xrtBOSync")


class _Run(_Owned):
    def __init__(self, kernel: _Kernel) -> None:
        ctypes.set_errno(0)
        handle = self.xrt.xrtRunOpen(kernel.handle)
        self._own(handle, "xrtRunOpen", "xrtRunClose", kernel)
        self._arguments: dict[int, Any] = {}  # buffers live as long as the run

    def set_arg(self, number: int, value: Any) -> None:
        if isinstance(value, _Bo):
            word: Any = _HANDLE(value.handle)
        elif isinstance(value, int) and -(1 << 31) <= value < 1 << 31:
            word = ctypes.c_int32(value)
        else:
            raise TypeError(f"argument {number}: expected a buffer or 32 bits")
        if self.xrt.xrtRunSetArg(self.handle, number, word):
            raise _failure(f"xrtRunSetArg({number})")
        self._arguments[number] = value

    def start(self) -> None:
        if self.xrt.xrtRunStart(self.handle):
            raise _failure("xrtRunStart")

    def state(self) -> int:
        return int(self.xrt.xrtRunState(self.handle))
