"""Which subgroups' updates a JAX device computes in a streamed run: each k-th one.

Invariant: what a run was asked for and cannot have is refused before a store is made or
changed, and a resumed run keeps to the choice that its commit records.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
from jax.sharding import Mesh

from jaxinf.csd import CsdBuffer, HostCsd, Rounding, ScalarInputs, Update
from jaxinf.engine import Assignment, Store, SubgroupLayout, assigned, engine_of
from jaxinf.errors import AssignmentError, StreamError
from jaxinf.program import Kernel
from jaxinf.store import CommitRecord
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.options import DeviceUpdates
from jaxinf.streaming.program.meshes import mesh_text
from jaxinf.streaming.update.near_storage import Updates
from jaxinf.streaming.update.on_device import NUM_ROOMS, DeviceUpdater, room_bytes
from jaxinf.transfer import BufferPool, ByteMeters
from jaxinf.typing import FLOAT32

_LOG = logging.getLogger("jaxinf")

NUM_UNDER_WAY = 4
"""Units whose updates are under way at a time, where a device computes some."""

_NUM_ROUNDS = 4
# What the device has to save, of the time of the updates.
_LEAST_GAIN = 0.05

Layouts: TypeAlias = Sequence[tuple[SubgroupLayout, Kernel]]
"""Subgroups, with their kernels."""


def check_device_updates(
    value: DeviceUpdates, store: Store, *, is_compressed: bool
) -> None:
    """Refuses a value that is none, or a store whose updates the host cannot give away.

    Raises:
      ValueError: Names the remedy.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not (value is None or value == "auto" or is_number):
        raise ValueError(
            f'device_updates={value!r}: expected "auto", None or a number: the device '
            "computes every so many subgroups, and with 0 none"
        )
    csd, last = engine_of(store).options.csd, _last_step(store)
    remedy = "leave device_updates out"
    if value is None and last is not None and last.device_updates:
        value = last.device_updates
        remedy = "give 0 for device_updates and replan=True"
    if value and csd.has_cards:
        raise ValueError(
            f'device_updates={value!r}: on csd="{csd.kind}" cards update state, '
            f'and none passes the host; {remedy}, or use csd="host"'
        )
    if value and is_compressed:
        raise ValueError(
            f"device_updates={value!r}: the host updates with compressed gradients; "
            f"{remedy}, or leave compress out"
        )


def asked_interval(
    value: DeviceUpdates, store: Store, mesh: Mesh | None, *, replan: bool
) -> int | None:
    """Returns k, where the device is to update each k-th subgroup; None to measure it.

    Args:
      value: What the run was asked for.
      store: The store, which may be empty.
      replan: Whether the choice of its commit may change.

    Raises:
      AssignmentError: The store's commit records another choice.
      StreamError: There are several devices, or processes.
    """
    every = None if value == "auto" else value or 0
    if (last := _last_step(store)) is not None:
        kept = last.device_updates
        if not replan and isinstance(value, int) and value != kept:
            raise AssignmentError(str(store.path), kept, value)
        if value is None or (value == "auto" and not replan):
            every = kept
    is_alone = mesh is None and engine_of(store).group.is_alone
    if (value == "auto" or every) and not is_alone:
        where = "several processes" if mesh is None else mesh_text(mesh)
        raise StreamError(
            f"device_updates: expected one device, found {where}; leave it out, or, "
            "if the store's last step had it, give 0 for it and replan=True"
        )
    return every


def assignment(
    updates: Updates, updater: DeviceUpdater, every: int, *, is_auto: bool
) -> Assignment:
    """Returns the updates of each so many subgroups, those that the device can compute.

    Raises:
      StreamError: It can compute none, and was told to.
    """
    kernels = [leaf.kernel for leaf in updates.program.leaves]
    found = assigned(updates.shape, kernels, updater, every)
    if every and not found.subgroups and not is_auto:
        raise StreamError(
            f"device_updates={every}: expected more subgroups that the "
            "device can compute: of 65536 params or more, with state that is not "
            "coded, and an update without arrays from outside; leave "
            "device_updates out, or give a smaller number"
        )
    return found


