"""Cards through Xilinx's runtime (XRT), in any of its releases.

Invariant: only this module handles the runtime's restrictions. Floats and large
integers are passed as signed 32-bit words. A view of a buffer keeps the buffer, which
pyxrt's mappings do not. The calls are those that every release has: kernels and
buffers are of the device, not of a hardware context.
"""

import ctypes
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.csd.cards.library import load_runtime
from jaxinf.errors import CsdError

DEVICE_BYTES = 4 << 30
"""Memory of a SmartSSD's card."""

_COMPLETED = 4
_PENDING = (1, 2, 3, 7)  # new, queued, running, submitted
_STATES = {5: "error", 6: "abort", 8: "timeout", 9: "no response"}
_FIRST_WAIT_S, _LONGEST_WAIT_S = 20e-6, 500e-6
_SYNC_BYTES = 1 << 20  # bytes a call copies; pyxrt holds the GIL meanwhile


class NoCardMemory(CsdError):
    """A card has no memory left."""


def _too_old_error(error: Exception) -> CsdError:
    return CsdError(
        f"csd='smartssd': expected XRT 2021.2 (2.12) or newer, found an older one: "
        f"{error}; install a newer release of XRT"
    )


class XrtBuffer:
    """Memory of a card that the host has mapped, until no view is left.

    Attributes:
      array: uint8, the host's view: the memory itself for a P2P buffer, else a copy
        that `to_card` and `from_card` synchronise.
    """

    def __init__(self, bo: Any, directions: Any) -> None:
        self.bo, self._directions = bo, directions
        mapped: Any = (ctypes.c_ubyte * bo.size()).from_buffer(bo.map())
        mapped.bo = bo  # a view keeps the mapping, and the mapping the buffer
        self.array = np.frombuffer(mapped, np.uint8)

    def to_card(self, num_bytes: int) -> None:
        """Copies the host's first bytes to the card; blocks."""
        self._sync(self._directions.XCL_BO_SYNC_BO_TO_DEVICE, num_bytes)

    def from_card(self, num_bytes: int) -> None:
        """Copies the card's first bytes to the host; blocks."""
        self._sync(self._directions.XCL_BO_SYNC_BO_FROM_DEVICE, num_bytes)

    def _sync(self, direction: Any, num_bytes: int) -> None:
        for start in range(0, num_bytes, _SYNC_BYTES):
            self.bo.sync(direction, min(_SYNC_BYTES, num_bytes - start), start)


