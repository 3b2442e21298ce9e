"""Updates of subgroups on a JAX device, while the host's cores compute others.

    buffer ─ pinned ─► device: the optimizer's own equations ─ pinned ─► buffer

Invariant: the device has room for a fixed number of subgroups, and the thread of each
waits for its copies, so one's copies hide behind another's update. On a CPU the bits
are those of the host's kernels.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxinf import compat
from jaxinf.csd import Csd, CsdBuffer, Extent, Update, UpdateOutcome
from jaxinf.engine import SubgroupLayout
from jaxinf.errors import StoreError
from jaxinf.kernels import state_read
from jaxinf.program import (
    Kernel,
    is_computable,
    joined_params,
    kernel_function,
    split_params,
)
from jaxinf.streaming.program.shards import PINNED
from jaxinf.terminal import format_bytes
from jaxinf.transfer import crc32c
from jaxinf.typing import FLOAT32, Array

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
        self.device = device
        self.is_host = is_host
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

    # --- inside --------------------------------------------------------------------

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
