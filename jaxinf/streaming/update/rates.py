"""How many updates a JAX device computes: as many as the host never waits for.

    buffers ─► all cores of the host: one each ─► seconds a subgroup
            ─► the device: as many as it has room for

Invariant: nothing is read or written but memory, which is freed at the end.
"""

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from jaxinf.csd import CsdBuffer, Rounding, ScalarInputs, Update
from jaxinf.csd.host import HostCsd
from jaxinf.engine import SubgroupLayout
from jaxinf.program import Kernel
from jaxinf.streaming.update.on_device import NUM_ROOMS, DeviceUpdater
from jaxinf.transfer import BufferPool, ByteMeters
from jaxinf.typing import FLOAT32

_NUM_ROUNDS = 4
# What the device has to save, of the time of the updates.
_LEAST_GAIN = 0.05


def measured_interval(
    updater: DeviceUpdater, layout: SubgroupLayout, kernel: Kernel, room_bytes: int
) -> int:
    """Returns k, where the device is to compute each k-th update; 0 for none. Blocks.

    The host's cores each update a subgroup of their own, and the device as many as it
    has room for, each a few times; the first time of each does not count.

    Args:
      room_bytes: Memory of the host. If it is short, fewer are updated at once, but one
        in any case.
    """
    own_bytes = layout.num_bytes  # and its result
    own_bytes += layout.subgroup.num_elements * FLOAT32.itemsize
    most = max(1, room_bytes // own_bytes - 1)  # and the gradient of all
    num_cores, num_rooms = len(os.sched_getaffinity(0)), min(NUM_ROOMS, most)
    num_busy = min(num_cores, most)
    pool = BufferPool(max(num_busy, num_rooms) * layout.num_bytes)
    csd = HostCsd(Path("/"), pool, ByteMeters())  # its drive is not used
    gradient = np.full(layout.subgroup.num_elements, 1e-3, FLOAT32)
    given: list[tuple[CsdBuffer, Update]] = []

    def on_host(number: int) -> None:
        csd.update(*given[number])

    def on_device(number: int) -> None:
        """Updates one, and computes the checksums to write it with."""
        buffer, update = given[number]
        updater.update(csd, buffer, update, wants_out=False)
        for extent in update.extents:
            csd.checksum(buffer, extent)

    try:
        for _ in range(max(num_busy, num_rooms)):
            given.append(_given(csd, layout, kernel, gradient))
        host_s, _ = _timed(num_busy, on_host)
        device_s, used_s = _timed(num_rooms, on_device)
        return interval(host_s, used_s / num_cores, device_s)
    finally:
        pool.close()


def interval(host_s: float, handled_s: float, device_s: float) -> int:
    """Returns the smallest k at which the host never waits for the device.

    It is 0, for no update on the device, if that would save less than 5 % of the time.

    Args:
      host_s: Seconds of an update on all cores of the host.
      handled_s: Of these cores for one that the device computes: copies and checksums.
      device_s: Of the device.
    """
    late_s = max(0.0, device_s - handled_s)
    if not math.isfinite(late_s) or late_s >= host_s * (1 << 16):
        return 0
    every = math.ceil(1 + late_s / host_s - 1e-9)
    beside_s = (1 - 1 / every) * host_s + handled_s / every
    gained = 1 - max(beside_s, device_s / every) / host_s
    return every if gained >= _LEAST_GAIN else 0


def _given(
    csd: HostCsd, layout: SubgroupLayout, kernel: Kernel, gradient: np.ndarray
) -> tuple[CsdBuffer, Update]:
    """Returns a buffer of zeros for a subgroup, and an update of it in memory."""
    extents, buffer = layout.kernel_extents, csd.acquire(layout.num_bytes)
    assert buffer is not None, "the pool has room for each"
    for extent in extents:
        csd.view(buffer, extent)[...] = 0
    return buffer, Update(
        extents,
        kernel,
        gradient,
        ScalarInputs(tuple(np.array(1, dtype) for dtype in kernel.scalar_dtypes)),
        np.empty(gradient.size, FLOAT32),
        Rounding(0, 0),
        tells=range(len(extents)),
    )


def _timed(num_at_once: int, action: Callable[[int], None]) -> tuple[float, float]:
    """Returns seconds of an update where some run at once, and of processors."""

    def rounds(number: int) -> None:
        for _ in range(_NUM_ROUNDS):
            action(number)

    with ThreadPoolExecutor(num_at_once) as threads:
        list(threads.map(action, range(num_at_once)))
        began_s, used_s = time.perf_counter(), time.process_time()
        list(threads.map(rounds, range(num_at_once)))
    num = num_at_once * _NUM_ROUNDS
    used_s = time.process_time() - used_s
    return (time.perf_counter() - began_s) / num, used_s / num
