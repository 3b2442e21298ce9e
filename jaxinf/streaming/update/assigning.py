"""Which subgroups' updates a JAX device computes in a streamed run.

Invariant: what a run was asked for and cannot have is refused before a store is made or
changed, and a resumed run keeps to the choice that its commit records.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import numpy as np
from jax.sharding import Mesh

from jaxinf.engine import Assignment, Store, StoreShape, SubgroupLayout, assigned
from jaxinf.errors import StreamError
from jaxinf.plan.device_updates import UpdateRates, interval
from jaxinf.program import Kernel, UpdateProgram
from jaxinf.streaming.move.probe import probe
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.meshes import mesh_text
from jaxinf.streaming.update.on_device import NUM_ROOMS, DeviceUpdater, room_bytes
from jaxinf.streaming.update.rates import measured_rates
from jaxinf.streaming.update.store_sink import NUM_UNDER_WAY
from jaxinf.streaming.update.traffic import StepMoves

__all__ = ["Assigning", "DeviceUpdates", "check_device_updates"]

_LOG = logging.getLogger("jaxinf")

DeviceUpdates: TypeAlias = int | Literal["auto"] | None
"""The device computes every so many subgroups; None for none."""


def check_device_updates(
    value: DeviceUpdates, store: Store, *, is_compressed: bool
) -> None:
    """Refuses a value that is none, or a store whose updates the host cannot give away.

    Raises:
      ValueError: Names the remedy.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not (value is None or value == "auto" or is_number):
        raise ValueError(
            f'device_updates={value!r}: expected "auto", None or a number from 1 on: '
            "the device computes every so many subgroups"
        )
    if value is None:
        return
    csd = store._training.options.csd
    if csd.has_cards:
        raise ValueError(
            f'device_updates={value!r}: on csd="{csd.kind}" cards update state, and '
            'none passes the host; leave it out, or use csd="host"'
        )
    if is_compressed:
        raise ValueError(
            f"device_updates={value!r}: the host updates with compressed gradients; "
            "leave device_updates or compress out"
        )


class Assigning:
    """Assigns subgroups of a store to a device.

    Args:
      value: What the run was asked for.
      store: The store, which may be empty.
      shape: Its chunks.
      program: The optimizer.
      updater: The device.
      mesh: The run's devices; None for one.
      replan: Whether the choice of its commit may change.

    Raises:
      StreamError: The store's commit records another choice, the device can compute
        none of the store, or computes it otherwise, or the run has several devices.
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
        self._value: DeviceUpdates = value
        training = store._training
        finished = None if training.commit is None else training.opened.finished
        if finished is not None and finished.step and not replan:
            recorded = finished.device_updates
            if value == "auto":
                self._value = value = recorded or None
            _check_kept(recorded, value, str(store.path))
        self._planned = Assignment()
        if value is not None:
            self._check_alone(mesh)
            self._planned = self._assigned(1 if value == "auto" else value)
            for kernel in {kernel for _, kernel in self._layouts()}:
                if np.bool_ not in kernel.scalar_dtypes:  # else a step's own decide
                    scalars = [np.array(0.5, d)[()] for d in kernel.scalar_dtypes]
                    updater.check(kernel, scalars)

    def without(
        self, division: Division, gradient_bytes: Mapping[Piece, int]
    ) -> Division:
        """Returns memory without what updates on the device take there, and here.

        Args:
          division: The memory.
          gradient_bytes: The size of each gradient.

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

    def chosen(self, moves: Callable[[], StepMoves]) -> Assignment:
        """Returns the assignment of steps; measures with ``"auto"``, and then blocks.

        Args:
          moves: Returns what a step moves on drives.
        """
        if self._value != "auto" or not self._planned.subgroups:
            return self._planned
        longest = max(self._layouts(), key=lambda pair: pair[0].subgroup.num_elements)
        rates = measured_rates(self._updater, *longest, _drive_s(self._store, moves()))
        every = interval(rates)
        _LOG.info("device_updates=%s: %s", every or None, _reason(rates, every))
        return self._assigned(every) if every else Assignment()

    # --- inside --------------------------------------------------------------------

    def _assigned(self, every: int) -> Assignment:
        found = assigned(self._shape, self._kernels, self._updater, every)
        if not found.subgroups and self._value != "auto":
            raise StreamError(
                f"device_updates={self._value!r}: expected more subgroups that the "
                "device can compute: of 65536 params or more, with state that is not "
                "coded, and an update without arrays from outside; leave "
                "device_updates out, or give a smaller number"
            )
        return found

    def _layouts(self) -> list[tuple[SubgroupLayout, Kernel]]:
        """The subgroups that the device may have, with their kernels."""
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
            f"device_updates={self._value!r}: expected one device, found {where}; "
            "leave device_updates out"
        )


def _reason(rates: UpdateRates, every: int) -> str:
    """Says what the choice is made of."""
    found = ", ".join(
        f"{name} {1e9 * seconds:.3g} s" for name, seconds in rates._asdict().items()
    )
    if every:
        return f"for 1e9 params: {found}"
    if rates.drive >= rates.host:
        return f"drives are the bound, so the device cannot help; 1e9 params: {found}"
    return f"the device would save less than 5 % of updates; 1e9 params: {found}"


def _drive_s(store: Store, moves: StepMoves) -> float:
    """Measures the drives; returns their seconds for a param's state."""
    directory = store._training.opened.directory
    roots = [directory.csd_directory(n) for n in range(directory.num_csds)]
    probed, limits = probe(roots), store._training.options.csd.rates
    num_params = read = written = 0
    for _, one in moves.updates:
        num_params += one.layout.subgroup.num_elements
        read += one.read_bytes
        written += one.written_bytes
    seconds = 0.0
    for name, num_bytes, limit in (
        ("read", read, limits.drive_read),
        ("written", written, limits.drive_write),
    ):
        if name not in probed:
            return math.inf  # it is full
        rate = probed[name].num_bytes / probed[name].seconds
        if limit is not None:  # of each drive
            rate = min(rate, limit * len(roots))
        seconds += num_bytes / rate
    return seconds / max(1, num_params)


def _check_kept(recorded: int, value: DeviceUpdates, store: str) -> None:
    """Refuses another choice than a store's commit records.

    Raises:
      StreamError: It does.
    """
    was = recorded or None
    if was != value:
        raise StreamError(
            f"{store}: its last step was computed with device_updates={was}, found "
            f"{value}; pass device_updates={was}, or replan=True to go on with another "
            "choice (bits on an accelerator then differ from here on)"
        )
