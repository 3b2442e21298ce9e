"""Cards that are not there: pyxrt's names and traps over this machine's memory.

Invariant: what works here uses pyxrt as the real one wants it. Of its traps: arguments
that are neither buffers nor integers are dropped in silence, integers from 2^31 on are
refused, data that was not synced is stale, a mapping dies with its buffer, the card has
4 GiB, and P2P memory takes part in whole pages of I/O only.

The kernels are those of the cards, compiled for this machine (`make -C hls csim`).
"""

import enum
import functools
import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.csd.cards.card import FileIO
from jaxinf.csd.cards.smartssd import CardFleet
from jaxinf.csd.cards.xrt import DEVICE_BYTES, XrtCard
from jaxinf.io import ByteMeters, DirectIO
from jaxinf.kernels import named_card_kernel
from jaxinf.kernels.card_library import card_function
from jaxinf.layout import PAGE_BYTES
from jaxinf.typing import Array, PathLikeStr

__all__ = ["ANY_KERNEL", "EmulatedFleet", "EmulatedXrt", "open_emulated"]

ANY_KERNEL = "every kernel of the table"
"""A path to "load" that stands for an xclbin with all kernels."""

_POISON = 0xA5
_POISONED_BYTES = 1 << 20  # at the start of a buffer: enough to be noticed
_EXAMPLE = "jaxinf_adam_f32_update_f32"


def open_emulated(
    roots: Sequence[Path],
    memory_bytes: int,
    meters: ByteMeters,
    num_buffers: int | None = None,
) -> CardFleet:
    """A card a root; `num_buffers` of each, None for as many as fit."""
    runtime = EmulatedXrt()
    cards = [XrtCard(runtime, n, Path(ANY_KERNEL)) for n in range(len(roots))]
    return EmulatedFleet("emulated", cards, memory_bytes, meters, num_buffers)


class EmulatedFleet(CardFleet):
    """A fleet whose drives reach P2P memory as strictly as real ones."""

    def _io(self, directory: Path) -> FileIO:
        return _PeerIO(directory, self._meters)


class _PeerIO(DirectIO):
    """Direct I/O that refuses what no drive can do with a card's memory."""

    def read(
        self, path: PathLikeStr, array: Array, offset_bytes: int, num_bytes: int
    ) -> None:
        _check_pages(array, offset_bytes)
        super().read(path, array, offset_bytes, num_bytes)

    def write(
        self, path: PathLikeStr, array: Array, offset_bytes: int, num_bytes: int
    ) -> None:
        _check_pages(array, offset_bytes)
        super().write(path, array, offset_bytes, num_bytes)


def _check_pages(array: Array, offset_bytes: int) -> None:
    """The last, padded page belongs to the transfer: then its length is whole pages."""
    if array.ctypes.data % PAGE_BYTES or array.size % PAGE_BYTES:
        raise OSError(22, "P2P I/O of memory that is no whole pages")
    if offset_bytes % PAGE_BYTES:
        raise OSError(22, "P2P I/O at an offset that is no whole pages")


class _Flags(enum.Enum):
    normal = 0
    p2p = 1


class _Direction(enum.Enum):
    XCL_BO_SYNC_BO_TO_DEVICE = 0
    XCL_BO_SYNC_BO_FROM_DEVICE = 1


class EmulatedXrt:
    """What ``import pyxrt`` gives, of the older or of the newer form.

    Args:
      newer: whether it has ``hw_context``, and refuses what that has replaced.
    """

    def __init__(self, *, newer: bool = False) -> None:
        self.device = _Device
        self.xclbin = _Xclbin
        self.bo = _Bo
        self.run = _Run
        self.xclBOSyncDirection = _Direction
        self.kernel = functools.partial(_Kernel, newer)
        if newer:
            self.hw_context = _Context


class _Device:
    def __init__(self, index: int) -> None:
        if not isinstance(index, int):
            raise RuntimeError(f"Invalid device string '{index}'")
        self.lock = threading.Lock()
        self.free_bytes = DEVICE_BYTES
        self.unit = ThreadPoolExecutor(1, thread_name_prefix=f"card-{index}")
        self.loaded: _Xclbin | None = None

    def load_xclbin(self, xclbin: "_Xclbin") -> int:
        self.loaded = xclbin
        return id(xclbin)

    register_xclbin = load_xclbin


class _Xclbin:
    """A file of kernel names, one a line."""

    def __init__(self, path: str) -> None:
        self._names: list[str] | None = None
        if path != ANY_KERNEL:
            try:
                self._names = Path(path).read_text().split()
            except (OSError, UnicodeDecodeError) as error:
                raise RuntimeError(f"cannot read xclbin: {error}") from error

    def get_kernels(self) -> "list[_Name]":
        return [_Name(n) for n in (self._names or [_EXAMPLE])]

    def holds(self, name: str) -> bool:
        return self._names is None or name in self._names


class _Name:
    def __init__(self, name: str) -> None:
        self._name = name

    def get_name(self) -> str:
        return self._name


