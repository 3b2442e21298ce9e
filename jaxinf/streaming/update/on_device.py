"""Updates of subgroups on a JAX device, while the host's cores compute others.

    buffer ─ pinned ─► device: the optimizer's own equations ─ pinned ─► buffer

Invariant: the device has room for a fixed number of subgroups, and the thread of each
waits for its copies, so one's copies hide behind another's update. On a CPU the bits
are those of the host's kernels.
"""

import threading
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxinf import compat
from jaxinf.csd import Csd, CsdBuffer, Extent, UpdateOutcome
from jaxinf.engine import SubgroupLayout
from jaxinf.errors import StoreError
from jaxinf.io import crc32c
from jaxinf.kernels.specialise import state_read
from jaxinf.layout import CodedSlot
from jaxinf.program import (
    Kernel,
    is_computable,
    joined_params,
    kernel_function,
    split_params,
)
from jaxinf.streaming.program.shards import PINNED
from jaxinf.terminal import format_bytes
from jaxinf.typing import FLOAT32, Array

__all__ = ["NUM_ROOMS", "DeviceUpdater", "room_bytes"]

NUM_ROOMS = 3
"""Subgroups on the device: one goes up, one is updated, one comes down."""


def room_bytes(layouts: Iterable[SubgroupLayout]) -> int:
    """Memory of a device for one of these subgroups, in bytes.

    Its states as they were and as they are, its gradient as it comes and in float32,
    its master params before, and its update.
    """
    return max(
        (
            2 * sum(extent.num_bytes for extent in layout.kernel_extents)
            + 4 * FLOAT32.itemsize * layout.subgroup.num_elements
            for layout in layouts
        ),
        default=0,
    )


