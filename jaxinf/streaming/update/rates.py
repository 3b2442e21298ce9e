"""Measures what updates take of the host, of a device, and of drives.

Invariant: nothing is read or written but memory and files that are freed at the end.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from jaxinf.csd import CsdBuffer, Rounding, ScalarInputs
from jaxinf.csd.host import HostCsd
from jaxinf.engine import SubgroupLayout
from jaxinf.io import BufferPool, ByteMeters
from jaxinf.program import Kernel
from jaxinf.streaming.move.probe import probe
from jaxinf.streaming.update.interval import UpdateRates
from jaxinf.streaming.update.on_device import NUM_ROOMS, DeviceUpdater
from jaxinf.streaming.update.traffic import StepMoves
from jaxinf.typing import FLOAT32

_NUM_ROUNDS = 4


def measured_rates(
    updater: DeviceUpdater,
    layout: SubgroupLayout,
    kernel: Kernel,
    drive: float,
    room_bytes: int,
) -> UpdateRates:
    """Returns the rates for a subgroup's states; blocks while they are measured.

    The host's cores each update a subgroup of their own, and the device as many as it
    has room for, each a few times; the first time of each does not count.

    Args:
      room_bytes: Memory of the host. If it is short, fewer are updated at once, but one
        in any case.
    """
    num_params = layout.subgroup.num_elements
    own_bytes = layout.num_bytes + num_params * FLOAT32.itemsize  # and its result
    most = max(1, room_bytes // own_bytes - 1)  # and the gradient of all
    num_cores, num_rooms = len(os.sched_getaffinity(0)), min(NUM_ROOMS, most)
    num_busy = min(num_cores, most)
    pool = BufferPool(max(num_busy, num_rooms) * layout.num_bytes)
    csd = HostCsd(Path("/"), pool, ByteMeters())  # its drive is not used
    try:
        run = _Runs(csd, layout, kernel)
        host_s, _ = run.timed(num_busy, run.on_host)
        device_s, used_s = run.timed(num_rooms, lambda n: run.on_device(updater, n))
        return UpdateRates(
            host_s / num_params,
            used_s / num_cores / num_params,
            device_s / num_params,
            drive,
        )
    finally:
        pool.close()


def moved_s(roots: Sequence[Path], moves: StepMoves) -> float:
    """Measures drives; returns their seconds for a param's state. Blocks."""
    probed = probe(roots)
    num_params = read = written = 0
    for _, one in moves.updates:
        num_params += one.layout.subgroup.num_elements
        read += one.read_bytes
        written += one.written_bytes
    seconds = 0.0
    for name, num_bytes in (("read", read), ("written", written)):
        if name not in probed:
            return math.inf  # it is full
        seconds += num_bytes / probed[name].num_bytes * probed[name].seconds
    return seconds / max(1, num_params)


class _Runs:
    """Updates of buffers of their own, in memory."""

    def __init__(self, csd: HostCsd, layout: SubgroupLayout, kernel: Kernel) -> None:
        self._csd, self._kernel = csd, kernel
        self._extents, self._num_bytes = layout.kernel_extents, layout.num_bytes
        num = layout.subgroup.num_elements
        self._gradient = np.full(num, 1e-3, FLOAT32)
        self._tells = range(len(self._extents))
        self._scalars = tuple(np.array(1, dtype) for dtype in kernel.scalar_dtypes)
        self._buffers: list[CsdBuffer] = []
        self._outs: list[np.ndarray] = []

    def timed(
        self, num_at_once: int, action: Callable[[int], object]
    ) -> tuple[float, float]:
        """Returns seconds of an update where some run at once, and of processors."""
        self._take(num_at_once)
        with ThreadPoolExecutor(num_at_once) as threads:
            list(threads.map(action, range(num_at_once)))
            began_s, used_s = time.perf_counter(), time.process_time()
            list(threads.map(lambda n: self._rounds(action, n), range(num_at_once)))
        num = num_at_once * _NUM_ROUNDS
        used_s = time.process_time() - used_s
        return (time.perf_counter() - began_s) / num, used_s / num

    @staticmethod
    def _rounds(action: Callable[[int], object], number: int) -> None:
        for _ in range(_NUM_ROUNDS):
            action(number)

    def _take(self, count: int) -> None:
        while len(self._buffers) < count:
            buffer = self._csd.acquire(self._num_bytes)
            assert buffer is not None, "the pool has room for each"
            for extent in self._extents:
                self._csd.view(buffer, extent)[...] = 0
            self._buffers.append(buffer)
            self._outs.append(np.empty(self._gradient.size, FLOAT32))

    def on_host(self, number: int) -> None:
        self._csd.update(
            self._buffers[number],
            self._extents,
            self._kernel,
            self._gradient,
            ScalarInputs(self._scalars),
            self._outs[number],
            Rounding(0, 0),
            wants_params=True,
            tells=self._tells,
        )

    def on_device(self, updater: DeviceUpdater, number: int) -> None:
        """Updates one on the device, and computes the checksums to write it with."""
        buffer = self._buffers[number]
        updater.update(
            self._csd,
            buffer,
            self._extents,
            self._kernel,
            self._gradient,
            self._scalars,
            self._outs[number],
            wants_params=True,
            tells=self._tells,
        )
        for extent in self._extents:
            self._csd.checksum(buffer, extent)
