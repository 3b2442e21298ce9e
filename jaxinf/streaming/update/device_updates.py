"""Updates of each k-th subgroup on a JAX device, while the host's cores compute others.

    buffer ─ pinned ─► device: the optimizer's own equations ─ pinned ─► buffer

Invariant: the device has room for a fixed number of subgroups. The thread of each
subgroup waits for its copies, so they hide behind another's update. On a CPU the bits
are those of the host's kernels. An option that a run cannot have is refused before a
store is made or changed. k is measured once, in the first steps of a store, and a
resumed run keeps to the k that its commit records.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jaxinf.csd import Csd, CsdBuffer, Extent, Update, UpdateOutcome
from jaxinf.engine import Assignment, Store, SubgroupTable, engine_of
from jaxinf.errors import StoreError, StreamError
from jaxinf.kernels import state_read
from jaxinf.program import (
    Kernel,
    is_computable,
    join_params,
    kernel_function,
    split_params,
)
from jaxinf.store import CommitRecord
from jaxinf.streaming.plan import memory
from jaxinf.streaming.plan.memory import MemoryNeed
from jaxinf.streaming.plan.options import Options
from jaxinf.streaming.program.meshes import default_device, mesh_text
from jaxinf.streaming.program.units import PINNED
from jaxinf.terminal import format_bytes
from jaxinf.transfer import crc32c
from jaxinf.typing import FLOAT32, Array

_LOG = logging.getLogger("jaxinf")

NUM_ON_DEVICE = 3
"""Subgroups on the device: one goes up, one is updated, one comes down."""

NUM_UNDER_WAY = 4
"""Units whose updates are under way at a time, if the device computes some."""

NUM_TRIED = 7
"""Steps that try shares of the updates before k is chosen."""

MIN_ELEMENTS = 1 << 16
"""Shorter subgroups stay with the CSDs: their update is over before a call of another
processor has begun."""

# The share of the updates' time that the device has to save.
_MIN_GAIN = 0.05


# --- which subgroups -----------------------------------------------------------------


def device_interval(
    interval: Any, store: Store, *, replan: bool, is_compressed: bool
) -> int | Literal["auto"]:
    """Returns k, by default that of the store's last step; 0 for no updates there.

    "auto", to measure k, becomes the k of a store that has steps.

    Raises:
      ValueError: k is no number, or the host cannot give updates away; names the
        remedy.
      StreamError: The store's commit records another k.
    """
    is_number = type(interval) is int and interval >= 0
    if not (interval is None or interval == "auto" or is_number):
        raise ValueError(
            f'device_updates={interval!r}: expected "auto", None or a number: the '
            "device computes every so many subgroups, and with 0 none"
        )
    engine, remedy = engine_of(store), "leave device_updates out"
    last = None if engine.is_new else engine.files.finished
    if last is not None and last.step:
        recorded = last.device_updates
        if interval == "auto":  # it is chosen once
            interval = None
        if interval not in (None, recorded) and not replan:
            raise StreamError(
                f"{store.path}: its last step was computed with device_updates="
                f"{recorded}, found device_updates={interval}; leave it out to go on "
                "as before, or give replan=True to go on with another choice (bits on "
                "an accelerator then differ from here on)"
            )
        if interval is None and recorded:
            interval, remedy = recorded, "give 0 for device_updates and replan=True"
    csd, compressed = engine.options.csd, "the host updates with compressed gradients"
    for is_refused, reason, other in (
        (csd.has_cards, f'on csd="{csd.kind}" cards update state', 'use csd="host"'),
        (is_compressed, compressed, "leave compress out"),
    ):
        if interval and is_refused:
            raise ValueError(
                f"device_updates={interval!r}: {reason}; {remedy}, or {other}"
            )
    return interval or 0


def device_assignment(
    subgroups: SubgroupTable,
    kernels: Sequence[Kernel],
    options: Options,
    mesh: Mesh | None,
    *,
    is_alone: bool,
) -> Assignment:
    """Returns the subgroups of a run whose updates the device computes.

    If k is to be measured, these are all that the device can compute, with k "auto".

    Raises:
      StreamError: There are several devices, or processes; or k is given, and the
        device can compute none of the subgroups.
    """
    interval = options.device_updates
    if not interval:
        return Assignment()
    if mesh is not None or not is_alone:
        where = "several processes" if mesh is None else mesh_text(mesh)
        raise StreamError(
            f"device_updates: expected one device, found {where}; leave it out, or, "
            "if the store's last step had it, give 0 for it and replan=True"
        )
    updater = DeviceUpdater(default_device(), options.jit)
    computable = tuple(
        layout.subgroup
        for leaf, kernel in enumerate(kernels)
        for layouts in subgroups.layouts_by_chunk(leaf)
        if all(updater.can_update(layout.kernel_extents, kernel) for layout in layouts)
        for layout in layouts
        if layout.subgroup.num_elements >= MIN_ELEMENTS
    )
    assignment = Assignment(updater, "auto", computable)
    if interval == "auto" and not computable:
        _LOG.warning("device_updates=0: the device can compute none of the subgroups")
        return Assignment()
    if interval != "auto":
        assignment = every_kth(assignment, interval)
    if not assignment.subgroups:
        raise StreamError(
            f"device_updates={interval}: expected more subgroups that the device can "
            "compute: of 65536 params or more, with state that is not coded, and an "
            "update without arrays from outside; leave device_updates out, or give a "
            "smaller number"
        )
    return assignment


def every_kth(assignment: Assignment, interval: int) -> Assignment:
    """Returns the assignment of each k-th of these subgroups; of none, if k is 0."""
    chosen = assignment.subgroups[interval - 1 :: interval] if interval else ()
    return Assignment(assignment.updater if chosen else None, interval, chosen)


def needs_of_assignment(
    subgroups: SubgroupTable, assignment: Assignment, largest_gradient_bytes: int
) -> list[MemoryNeed]:
    """Returns the memory that updates on the device take there, and on the host.

    A subgroup takes its old and new states, its gradient as it comes and in float32,
    its old master params, and its update.
    """
    chosen = frozenset(assignment.subgroups)
    sizes = [
        2 * sum(extent.num_bytes for extent in layout.kernel_extents)
        + 4 * FLOAT32.itemsize * layout.subgroup.num_elements
        for leaf in {subgroup.leaf for subgroup in chosen}
        for layouts in subgroups.layouts_by_chunk(leaf)
        for layout in layouts
        if layout.subgroup in chosen
    ]
    if not sizes:
        return []
    device_bytes = NUM_ON_DEVICE * max(sizes)
    under_way_bytes = (NUM_UNDER_WAY - 1) * largest_gradient_bytes
    return [
        MemoryNeed(device_bytes, "updates on the device", is_on_device=True),
        MemoryNeed(under_way_bytes, "gradients of updates under way"),
    ]


def next_interval(update_s: Sequence[float], num_subgroups: int) -> int:
    """Returns k of a store's next step; after `NUM_TRIED` steps, k from then on.

    The first step compiles, and does not count. Then two have all updates on the host,
    two all on the device, and two as many on each as take the same time. `update_s` are
    the seconds of the updates of each step so far.
    """
    if len(update_s) < 5:
        return (1, 0, 0, 1, 1)[len(update_s)]
    host_s, device_s = min(update_s[1:3]), min(update_s[3:5])
    shared = min(math.ceil(1 + device_s / host_s), num_subgroups)
    if len(update_s) < NUM_TRIED:
        return shared
    best_s, best = min((device_s, 1), (min(update_s[5:]), shared))
    return best if best_s <= (1 - _MIN_GAIN) * host_s else 0


def next_assignment(
    assignment: Assignment, last: CommitRecord, update_s: Sequence[float]
) -> Assignment:
    """Returns what the device computes in the next step, of what it may compute.

    While k is "auto", this is all that it can, and `next_interval` chooses k.
    """
    if assignment.interval != "auto":
        return assignment
    interval = last.device_updates
    if not last.step or interval == "auto":  # not chosen by batches of another shape
        interval = next_interval(update_s, len(assignment.subgroups))
        if len(update_s) < NUM_TRIED:
            return replace(every_kth(assignment, interval), interval="auto")
        _LOG.warning("device_updates=%d, as measured in the first steps", interval)
    return every_kth(assignment, interval)


# --- an update on the device ---------------------------------------------------------


class DeviceUpdater:
    """The `updater` of an `Assignment`. Each program is compiled for its arrays.

    The steps before and after a kernel are programs of their own: in one program with
    the kernel XLA chooses other products to fuse with sums.

    Attributes:
      is_host: Whether the device's memory is the host's, so that no copy is pinned.
      widen: ``(gradient, params)`` to both in float32, and whether the first is finite.
        Params are those of the store, one or two arrays, or none.
      compute: `kernel_function`; it may overwrite slots.
      add, add_split: ``(params, update)``, float32, to new params as the store has
        them; `add` may overwrite the old ones.
    """

    num_at_once = NUM_ON_DEVICE

    def __init__(self, device: Any, jit: Any) -> None:
        self.device, self.is_host = device, memory.device_is_host(device)
        self.widen = jit(_widen)
        self.compute = jit(kernel_function, static_argnums=0, donate_argnums=3)
        self.add = jit(lambda master, delta: (master + delta,), donate_argnums=0)
        self.add_split = jit(lambda master, delta: split_params(master + delta))

    def can_update(self, extents: Sequence[Extent], kernel: Kernel) -> bool:
        """Whether states are exact; others are rounded as the host's kernels do."""
        codecs = {extent.codec for extent in extents[2:]}
        is_exact = not codecs - {""} and extents[0].codec in ("", "split")
        return is_exact and is_computable(kernel)

    def update(self, csd: Csd, buffer: CsdBuffer, update: Update) -> UpdateOutcome:
        extents, params = update.extents, update.caller_params
        views: list[Array] = [csd.view(buffer, extent) for extent in extents]
        if params is not None:
            views[0] = params
        wanted = {*update.wanted_checksums} | ({0} if params is not None else set())
        checksums = {number: crc32c(views[number]) for number in wanted}
        try:
            num_params = 2 if extents[0].codec else 1
            states, is_finite = self._new_states(update, views, num_params)
        except jax.errors.JaxRuntimeError as error:
            num_bytes = sum(extent.num_bytes for extent in extents)
            raise StoreError(
                f"{self.device}: the update of a subgroup of {format_bytes(num_bytes)}"
                f" failed on the device ({error}); the step is given up, and the "
                "committed one is whole. Leave device_updates out, or give the step "
                "less of the device's memory"
            ) from error
        for number, state in states.items():
            csd.put(buffer, extents[number], state)
        return UpdateOutcome(is_finite, checksums)

    def _new_states(
        self, update: Update, views: Sequence[Array], num_params: int
    ) -> tuple[dict[int, Array], bool]:
        """Returns the states that change, and whether the gradient is finite."""
        assert isinstance(update.gradient, np.ndarray), "those sent in part stay"
        kernel, read = update.kernel, state_read(update.kernel)
        names = ["params"] * num_params + list(kernel.slots)
        numbers = [number for number, name in enumerate(names) if name in read]
        gradient, *copies = self._up([update.gradient, *(views[n] for n in numbers)])
        states = dict(zip(numbers, copies, strict=True))
        params = tuple(states.pop(n) for n in range(num_params) if n in states)
        slots = [states.pop(n, None) for n in range(num_params, len(names))]
        wide, master, is_finite = self.widen(gradient, params)
        del copies, params  # which new ones may overwrite
        scalars = list(update.inputs.scalars)
        delta, new_slots, _ = self.compute(kernel, wide, master, slots, scalars)
        new_params = [None] * num_params
        if delta is not None:
            add = self.add_split if num_params > 1 else self.add
            new_params = add(master, delta)
        new_states = enumerate((*new_params, *new_slots))
        changed = {n: state for n, state in new_states if state is not None}
        down = self._down([*changed.values()])
        return dict(zip(changed, down, strict=True)), bool(is_finite)

    def _up(self, arrays: Sequence[Array]) -> list[jax.Array]:
        to = SingleDeviceSharding(self.device)
        if self.is_host:  # an array in the buffer would change with it
            return jax.device_put([np.array(a) for a in arrays], to)
        pinned = jax.device_put(list(arrays), to.with_memory_kind(PINNED))
        return jax.device_put(pinned, to, donate=True)

    def _down(self, arrays: Sequence[jax.Array]) -> list[Array]:
        if not self.is_host:
            pinned = SingleDeviceSharding(self.device, memory_kind=PINNED)
            arrays = jax.device_put(list(arrays), pinned, donate=True)
        return [np.asarray(array) for array in arrays]


def _widen(
    gradient: jax.Array, params: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    master = None
    if params:
        master = join_params(*params) if len(params) > 1 else params[0]
    return gradient.astype(FLOAT32), master, jnp.isfinite(gradient).all()
