"""Which subgroups' updates a JAX device computes in a streamed run.

Invariant: what a run was asked for and cannot have is refused before a store is made or
changed, and a resumed run keeps to the choice that its commit records.
"""

import logging
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from jaxinf.engine import (
    Assignment,
    Store,
    StoreShape,
    SubgroupLayout,
    assigned,
    engine_of,
)
from jaxinf.errors import AssignmentError, StreamError
from jaxinf.program import Kernel
from jaxinf.store import CommitRecord
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.options import DeviceUpdates
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.meshes import mesh_text
from jaxinf.streaming.update.near_storage import Updates
from jaxinf.streaming.update.on_device import NUM_ROOMS, DeviceUpdater, room_bytes
from jaxinf.streaming.update.rates import measured_interval

_LOG = logging.getLogger("jaxinf")

NUM_UNDER_WAY = 4
"""Units whose updates are under way at a time, where a device computes some."""


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


def asked_interval(value: DeviceUpdates, store: Store, *, replan: bool) -> int | None:
    """Returns k, where the device is to update each k-th subgroup; None to measure it.

    Args:
      value: What the run was asked for.
      store: The store, which may be empty.
      replan: Whether the choice of its commit may change.

    Raises:
      AssignmentError: The store's commit records another choice.
    """
    if (last := _last_step(store)) is not None:
        kept = last.device_updates
        if not replan and isinstance(value, int) and value != kept:
            raise AssignmentError(str(store.path), kept, value)
        if value is None or (value == "auto" and not replan):
            return kept
    return None if value == "auto" else value or 0


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


def layouts_of(
    updates: Updates, chosen: Assignment
) -> list[tuple[SubgroupLayout, Kernel]]:
    """Returns the subgroups that a device updates, with their kernels."""
    shape, leaves = updates.shape, updates.program.leaves
    records = shape.directory.manifest.leaves
    return [
        (layout, leaf.kernel)
        for number, (record, leaf) in enumerate(zip(records, leaves, strict=True))
        for layout in shape.layouts(number, (0,) * len(record.shape), record.shape)
        if layout.subgroup in chosen.subgroups
    ]


def without_updates(
    division: Division,
    layouts: Sequence[tuple[SubgroupLayout, Kernel]],
    gradient_bytes: Mapping[Piece, int],
) -> Division:
    """Returns memory without what updates on the device take there, and here.

    Raises:
      BudgetError: Nothing is left for the programs.
    """
    if not layouts:
        return division
    num_bytes = NUM_ROOMS * room_bytes([layout for layout, _ in layouts])
    division = division.without(num_bytes, "updates on the device", is_on_device=True)
    num_bytes = (NUM_UNDER_WAY - 1) * max(gradient_bytes.values(), default=0)
    return division.without(num_bytes, "gradients of updates under way")


def measured(
    updater: DeviceUpdater,
    layouts: Sequence[tuple[SubgroupLayout, Kernel]],
    memory_bytes: int,
) -> int:
    """Returns k as measured; blocks.

    Args:
      memory_bytes: Memory of the host that is free between steps.
    """
    if not layouts:
        return 0
    longest = max(layouts, key=lambda pair: pair[0].subgroup.num_elements)
    every = measured_interval(updater, *longest, memory_bytes)
    _LOG.info("device_updates=%s, as measured", every)
    return every


def check_alone(shape: StoreShape, mesh: Mesh | None) -> None:
    """Refuses several devices; raises StreamError."""
    if mesh is None and shape.directory.manifest.member is None:
        return
    where = "several processes" if mesh is None else mesh_text(mesh)
    raise StreamError(
        f"device_updates: expected one device, found {where}; leave it out, or, "
        "if the store's last step had it, give 0 for it and replan=True"
    )


def _last_step(store: Store) -> CommitRecord | None:
    """Returns the record of a store's last step; None if it has had none."""
    engine = engine_of(store)
    if engine.commit is None or not engine.opened.finished.step:
        return None
    return engine.opened.finished
