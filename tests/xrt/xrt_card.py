"""A card with kernels and buffers, for tests that use ``pyxrt``.

Invariant: ``pyxrt`` is imported at first use, in a test's own process; the process that
collects tests and forks never has it.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Card", "fetch", "finish", "float_bits", "put_back", "start", "view"]


def float_bits(value: float | np.floating) -> int:
    """Returns a float32's bits as an int for ``set_arg``."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


class Card:
    """An open device with an xclbin; all its buffers are in its only bank."""

    def __init__(self, index: int, xclbin: Path):
        import pyxrt  # pyright: ignore[reportMissingImports]

        self.device = pyxrt.device(index)
        self.uuid = self.device.load_xclbin(str(xclbin))

    def kernel(self, name: str) -> Any:
        import pyxrt  # pyright: ignore[reportMissingImports]

        return pyxrt.kernel(self.device, self.uuid, name)

    def buffer(self, num_bytes: int, kind: str = "normal") -> Any:
        import pyxrt  # pyright: ignore[reportMissingImports]

        return pyxrt.bo(self.device, num_bytes, getattr(pyxrt.bo, kind), 0)

    def put(self, values: np.ndarray, kind: str = "normal") -> Any:
        """Makes a buffer with an array, on the device."""
        buffer = self.buffer(values.nbytes, kind)
        put_back(buffer, values)
        return buffer


def put_back(buffer: Any, values: np.ndarray) -> None:
    """Copies an array into a buffer of its length, on the device."""
    import pyxrt  # pyright: ignore[reportMissingImports]

    view(buffer, values.dtype)[:] = values
    direction = pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE
    buffer.sync(direction, values.nbytes, 0)


def fetch(buffer: Any, dtype: Any = np.float32) -> np.ndarray:
    """Returns a copy of a buffer's content on the device."""
    import pyxrt  # pyright: ignore[reportMissingImports]

    direction = pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE
    buffer.sync(direction, buffer.size(), 0)
    return view(buffer, dtype).copy()


def view(buffer: Any, dtype: Any = np.float32) -> np.ndarray:
    """The host's mapping of a buffer; the caller keeps the buffer."""
    return np.frombuffer(buffer.map(), dtype)


def start(kernel: Any, *arguments: Any) -> Any:
    """Starts a run; unlike a call of the kernel, it refuses unsuitable arguments."""
    import pyxrt  # pyright: ignore[reportMissingImports]

    run = pyxrt.run(kernel)
    for number, argument in enumerate(arguments):
        run.set_arg(number, argument)
    run.start()
    return run


def finish(run: Any) -> None:
    """Waits, and checks that the kernel completed."""
    import pyxrt  # pyright: ignore[reportMissingImports]

    assert run.wait() == pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
