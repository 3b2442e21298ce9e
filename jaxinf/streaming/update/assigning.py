"""Which subgroups' updates a JAX device computes in a streamed run.

Invariant: what a run was asked for and cannot have is refused before a store is made or
changed, and a resumed run keeps to the choice that its commit records.
"""

import logging
from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np
from jax.sharding import Mesh

from jaxinf.engine import Assignment, Store, StoreShape, SubgroupLayout, assigned
from jaxinf.errors import AssignmentError, StreamError
from jaxinf.program import Kernel, UpdateProgram
from jaxinf.store import CommitRecord
from jaxinf.streaming.plan.device import free_device_bytes
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
    options, last = store._training.options, _last_step(store)
    tier_bytes = options.device_tier_bytes
    given = {"device_updates": value, 'tiers["device"]': tier_bytes}
    kept = (0, 0) if last is None else (last.device_updates, last.device_tier)
    for (name, found), recorded in zip(given.items(), kept, strict=True):
        remedy = f"leave {name} out"
        if found is None and recorded:
            found, remedy = recorded, f"give 0 for {name} and replan=True"
        if found and options.csd.has_cards:
            raise ValueError(
                f'{name}={found!r}: on csd="{options.csd.kind}" cards update state, '
                f'and none passes the host; {remedy}, or use csd="host"'
            )
        if found and is_compressed:
            raise ValueError(
                f"{name}={found!r}: the host updates with compressed gradients; "
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
      StreamError: The device can compute none of the store, or computes it otherwise,
        has no memory of its own for state that is to stay there, or less, or the run
        has several devices.
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
        tier_bytes = store._training.options.device_tier_bytes
        self._every: int | None = None  # to be measured
        if (last := _last_step(store)) is not None:
            if not replan:
                _check_kept(last, value, tier_bytes, str(store.path))
            if value is None or (value == "auto" and not replan):
                self._every = last.device_updates
            tier_bytes = last.device_tier if tier_bytes is None else tier_bytes
        if value != "auto" and self._every is None:
            self._every = value or 0
        self._is_auto, self._tier_bytes = value == "auto", tier_bytes or 0
        self._planned = Assignment()
        if self._is_auto or self._every or self._tier_bytes:
            self._check_alone(mesh)
            most = 1 if self._is_auto else self._every or 0
            self._planned = self._assigned(most)
            self._check_tier()
            for kernel in {kernel for _, kernel in self._layouts()}:
                if np.bool_ not in kernel.scalar_dtypes:  # else a step's own decide
                    scalars = [np.array(0.5, d)[()] for d in kernel.scalar_dtypes]
                    updater.check(kernel, scalars)

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
        stays = self._planned.stays
        held = sum(one.num_bytes for one, _ in layouts if one.subgroup in stays)
        division = division.without(held, "state that stays there", is_on_device=True)
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
        found = assigned(
            self._shape, self._kernels, self._updater, every, self._tier_bytes
        )
        if every and not found.subgroups and not self._is_auto:
            raise StreamError(
                f"device_updates={every}: expected more subgroups that the "
                "device can compute: of 65536 params or more, with state that is not "
                "coded, and an update without arrays from outside; leave "
                "device_updates out, or give a smaller number"
            )
        return found

    def _check_tier(self) -> None:
        """Refuses state that cannot stay on the device, and plans with what can.

        Raises:
          StreamError: Names the remedy.
        """
        if not self._tier_bytes:
            return
        given = f'tiers["device"]={self._tier_bytes}'
        if self._updater.is_host:
            raise StreamError(
                f"{given}: {self._updater.device} computes in the host's memory; use "
                'tiers={"host": bytes}, whose state it does not copy'
            )
        if not self._planned.stays:
            raise StreamError(
                f"{given}: expected room for a chunk that the device can compute: of "
                "65536 params or more, with state that is not coded; give more, or "
                "leave it out"
            )
        free_bytes = free_device_bytes(self._updater.device)
        if free_bytes is not None and self._tier_bytes > free_bytes:
            raise StreamError(
                f"{given}: {self._updater.device} has {free_bytes} bytes free; give "
                "fewer"
            )
        self._shape.give_device(self._planned.stays)

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
            f"updates on the device: expected one device, found {where}; leave "
            "device_updates and a device tier out, or, if the store's last step had "
            "them, give 0 for them and replan=True"
        )


def _last_step(store: Store) -> CommitRecord | None:
    """Returns the record of a store's last step; None if it has had none."""
    training = store._training
    if training.commit is None or not training.opened.finished.step:
        return None
    return training.opened.finished


def _check_kept(
    last: CommitRecord, value: DeviceUpdates, tier_bytes: int | None, store: str
) -> None:
    """Refuses another choice than that of a store's last step.

    Raises:
      AssignmentError: It was asked for.
    """
    recorded, found = {}, {}
    if value not in (None, "auto", last.device_updates):
        recorded["device_updates"] = str(last.device_updates)
        found["device_updates"] = str(value)
    if tier_bytes not in (None, last.device_tier):
        recorded['tiers["device"]'] = str(last.device_tier)
        found['tiers["device"]'] = str(tier_bytes)
    if found:
        raise AssignmentError(store, recorded, found)
