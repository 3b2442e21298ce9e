"""A stand-in for pyxrt, with its restrictions, over this machine's memory.

Invariant: code that works here uses pyxrt correctly, in any release of XRT. The
stand-in has pyxrt's restrictions: arguments that are neither buffers nor integers below
2^31 are refused, as are copies without a length, and hardware contexts, which some
releases lack; data that was not synced is stale, a mapping ends with its buffer, and
the card has 4 GiB.

The kernels are those of the cards, compiled for this machine (`make -C hls csim`).
"""

import functools
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.csd.cards.library import Direction, Flags, KernelName
from jaxinf.csd.cards.xrt import DEVICE_BYTES
from jaxinf.kernels import card_function, named_card_kernel
from jaxinf.typing import Array

ANY_KERNEL = "every kernel of the table"
"""A path to "load" that stands for an xclbin with all kernels."""

_POISON = 0xA5
_POISONED_BYTES = 1 << 20  # at the start of a buffer: enough to be noticed
_EXAMPLE = "jaxinf_adam_f32_update_f32"


class EmulatedXrt:
    """The module pyxrt."""

    def __init__(self) -> None:
        self.xclBOSyncDirection = Direction
        self.device, self.xclbin = _EmulatedDevice, _EmulatedXclbin
        self.bo, self.kernel, self.run = _EmulatedBo, _EmulatedKernel, _EmulatedRun


class _EmulatedDevice:
    def __init__(self, device: int | str) -> None:
        if isinstance(device, str):
            raise RuntimeError(f"Invalid device string '{device}'")
        self.lock = threading.Lock()
        self.free_bytes = DEVICE_BYTES
        self.unit = ThreadPoolExecutor(1, thread_name_prefix=f"card-{device}")
        self.loaded: _EmulatedXclbin | None = None

    def load_xclbin(self, xclbin: "_EmulatedXclbin") -> int:
        self.loaded = xclbin
        return id(xclbin)


class _EmulatedXclbin:
    """A file of kernel names, one a line."""

    def __init__(self, path: str) -> None:
        has_every = path == ANY_KERNEL
        self._names = None if has_every else Path(path).read_text().split()

    def get_kernels(self) -> list[KernelName]:
        return [KernelName(n) for n in (self._names or [_EXAMPLE])]

    def has_kernel(self, name: str) -> bool:
        return self._names is None or name in self._names


class _EmulatedMemory:
    """Memory of a card and the host's view of it, which is a copy without P2P."""

    def __init__(self, device: _EmulatedDevice, num_bytes: int, *, p2p: bool) -> None:
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
            # A mapping that is still in use now shows poison.
            self.on_host[:_POISONED_BYTES] = _POISON
            with self._device.lock:
                self._device.free_bytes += self._num_bytes


class _EmulatedBo:
    """``bo(device, size, flags, group)``, or ``bo(parent, size, offset)``."""

    flags = Flags

    def __init__(self, parent: Any, num_bytes: int, *rest: Any) -> None:
        if isinstance(parent, _EmulatedBo):
            (self._start,) = rest
            self.memory = parent.memory
            if not 0 <= self._start <= self._start + num_bytes <= parent.num_bytes:
                raise RuntimeError("sub-buffer: Invalid argument")
            self._start += parent._start
        else:
            flags, bank = rest
            if bank != 0:
                raise RuntimeError(f"no memory bank {bank}")
            self.memory = _EmulatedMemory(parent, num_bytes, p2p=flags is Flags.p2p)
            self._start = 0
        self.num_bytes = num_bytes

    def size(self) -> int:
        return self.num_bytes

    def map(self) -> memoryview:
        return self._part(self.memory.on_host).data

    def sync(self, direction: Direction, num_bytes: int, offset: int) -> None:
        if not 0 <= offset <= offset + num_bytes <= self.num_bytes:
            raise RuntimeError("sync: Invalid argument")
        part = slice(offset, offset + num_bytes)
        host = self._part(self.memory.on_host)[part]
        card = self._part(self.memory.on_card)[part]
        if direction is Direction.XCL_BO_SYNC_BO_TO_DEVICE:
            card[:] = host
        else:
            host[:] = card

    def address(self) -> int:
        return self._part(self.memory.on_card).ctypes.data

    def _part(self, memory: Array) -> Array:
        return memory[self._start : self._start + self.num_bytes]


class _EmulatedKernel:
    """``kernel(device, uuid, name)``."""

    def __init__(self, device: _EmulatedDevice, uuid: int, name: str) -> None:
        assert uuid == id(device.loaded)
        self.device = device
        if device.loaded is None or not device.loaded.has_kernel(name):
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


class _EmulatedRun:
    """``run(kernel)``. Arguments that are not set are zero, like a card's registers."""

    def __init__(self, kernel: _EmulatedKernel) -> None:
        self._kernel = kernel
        self._arguments: list[Any] = [0] * len(kernel.card.arguments)
        self._future: Future[None] | None = None

    def set_arg(self, number: int, value: Any) -> None:
        if not isinstance(value, _EmulatedBo):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError("set_arg(): incompatible function arguments")
            if not -(1 << 31) <= value < 1 << 31:
                raise TypeError("set_arg(): integer out of range")
        self._arguments[number] = value

    def start(self) -> None:
        self._future = self._kernel.device.unit.submit(self._execute)

    def _execute(self) -> None:
        num_pointers = len(self._kernel.card.pointers)
        pointers = self._arguments[:num_pointers]
        words = self._arguments[num_pointers:]
        if not all(isinstance(pointer, _EmulatedBo) for pointer in pointers):
            raise RuntimeError("a pointer was not set")  # on a card, a bus error
        self._kernel.function(*(bo.address() for bo in pointers), *words)

    def state(self) -> int:
        """Returns the number of an ``ert_cmd_state``; pyxrt lacks names for some."""
        if self._future is None:
            return 1
        if not self._future.done():
            return 3
        return 4 if self._future.exception() is None else 5
