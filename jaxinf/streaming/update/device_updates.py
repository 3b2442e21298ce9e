"""Updates of each k-th subgroup on a JAX device, while the host's cores compute others.

    buffer ─ pinned ─► device: the optimizer's own equations ─ pinned ─► buffer

Invariant: the device has room for a fixed number of subgroups, and the thread of each
waits for its copies, so one's copies hide behind another's update. On a CPU the bits
are those of the host's kernels. What a run was asked for and cannot have is refused
before a store is made or changed, and a resumed run keeps to the choice that its commit
records.
"""

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jaxinf import compat
from jaxinf.csd import (
    Csd,
    CsdBuffer,
    Extent,
    HostCsd,
    Rounding,
    ScalarInputs,
    Update,
    UpdateOutcome,
)
from jaxinf.engine import Assignment, Store, SubgroupLayout, assigned, engine_of
from jaxinf.errors import AssignmentError, StoreError, StreamError
from jaxinf.kernels import state_read
from jaxinf.program import (
    Kernel,
    is_computable,
    joined_params,
    kernel_function,
    split_params,
)
from jaxinf.store import CommitRecord
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.options import DeviceUpdates, StepOptions
from jaxinf.streaming.program.meshes import mesh_text
from jaxinf.streaming.program.shards import PINNED
from jaxinf.streaming.update.near_storage import Updates
from jaxinf.terminal import format_bytes
from jaxinf.transfer import BufferPool, ByteMeters, crc32c
from jaxinf.typing import FLOAT32, Array

_LOG = logging.getLogger("jaxinf")

NUM_ROOMS = 3
"""Subgroups on the device: one goes up, one is updated, one comes down."""

NUM_UNDER_WAY = 4
"""Units whose updates are under way at a time, where a device computes some."""

_NUM_ROUNDS = 4
# What the device has to save, of the time of the updates.
_LEAST_GAIN = 0.05


# --- which subgroups -----------------------------------------------------------------


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


class DeviceShare:
    """The subgroups of a run whose updates the device computes: each k-th one.

    Args:
      store: The store, which may be empty.
      mesh: The devices of the run; None for one.

    Raises:
      AssignmentError: The store's commit records another k.
      StreamError: There are several devices, or processes; or the device can compute
        none of the subgroups, and was told to.
    """

    def __init__(
        self, updates: Updates, store: Store, options: StepOptions, mesh: Mesh | None
    ) -> None:
        self._updates = updates
        self._asked = asked = options.device_updates
        self._every = _asked_interval(asked, store, mesh, replan=options.replan)
        is_host = options.limit.is_host
        self._updater = DeviceUpdater(
            options.device, is_host=is_host, is_deterministic=options.deterministic
        )
        self._layouts: list[tuple[SubgroupLayout, Kernel]] = []
        if self._every != 0:
            chosen = self._assigned(1 if asked == "auto" else self._every or 1)
            leaves = updates.shape.directory.manifest.leaves
            self._layouts = [
                (layout, kernel)
                for number, (leaf, kernel) in enumerate(
                    zip(leaves, updates.kernels, strict=True)
                )
                for layout in updates.shape.layouts(
                    number, (0,) * len(leaf.shape), leaf.shape
                )
                if layout.subgroup in chosen.subgroups
            ]

    def without(self, division: Division) -> Division:
        """Returns memory without what updates on the device take there, and here.

        Raises:
          BudgetError: Nothing is left for the programs.
        """
        if not self._layouts:
            return division
        rooms_bytes = NUM_ROOMS * max(room_bytes(layout) for layout, _ in self._layouts)
        under_way_bytes = (NUM_UNDER_WAY - 1) * self._updates.largest_bytes
        purpose = "updates on the device"
        return division.without(rooms_bytes, purpose, is_on_device=True).without(
            under_way_bytes, "gradients of updates under way"
        )

    def assignment(self, memory_bytes: int) -> Assignment:
        """Returns the choice; k is measured if it must be, which blocks.

        Args:
          memory_bytes: Memory of the host that is free between steps.
        """
        if self._every is None:
            self._every = _measured(self._updater, self._layouts, memory_bytes)
        return self._assigned(self._every)

    def _assigned(self, every: int) -> Assignment:
        updates = self._updates
        found = assigned(updates.shape, updates.kernels, self._updater, every)
        if every and not found.subgroups and self._asked != "auto":
            raise StreamError(
                f"device_updates={every}: expected more subgroups that the "
                "device can compute: of 65536 params or more, with state that is not "
                "coded, and an update without arrays from outside; leave "
                "device_updates out, or give a smaller number"
            )
        return found