def layouts_of(updates: Updates, chosen: Assignment) -> Layouts:
    """Returns the subgroups that a device updates."""
    shape, leaves = updates.shape, updates.program.leaves
    records = shape.directory.manifest.leaves
    return [
        (layout, leaf.kernel)
        for number, (record, leaf) in enumerate(zip(records, leaves, strict=True))
        for layout in shape.layouts(number, (0,) * len(record.shape), record.shape)
        if layout.subgroup in chosen.subgroups
    ]


def without_updates(
    division: Division, layouts: Layouts, gradient_bytes: int
) -> Division:
    """Returns memory without what updates on the device take there, and here.

    Args:
      gradient_bytes: Of the largest gradient.

    Raises:
      BudgetError: Nothing is left for the programs.
    """
    if not layouts:
        return division
    num_bytes = NUM_ROOMS * room_bytes([layout for layout, _ in layouts])
    division = division.without(num_bytes, "updates on the device", is_on_device=True)
    num_bytes = (NUM_UNDER_WAY - 1) * gradient_bytes
    return division.without(num_bytes, "gradients of updates under way")


def _last_step(store: Store) -> CommitRecord | None:
    """Returns the record of a store's last step; None if it has had none."""
    engine = engine_of(store)
    if engine.commit is None or not engine.opened.finished.step:
        return None
    return engine.opened.finished


# --- k, as measured ------------------------------------------------------------------


def measured(updater: DeviceUpdater, layouts: Layouts, memory_bytes: int) -> int:
    """Returns the smallest k at which the host never waits for the device. Blocks.

    The host's cores each update a subgroup of their own in memory, and the device as
    many as it has room for, each a few times; the first time of each does not count.

    Args:
      memory_bytes: Memory of the host that is free between steps. If it is short, fewer
        are updated at once, but one in any case.
    """
    if not layouts:
        return 0
    layout, kernel = max(layouts, key=lambda pair: pair[0].subgroup.num_elements)
    own_bytes = layout.num_bytes + layout.subgroup.num_elements * FLOAT32.itemsize
    most = max(1, memory_bytes // own_bytes - 1)  # and the gradient of all
    num_cores = len(os.sched_getaffinity(0))
    num_busy, num_rooms = min(num_cores, most), min(NUM_ROOMS, most)
    pool = BufferPool(max(num_busy, num_rooms) * layout.num_bytes)
    csd = HostCsd(pool, ByteMeters())  # its drive is not used
    given = [_given(csd, layout, kernel) for _ in range(max(num_busy, num_rooms))]

    def on_device(number: int) -> None:
        """Updates one, and computes the checksums to write it with."""
        buffer, update = given[number]
        updater.update(csd, buffer, update)
        for extent in update.extents:
            csd.checksum(buffer, extent)

    try:
        host_s, _ = _timed(num_busy, lambda number: csd.update(*given[number]))
        device_s, used_s = _timed(num_rooms, on_device)
    finally:
        pool.close()
    every = interval(host_s, used_s / num_cores, device_s)
    _LOG.info("device_updates=%s, as measured", every)
    return every


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
    csd: HostCsd, layout: SubgroupLayout, kernel: Kernel
) -> tuple[CsdBuffer, Update]:
    """Returns a buffer of zeros for a subgroup, and an update of it in memory."""
    extents, buffer = layout.kernel_extents, csd.acquire(layout.num_bytes)
    assert buffer is not None, "the pool has room for each"
    for extent in extents:
        csd.view(buffer, extent)[...] = 0
    gradient = np.full(layout.subgroup.num_elements, 1e-3, FLOAT32)
    return buffer, Update(
        extents,
        kernel,
        gradient,
        ScalarInputs(tuple(np.array(1, dtype) for dtype in kernel.scalar_dtypes)),
        np.empty(gradient.size, FLOAT32),
        Rounding(0, 0),
        tells=range(len(extents)),
    )


def _timed(num_at_once: int, action: Callable[[int], object]) -> tuple[float, float]:
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