class DeviceUpdater:
    """See `jaxinf.engine.Updater`.

    Args:
      device: Of `jax.devices`.
      is_host: Whether its memory is the host's, so that no copy is pinned.
      is_deterministic: Whether its programs have the same bits in each run.
    """

    num_at_once = NUM_ROOMS

    def __init__(
        self, device: Any, *, is_host: bool, is_deterministic: bool = True
    ) -> None:
        self._device, self._is_host = device, is_host
        self._on_device = SingleDeviceSharding(device)
        options = compat.deterministic_options(is_deterministic)
        self._jit = partial(jax.jit, compiler_options=options)
        self._guard = threading.Lock()
        self._programs: dict[Kernel, Any] = {}
        # What comes before and after has programs of its own: in one with the kernel
        # XLA chooses other products to fuse with sums.
        self._widen = self._jit(_widen)
        self._add = [
            self._jit(partial(_add, is_split=is_split), donate_argnums=(0,))
            for is_split in (False, True)
        ]

    def takes(self, extents: Sequence[Extent], kernel: Kernel) -> bool:
        """Exact forms of state only: others are rounded as the host's kernels do."""
        codecs = {extent.codec for extent in extents[2:]}
        is_exact = not codecs - {""} and extents[0].codec in ("", "split")
        return is_exact and is_computable(kernel)

    def update(
        self,
        csd: Csd,
        buffer: CsdBuffer,
        extents: Sequence[Extent],
        kernel: Kernel,
        gradient: Array,
        scalars: Sequence[np.generic | Array],
        out: Array | None,
        *,
        given: Array | None = None,
        wants_params: bool = False,
        tells: Collection[int] = (),
    ) -> UpdateOutcome:
        """As `Updater.update`."""
        views = [csd.view(buffer, extent) for extent in extents]
        if given is not None:
            views[0] = given
        told = set(tells) | ({0} if given is not None else set())
        checksums = {number: crc32c(views[number]) for number in told}
        num_first = 2 if extents[0].codec else 1
        params, slots = views[:num_first], views[num_first:]
        wants_update = out is not None and out.dtype == FLOAT32 and not wants_params
        try:
            new, update, is_finite = self._computed(
                kernel, params, slots, gradient, scalars, wants_update=wants_update
            )
        except jax.errors.JaxRuntimeError as error:
            num_bytes = sum(view.nbytes for view in views)
            raise StoreError(
                f"{self._device}: the update of a subgroup of {format_bytes(num_bytes)}"
                f" failed on the device ({error}); the step is given up, and the "
                "committed one is whole. Leave device_updates out, or give the step "
                "less of the device's memory"
            ) from error
        for extent, array in zip(extents, new, strict=True):
            if array is not None:
                csd.put(buffer, extent, array)
        if out is not None:
            self._fill(out, update, new, params, wants_params=wants_params)
        return UpdateOutcome(is_finite, checksums)

    # --- inside --------------------------------------------------------------------

    def _computed(
        self,
        kernel: Kernel,
        params: Sequence[Array],
        slots: Sequence[Array],
        gradient: Array,
        scalars: Sequence[np.generic | Array],
        *,
        wants_update: bool,
    ) -> tuple[list[Array | None], Array | None, bool]:
        """Returns the new states, None for unchanged ones, and the update if wanted."""
        read = state_read(kernel)
        changed = [name not in kernel.unchanged for name in kernel.slots]
        is_read = [name in read for name in kernel.slots]
        needs_params = "params" in read
        up = self._up(
            [
                gradient,
                *(params if needs_params else ()),
                *(slot for slot, is_own in zip(slots, is_read, strict=True) if is_own),
            ]
        )
        own_gradient, rest = up[0], up[1:]
        num_first = len(params) if needs_params else 0
        own_params, own_slots = tuple(rest[:num_first]), iter(rest[num_first:])
        del up, rest
        given = [next(own_slots) if is_own else None for is_own in is_read]
        wide, master, is_finite = self._widen(own_gradient, own_params)
        del own_gradient, own_params
        update, new_slots, _ = self._program(kernel)(wide, master, given, list(scalars))
        del given, wide
        new_params: Sequence[jax.Array] = ()
        if update is not None:
            new_params = self._add[len(params) > 1](master, update)
        del master
        has_params = kernel.update is not None
        wanted = [
            *(new_params if has_params else ()),
            *(slot for slot, is_new in zip(new_slots, changed, strict=True) if is_new),
            *([update] if wants_update and update is not None else ()),
        ]
        down = iter(self._down(wanted))
        new: list[Array | None] = [next(down) if has_params else None for _ in params]
        new += [next(down) if is_new else None for is_new in changed]
        return new, next(down, None), bool(is_finite)

    def _fill(
        self,
        out: Array,
        update: Array | None,
        new: Sequence[Array | None],
        params: Sequence[Array],
        *,
        wants_params: bool,
    ) -> None:
        """Writes the result as `jaxinf.kernels.evaluate` does."""
        if out.dtype == FLOAT32 and not wants_params:
            out[...] = 0 if update is None else update
            return
        newest = [
            old if own is None else own for old, own in zip(params, new, strict=False)
        ]
        if len(newest) > 1 and out.dtype == FLOAT32:
            out[...] = CodedSlot.of(newest[0], newest[1]).decode()
        else:
            out[...] = newest[0]

    def _program(self, kernel: Kernel) -> Any:
        with self._guard:
            if kernel not in self._programs:
                program = partial(kernel_function, kernel)
                self._programs[kernel] = self._jit(program, donate_argnums=(2,))
            return self._programs[kernel]

    def _up(self, arrays: Sequence[Array]) -> list[jax.Array]:
        if self._is_host:  # an array in the buffer would change with it
            return jax.device_put([np.array(a) for a in arrays], self._on_device)
        pinned = jax.device_put(list(arrays), self._on_device.with_memory_kind(PINNED))
        return jax.device_put(pinned, self._on_device, donate=True)

    def _down(self, arrays: Sequence[jax.Array]) -> list[Array]:
        if not self._is_host:
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


def _add(
    master: jax.Array, update: jax.Array, *, is_split: bool
) -> tuple[jax.Array, ...]:
    """Returns the new params in the form of the store."""
    new = master + update
    return split_params(new) if is_split else (new,)