def _asked_interval(
    value: DeviceUpdates, store: Store, mesh: Mesh | None, *, replan: bool
) -> int | None:
    """Returns k, 0 for no updates on the device; None to measure it."""
    every = None if value == "auto" else value or 0
    if (last := _last_step(store)) is not None:
        kept = last.device_updates
        if last.device_tier and not replan:
            raise StreamError(
                f"{store.path}: its last step was computed with {last.device_tier} "
                "bytes of state on the JAX device, which this version of jaxinf does "
                "not do; pass replan=True to go on with all state in the store (bits "
                "on an accelerator then differ from here on)"
            )
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


def _last_step(store: Store) -> CommitRecord | None:
    """Returns the record of a store's last step; None if it has had none."""
    engine = engine_of(store)
    if engine.commit is None or not engine.opened.finished.step:
        return None
    return engine.opened.finished


# --- k, as measured ------------------------------------------------------------------


def _measured(
    updater: "DeviceUpdater",
    layouts: Sequence[tuple[SubgroupLayout, Kernel]],
    memory_bytes: int,
) -> int:
    """Returns the smallest k at which the host never waits for the device. Blocks.

    The host's cores each update a subgroup of their own in memory, and the device as
    many as it has room for, each a few times; the first time of each does not count.

    Args:
      memory_bytes: If it is short, fewer are updated at once, but one in any case.
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


# --- an update on the device ---------------------------------------------------------


def room_bytes(layout: SubgroupLayout) -> int:
    """Memory of a device for a subgroup, in bytes.

    Its states as they were and as they are, its gradient as it comes and in float32,
    its master params before, and its update.
    """
    states_bytes = sum(extent.num_bytes for extent in layout.kernel_extents)
    return 2 * states_bytes + 4 * FLOAT32.itemsize * layout.subgroup.num_elements


class UpdatePrograms:
    """The programs of updates, jitted; each is compiled for the arrays that it gets.

    What comes before and after a kernel has programs of its own: in one with the kernel
    XLA chooses other products to fuse with sums.

    Args:
      is_deterministic: Whether they have the same bits in each run.

    Attributes:
      widen: ``(gradient, params)`` to both in float32, and whether the gradient is
        finite. Params are those of the store, one or two arrays, or none.
      add: ``(params, update)``, float32, to new params as the store has them: in
        float32, or split. The first may overwrite its params.
    """

    def __init__(self, *, is_deterministic: bool = True) -> None:
        options = compat.deterministic_options(is_deterministic)
        self._jit = partial(jax.jit, compiler_options=options)
        self._guard = threading.Lock()
        self._kernels: dict[Kernel, Any] = {}
        self.widen = self._jit(_widen)
        self.add = (self._jit(_add, donate_argnums=(0,)), self._jit(_add_split))

    def update(self, kernel: Kernel) -> Any:
        """Returns `kernel_function` of a kernel; it may overwrite slots."""
        with self._guard:
            if kernel not in self._kernels:
                program = partial(kernel_function, kernel)
                self._kernels[kernel] = self._jit(program, donate_argnums=(2,))
            return self._kernels[kernel]


class DeviceUpdater:
    """See `jaxinf.engine.requests.Updater`.

    Args:
      is_host: Whether its memory is the host's, so that no copy is pinned.
      is_deterministic: Whether its programs have the same bits in each run.
    """

    num_at_once = NUM_ROOMS

    def __init__(
        self, device: Any, *, is_host: bool, is_deterministic: bool = True
    ) -> None:
        self.device, self.is_host = device, is_host
        self._on_device = SingleDeviceSharding(device)
        self._programs = UpdatePrograms(is_deterministic=is_deterministic)

    def takes(self, extents: Sequence[Extent], kernel: Kernel) -> bool:
        """Exact forms of state only: others are rounded as the host's kernels do."""
        codecs = {extent.codec for extent in extents[2:]}
        is_exact = not codecs - {""} and extents[0].codec in ("", "split")
        return is_exact and is_computable(kernel)

    def update(self, csd: Csd, buffer: CsdBuffer, update: Update) -> UpdateOutcome:
        extents, given = update.extents, update.given
        views: list[Array] = [csd.view(buffer, extent) for extent in extents]
        if given is not None:
            views[0] = given
        told = {*update.tells} | ({0} if given is not None else set())
        read = {number: crc32c(views[number]) for number in told}
        with self._failing(sum(extent.num_bytes for extent in extents)):
            num_params = 2 if extents[0].codec else 1
            states, is_finite = self._computed(update, views, num_params)
        for number, state in states.items():
            csd.put(buffer, extents[number], state)
        return UpdateOutcome(is_finite, read)

    @contextlib.contextmanager
    def _failing(self, num_bytes: int) -> Iterator[None]:
        """Says of which subgroup an update has failed."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            raise StoreError(
                f"{self.device}: the update of a subgroup of {format_bytes(num_bytes)}"
                f" failed on the device ({error}); the step is given up, and the "
                "committed one is whole. Leave device_updates out, or give the step "
                "less of the device's memory"
            ) from error

    def _computed(
        self, given: Update, views: Sequence[Array], num_params: int
    ) -> tuple[dict[int, Array], bool]:
        """Returns the states that change, and whether the gradient is finite."""
        assert isinstance(given.gradient, np.ndarray), "those sent in part stay"
        kernel, read = given.kernel, state_read(given.kernel)
        names = ["params"] * num_params + list(kernel.slots)
        is_read = [name in read for name in names]
        up = self._up([given.gradient, *itertools.compress(views, is_read)])
        gradients, coming = [up[0]], iter(up[1:])
        states = [next(coming) if own else None for own in is_read]
        del up
        params = tuple(own for own in states[:num_params] if own is not None)
        wide, master, is_finite = self._programs.widen(gradients.pop(), params)
        slots = states[num_params:]
        del states, params
        compute = self._programs.update(kernel)
        update, new_slots, _ = compute(wide, master, slots, list(given.inputs.scalars))
        del slots, wide
        new = [None] * num_params
        if update is not None:
            new = self._programs.add[num_params > 1](master, update)
        del master, update
        changed = {n: x for n, x in enumerate((*new, *new_slots)) if x is not None}
        del new, new_slots
        numbers = list(changed)
        down = self._down([changed.pop(number) for number in numbers])
        return dict(zip(numbers, down, strict=True)), bool(is_finite)

    def _up(self, arrays: Sequence[Array]) -> list[jax.Array]:
        if self.is_host:  # an array in the buffer would change with it
            return jax.device_put([np.array(a) for a in arrays], self._on_device)
        pinned = jax.device_put(list(arrays), self._on_device.with_memory_kind(PINNED))
        return jax.device_put(pinned, self._on_device, donate=True)

    def _down(self, arrays: Sequence[jax.Array]) -> list[Array]:
        if not self.is_host:
            kind = self._on_device.with_memory_kind(PINNED)
            arrays = jax.device_put(list(arrays), kind, donate=True)
        return [np.asarray(array) for array in arrays]


def _widen(
    gradient: jax.Array, params: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Returns gradient and params in float32, and whether the gradient is finite."""
    master = None
    if params:
        master = joined_params(*params) if len(params) > 1 else params[0]
    return gradient.astype(FLOAT32), master, jnp.isfinite(gradient).all()


def _add(master: jax.Array, update: jax.Array) -> tuple[jax.Array]:
    return (master + update,)


def _add_split(master: jax.Array, update: jax.Array) -> tuple[jax.Array, jax.Array]:
    return split_params(master + update)
