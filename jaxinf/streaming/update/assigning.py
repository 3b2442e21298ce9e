"""Which subgroups' updates a JAX device computes in a streamed run.

Invariant: what a run was asked for and cannot have is refused before a store is made or
changed, and a resumed run keeps to the choice that its commit records.
"""

import logging
from collections.abc import Mapping
from typing import Literal, TypeAlias

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
from jaxinf.program import Kernel, UpdateProgram
from jaxinf.store import CommitRecord
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.meshes import mesh_text
from jaxinf.streaming.update.on_device import NUM_ROOMS, DeviceUpdater, room_bytes
from jaxinf.streaming.update.rates import measured_interval
from jaxinf.streaming.update.store_sink import NUM_UNDER_WAY

_LOG = logging.getLogger("jaxinf")

DeviceUpdates: TypeAlias = int | Literal["auto"] | None
"""The device computes every so many subgroups, 0 for none; None for as many as in the
store's last step."""


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


class Assigning:
    """Assigns subgroups of a store to a device.

    Args:
      value: What the run was asked for.
      store: The store, which may be empty.
      mesh: The run's devices; None for one.
      replan: Whether the choice of its commit may change.

    Raises:
      AssignmentError: The store's commit records another choice.
      StreamError: The device can compute none of the store, or the run has several
        devices.
    """

    def __init__(
        self,
        value: DeviceUpdates,
        store: Store,
        shape: StoreShape,
        program: UpdateProgram,
        updater: DeviceUpdater,
        mesh: Mesh | None,
        *,
        replan: bool,
    ) -> None:
        self._store, self._shape, self._updater = store, shape, updater
        self._kernels = [leaf.kernel for leaf in program.leaves]
        self._every: int | None = None  # to be measured
        if (last := _last_step(store)) is not None:
            if not replan:
                _check_kept(last, value, str(store.path))
            if value is None or (value == "auto" and not replan):
                self._every = last.device_updates
        if value != "auto" and self._every is None:
            self._every = value or 0
        self._is_auto = value == "auto"
        self._planned = Assignment()
        if self._is_auto or self._every:
            self._check_alone(mesh)
            self._planned = self._assigned(1 if self._is_auto else self._every or 0)

    def without(
        self, division: Division, gradient_bytes: Mapping[Piece, int]
    ) -> Division:
        """Returns memory without what updates on the device take there, and here.

        Raises:
          BudgetError: Nothing is left for the programs.
        """
        layouts = self._layouts()
        if not layouts:
            return division
        num_bytes = NUM_ROOMS * room_bytes([layout for layout, _ in layouts])
        purpose = "updates on the device"
        division = division.without(num_bytes, purpose, is_on_device=True)
        num_bytes = (NUM_UNDER_WAY - 1) * max(gradient_bytes.values(), default=0)
        return division.without(num_bytes, "gradients of updates under way")

    def chosen(self, room_bytes: int) -> Assignment:
        """Returns the assignment of steps; with ``"auto"`` measures it, and blocks.

        Args:
          room_bytes: Memory of the host that is free between steps.
        """
        layouts = self._layouts()
        if self._every is None and layouts:
            longest = max(layouts, key=lambda pair: pair[0].subgroup.num_elements)
            self._every = measured_interval(self._updater, *longest, room_bytes)
            _LOG.info("device_updates=%s, as measured", self._every)
        return self._assigned(self._every or 0)

    # --- inside --------------------------------------------------------------------

    def _assigned(self, every: int) -> Assignment:
        found = assigned(self._shape, self._kernels, self._updater, every)
        if every and not found.subgroups and not self._is_auto:
            raise StreamError(
                f"device_updates={every}: expected more subgroups that the "
                "device can compute: of 65536 params or more, with state that is not "
                "coded, and an update without arrays from outside; leave "
                "device_updates out, or give a smaller number"
            )
        return found

    def _layouts(self) -> list[tuple[SubgroupLayout, Kernel]]:
        records = self._shape.directory.manifest.leaves
        return [
            (layout, kernel)
            for leaf, (record, kernel) in enumerate(
                zip(records, self._kernels, strict=True)
            )
            for layout in self._shape.layouts(
                leaf, (0,) * len(record.shape), record.shape
            )
            if layout.subgroup in self._planned.subgroups
        ]

    def _check_alone(self, mesh: Mesh | None) -> None:
        if mesh is None and self._shape.directory.manifest.member is None:
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


def _check_kept(last: CommitRecord, value: DeviceUpdates, store: str) -> None:
    """Refuses another choice than that of a store's last step.

    Raises:
      AssignmentError: It was asked for.
    """
    if isinstance(value, int) and value != last.device_updates:
        raise AssignmentError(store, last.device_updates, value)