class XrtCard:
    """A card with its xclbin loaded. Thread-safe.

    Args:
      module: The result of `load_runtime`, or an object with pyxrt's names.
      device: PCI address, or index if cards cannot be listed (emulation).
    """

    def __init__(self, module: Any, device: str | int, xclbin: Path) -> None:
        self.name = str(device)
        self._module = module
        self.xclbin = xclbin
        self._kernels: dict[str, Any] = {}
        self._lock = threading.Lock()
        try:
            self._device = module.device(device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise CsdError(
                f"card {device}: cannot be opened: {error}; see `xbutil examine` for "
                "the cards of this machine, and whether this user may open them"
            ) from error
        try:
            loaded = module.xclbin(str(xclbin))
            self.kernel_names = tuple(k.get_name() for k in loaded.get_kernels())
            self._uuid = self._device.load_xclbin(loaded)
        except (AttributeError, TypeError) as error:
            raise _too_old_error(error) from error
        except (RuntimeError, ValueError, OSError) as error:
            raise CsdError(
                f"card {device}: refuses {xclbin}: {error}; give the xclbin that was "
                "built for the card's platform (`xbutil examine` names it; make -C hls "
                "hw PLATFORM=…)"
            ) from error

    @property
    def bank(self) -> int:
        """The memory bank that all kernels' ports are expected to be connected to."""
        return self.bank_of(self.kernel_names[0], 0)

    def bank_of(self, kernel: str, argument: int) -> int:
        """Returns the memory bank that a kernel's pointer is connected to."""
        return int(self.kernel(kernel).group_id(argument))

    def kernel(self, name: str) -> Any:
        """Returns pyxrt's kernel of that name, or refuses an xclbin without it."""
        with self._lock:
            if name not in self._kernels:
                try:
                    kernel = self._module.kernel(self._device, self._uuid, name)
                except (RuntimeError, ValueError) as error:
                    raise CsdError(
                        f"card {self.name}: {self.xclbin} has no kernel {name}, only "
                        f"{', '.join(self.kernel_names) or 'none'} ({error}); build "
                        f"one that has it: make -C hls hw KERNELS={name}"
                    ) from error
                self._kernels[name] = kernel
            return self._kernels[name]

    def run(
        self,
        kernel: str,
        buffers: Sequence[Any],
        words: Sequence[int],
        *,
        timeout_s: float,
    ) -> None:
        """Runs a kernel once; blocks, without the GIL most of the time.

        Args:
          buffers: pyxrt buffers for the pointers, which come first.
          words: Signed 32-bit integers for the scalars.
        """
        loaded = self.kernel(kernel)
        try:
            run = self._module.run(loaded)
            for number, value in enumerate([*buffers, *words]):
                run.set_arg(number, value)
            run.start()
        except (RuntimeError, TypeError) as error:
            raise CsdError(
                f"card {self.name}: kernel {kernel} did not start: {error}; see "
                "`dmesg` and `xbutil examine`"
            ) from error
        self._wait(run, kernel, timeout_s)

    def _wait(self, run: Any, kernel: str, timeout_s: float) -> None:
        pause_s, deadline_s = _FIRST_WAIT_S, time.monotonic() + timeout_s
        while (state := int(run.state())) in _PENDING:
            if time.monotonic() > deadline_s:
                raise CsdError(
                    f"card {self.name}: kernel {kernel} has not ended after "
                    f"{timeout_s:.0f} s; reset the card (`xbutil reset --device "
                    f"{self.name}`) and open the store again: it is at its last "
                    "committed step"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)
        if state != _COMPLETED:
            raise CsdError(
                f"card {self.name}: kernel {kernel} ended as "
                f"{_STATES.get(state, f'state {state}')}; see `dmesg`, and reset the "
                f"card (`xbutil reset --device {self.name}`)"
            )

    def allocate(self, num_bytes: int, *, p2p: bool = False) -> XrtBuffer:
        """Allocates and maps memory of `bank`; with `p2p`, drives can reach it.

        Raises `NoCardMemory` if none is left, or P2P is off.
        """
        bank = self.bank
        try:
            flags = self._module.bo.flags
            flag = flags.p2p if p2p else flags.normal
            bo = self._module.bo(self._device, num_bytes, flag, bank)
            return XrtBuffer(bo, self._module.xclBOSyncDirection)
        except (AttributeError, TypeError) as error:
            raise _too_old_error(error) from error
        except (RuntimeError, MemoryError) as error:
            purpose, remedy = "", "lower memory_bytes, or end who else uses the card"
            if p2p:
                purpose = " for P2P"
                remedy = (
                    f"if P2P is off, `sudo xbutil configure --device {self.name} --p2p "
                    "enable` and a warm reboot switch it on; if the memory is full, "
                    "lower memory_bytes or end other users"
                )
            raise NoCardMemory(
                f"card {self.name}: {num_bytes:,} bytes of its memory{purpose}: "
                f"{error}; {remedy}"
            ) from error

    def part(self, buffer: XrtBuffer, offset_bytes: int, num_bytes: int) -> Any:
        return self._module.bo(buffer.bo, num_bytes, offset_bytes)


_OPEN: dict[str | int, XrtCard] = {}
_OPEN_LOCK = threading.Lock()


def open_card(device: str | int, xclbin: Path) -> XrtCard:
    """Returns a card of this machine, opened once in a process, as XRT demands.

    Loading another xclbin would unmap the buffers in use, and is refused.
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
