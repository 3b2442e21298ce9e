"""A stand-in for XRT's C functions, with its restrictions, over this machine's memory.

Invariant: code that works here uses XRT correctly: data that was not synced is stale, a
buffer's memory is given back with its last part, and the card has 4 GiB.

The kernels are those of the cards, compiled for this machine (`make -C hls csim`).
"""

import ctypes
import errno
import functools
import itertools
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxinf.csd.cards.xrt import DEVICE_BYTES, P2P
from jaxinf.kernels import CardKernel, card_function, named_card_kernel
from jaxinf.typing import Array

ANY_KERNEL = "every kernel of the table"
"""A path to "load" that stands for an xclbin with all kernels."""

_POISON = 0xA5
_POISONED_BYTES = 1 << 20  # at the start of a buffer: enough to be noticed
_EXAMPLE = "jaxinf_adam_f32_update_f32"


class EmulatedXrt:
    """XRT's library; each function has the arguments and the result of the C one.

    Attributes:
      objects: what is behind each handle.
    """

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}
        self._numbers = itertools.count(1)

    def kernel_names(self, path: Path) -> list[str]:
        """Returns the kernels of a file of names, one a line; of `ANY_KERNEL` one."""
        return [_EXAMPLE] if str(path) == ANY_KERNEL else path.read_text().split()

    def _opened(self, one: Any) -> int:
        handle = next(self._numbers)
        self.objects[handle] = one
        return handle

    def _closed(self, handle: int) -> int:
        del self.objects[handle]
        return 0

    xrtDeviceClose = xrtKernelClose = xrtBOFree = xrtRunClose = _closed

    def xrtDeviceOpen(self, index: int) -> int:
        return self._opened(_Device(index))

    def xrtDeviceOpenByBDF(self, address: bytes) -> int:
        return _refused(errno.ENODEV)

    def xrtDeviceLoadXclbinFile(self, device: int, path: bytes) -> int:
        if os.fsdecode(path) != ANY_KERNEL:
            self.objects[device].names = self.kernel_names(Path(os.fsdecode(path)))
        return 0

    def xrtDeviceGetXclbinUUID(self, device: int, uuid: Any) -> int:
        return 0

    def xrtPLKernelOpen(self, device: int, uuid: Any, name: bytes) -> int:
        own, text = self.objects[device], name.decode()
        if own.names is not None and text not in own.names:
            return _refused(errno.ENOENT)
        try:
            return self._opened(_Kernel(own, named_card_kernel(text)))
        except ValueError:
            return _refused(errno.ENOENT)

    def xrtKernelArgGroupId(self, kernel: int, argument: int) -> int:
        return 0 if argument < len(self.objects[kernel].card.pointers) else -1

    def xrtBOAlloc(self, device: int, num_bytes: int, flags: int, bank: int) -> int:
        if bank != 0:
            return _refused(errno.EINVAL)
        try:
            memory = _Memory(self.objects[device], num_bytes, p2p=flags == P2P)
        except MemoryError:
            return _refused(errno.ENOMEM)
        return self._opened(_Bo(memory, 0, num_bytes))

    def xrtBOSubAlloc(self, bo: int, num_bytes: int, offset: int) -> int:
        whole = self.objects[bo]
        if offset + num_bytes > whole.num_bytes:
            return _refused(errno.EINVAL)
        return self._opened(_Bo(whole.memory, whole.start + offset, num_bytes))

    def xrtBOMap(self, bo: int) -> int:
        return self.objects[bo].of(self.objects[bo].memory.on_host).ctypes.data

    def xrtBOSync(self, bo: int, direction: int, num_bytes: int, offset: int) -> int:
        own, place = self.objects[bo], slice(offset, offset + num_bytes)
        if offset + num_bytes > own.num_bytes:
            return -1
        both = own.of(own.memory.on_host), own.of(own.memory.on_card)
        source, target = both if direction == 0 else both[::-1]
        target[place] = source[place]
        return 0

    def xrtRunOpen(self, kernel: int) -> int:
        return self._opened(_Run(self.objects[kernel]))

    def xrtRunSetArg(self, run: int, number: int, value: Any) -> int:
        is_buffer = isinstance(value, ctypes.c_void_p)
        own = self.objects[value.value or 0] if is_buffer else value.value
        self.objects[run].arguments[number] = own
        return 0

    def xrtRunStart(self, run: int) -> int:
        self.objects[run].start()
        return 0

    def xrtRunState(self, run: int) -> int:
        return self.objects[run].state()


def _refused(code: int) -> int:
    ctypes.set_errno(code)
    return 0


class _Device:
    def __init__(self, index: int) -> None:
        self.lock = threading.Lock()
        self.free_bytes = DEVICE_BYTES
        self.unit = ThreadPoolExecutor(1, thread_name_prefix=f"card-{index}")
        self.names: list[str] | None = None  # all


class _Memory:
    """Memory of a card and the host's view of it, which is a copy without P2P."""

    def __init__(self, device: _Device, num_bytes: int, *, p2p: bool) -> None:
        with device.lock:
            if not 0 < num_bytes <= device.free_bytes:
                raise MemoryError
            device.free_bytes -= num_bytes
        self._device = device
        self._num_bytes = num_bytes
        self.on_card = self.on_host = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        if not p2p:
            self.on_host = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
            self.on_host[:_POISONED_BYTES] = _POISON

    def __del__(self) -> None:
        if hasattr(self, "on_host"):
            with self._device.lock:
                self._device.free_bytes += self._num_bytes


class _Bo(NamedTuple):
    """A buffer, or a part of one."""

    memory: _Memory
    start: int
    num_bytes: int

    def of(self, memory: Array) -> Array:
        return memory[self.start : self.start + self.num_bytes]


class _Kernel:
    def __init__(self, device: _Device, card: CardKernel) -> None:
        self.device, self.card = device, card

    @functools.cached_property
    def function(self) -> Callable[..., None]:
        """The compiled kernel; blocks while the compiler runs."""
        return card_function(self.card)


class _Run:
    """Arguments that are not set are zero, like a card's registers."""

    def __init__(self, kernel: _Kernel) -> None:
        self._kernel = kernel
        self.arguments: list[Any] = [0] * len(kernel.card.arguments)
        self._future: Future[None] | None = None

    def start(self) -> None:
        self._future = self._kernel.device.unit.submit(self._execute)

    def _execute(self) -> None:
        num = len(self._kernel.card.pointers)
        pointers, words = self.arguments[:num], self.arguments[num:]
        if not all(isinstance(pointer, _Bo) for pointer in pointers):
            raise RuntimeError("a pointer was not set")  # on a card, a bus error
        addresses = [bo.of(bo.memory.on_card).ctypes.data for bo in pointers]
        self._kernel.function(*addresses, *words)

    def state(self) -> int:
        """Returns the number of an ``ert_cmd_state``."""
        if self._future is None:
            return 1
        if not self._future.done():
            return 3
        return 4 if self._future.exception() is None else 5