class _Context:
    def __init__(self, device: _Device, uuid: int) -> None:
        assert uuid == id(device.loaded)
        self.device = device


class _Memory:
    """Memory of a card, and what the host sees of it: the same only with P2P."""

    def __init__(self, device: _Device, num_bytes: int, *, p2p: bool) -> None:
        with device.lock:
            if not 0 < num_bytes <= device.free_bytes:
                raise MemoryError("std::bad_alloc")
            device.free_bytes -= num_bytes
        self._device = device
        self._num_bytes = num_bytes
        self.on_card = self.on_host = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        if not p2p:
            self.on_host = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
            self.on_host[:_POISONED_BYTES] = _POISON

    def __del__(self) -> None:
        if hasattr(self, "on_host"):
            self.on_host[:_POISONED_BYTES] = (
                _POISON  # who maps it still sees that it is gone
            )
            with self._device.lock:
                self._device.free_bytes += self._num_bytes


class _Bo:
    """``bo(device, size, flags, bank)``, or ``bo(parent, size, offset)``."""

    flags = _Flags

    def __init__(self, owner: Any, num_bytes: int, *rest: Any) -> None:
        if isinstance(owner, _Bo):
            (self._start,) = rest
            self.memory = owner.memory
            if not 0 <= self._start <= self._start + num_bytes <= owner.num_bytes:
                raise RuntimeError("sub-buffer: Invalid argument")
            self._start += owner._start
        else:
            flags, bank = rest
            device = owner.device if isinstance(owner, _Context) else owner
            if bank != 0:
                raise RuntimeError(f"no memory bank {bank}")
            self.memory = _Memory(device, num_bytes, p2p=flags is _Flags.p2p)
            self._start = 0
        self.num_bytes = num_bytes

    def size(self) -> int:
        return self.num_bytes

    def map(self) -> memoryview:
        return self._part(self.memory.on_host).data

    def sync(self, direction: _Direction, num_bytes: int, offset: int) -> None:
        if not 0 <= offset <= offset + num_bytes <= self.num_bytes:
            raise RuntimeError("sync: Invalid argument")
        place = slice(offset, offset + num_bytes)
        host = self._part(self.memory.on_host)[place]
        card = self._part(self.memory.on_card)[place]
        if direction is _Direction.XCL_BO_SYNC_BO_TO_DEVICE:
            card[:] = host
        else:
            host[:] = card

    def address(self) -> int:
        return self._part(self.memory.on_card).ctypes.data

    def _part(self, memory: Array) -> Array:
        return memory[self._start : self._start + self.num_bytes]


class _Kernel:
    """``kernel(device, uuid, name)``; newer: ``kernel(context, name)``."""

    def __init__(self, newer: bool, *arguments: Any) -> None:
        if len(arguments) != (2 if newer else 3):
            raise TypeError("kernel: incompatible constructor arguments")
        owner, name = arguments[0], arguments[-1]
        self.device = owner.device if isinstance(owner, _Context) else owner
        if self.device.loaded is None or not self.device.loaded.holds(name):
            raise RuntimeError(f"No such kernel '{name}'")
        try:
            self.card = named_card_kernel(name)
        except ValueError as error:
            raise RuntimeError(f"No such kernel '{name}'") from error

    def group_id(self, argument: int) -> int:
        if not 0 <= argument < len(self.card.pointers):
            raise RuntimeError(f"argument {argument} has no memory")
        return 0

    @functools.cached_property
    def function(self) -> Callable[..., None]:
        """The compiled kernel; blocks while the compiler runs."""
        return card_function(self.card)

    def __call__(self, *arguments: Any) -> "_Run":
        run = _Run(self)
        for number, value in enumerate(arguments):
            if isinstance(value, (_Bo, int)):
                run.set_arg(number, value)
        run.start()
        return run


class _Run:
    """``run(kernel)``: what was not set is what a register holds, zero."""

    def __init__(self, kernel: _Kernel) -> None:
        self._kernel = kernel
        self._arguments: list[Any] = [0] * len(kernel.card.arguments)
        self._future: Future[None] | None = None

    def set_arg(self, number: int, value: Any) -> None:
        if not isinstance(value, _Bo):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError("set_arg(): incompatible function arguments")
            if not -(1 << 31) <= value < 1 << 31:
                raise TypeError("set_arg(): integer out of range")
        self._arguments[number] = value

    def start(self) -> None:
        self._future = self._kernel.device.unit.submit(self._execute)

    def _execute(self) -> None:
        values = [a.address() if isinstance(a, _Bo) else a for a in self._arguments]
        pointers = values[: len(self._kernel.card.pointers)]
        if not all(pointers):
            raise RuntimeError("a pointer was not set")
        self._kernel.function(*values)

    def state(self) -> int:
        """As pyxrt's ``ert_cmd_state``, which lacks some names, as numbers."""
        if self._future is None:
            return 1
        if not self._future.done():
            return 3
        return 4 if self._future.exception() is None else 5
