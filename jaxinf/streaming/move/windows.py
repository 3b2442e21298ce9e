"""Memory for the params that are read ahead, on the host and on the JAX device.

    HostWindow     drive ─► buffer, which the device reads in place
    DeviceWindow   drive ─► buffer ─► pinned_host ─► device, one copy under way

Invariant: params never take more memory than a window's capacity. A buffer is read into
only when no program, no copy and no update can still read it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import SingleDeviceSharding

from jaxinf.io import BufferPool
from jaxinf.io.buffers import Buffer
from jaxinf.io.pages import PAGE_BYTES
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.reads import Reading
from jaxinf.streaming.program.units import Unit
from jaxinf.typing import Array

__all__ = ["Brought", "DeviceWindow", "HostWindow", "Lease", "Window", "make_window"]

# How often a wait for room looks whether the step has been given up.
_LOOK_S = 0.05


class Lease(Protocol):
    """Memory that is lent until `release`."""

    def release(self) -> None:
        """Gives the memory back."""
        ...


@dataclass(frozen=True)
class Brought:
    """A unit in memory.

    Attributes:
      on_device: For programs.
      calls: Memory that the programs need.
      shards: For the update: the unit's shards on the host.
      update: Memory that the update needs; None if it does not take the unit.
    """

    on_device: jax.Array
    calls: Lease
    shards: Sequence[Array]
    update: Lease | None


class Window(Protocol):
    """Memory for params. `bring` and `settle` are called from one thread."""

    def bring(
        self,
        unit: Unit,
        read: Callable[[Sequence[Array]], None],
        is_stopped: Callable[[], bool],
        *,
        is_for_update: bool,
    ) -> Brought | None:
        """Reads a unit when there is room; None if the step is given up before.

        Args:
          unit: The unit.
          read: Fills arrays with the unit's shards; blocks.
          is_stopped: Whether the step is given up.
          is_for_update: Whether the unit's update takes it, too.
        """
        ...

    def settle(self) -> None:
        """Waits for copies that are under way."""
        ...

    @property
    def held_bytes(self) -> int:
        """Memory of the host that the window has now."""
        ...

    def rest(self) -> None:
        """Frees the memory until `bring`; nothing is in it."""
        ...

    def close(self) -> None:
        """Frees the memory."""
        ...


class HostWindow:
    """A window of a device that shares the host's memory: it reads buffers in place.

    Args:
      capacity_bytes: Memory for units.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._pool = BufferPool(max(capacity_bytes, PAGE_BYTES))

    def bring(
        self,
        unit: Unit,
        read: Callable[[Sequence[Array]], None],
        is_stopped: Callable[[], bool],
        *,
        is_for_update: bool,
    ) -> Brought | None:
        """As `Window.bring`."""
        buffer = _acquire(self._pool, unit, is_stopped)
        if buffer is None:
            return None
        try:
            shards = unit.views(buffer.array)
            read(shards)
            on_device = unit.on_devices(shards)
        except BaseException:
            buffer.release()
            raise
        if not is_for_update:
            return Brought(on_device, buffer, shards, None)
        shared = _Shared(buffer, 2)
        return Brought(on_device, shared, shards, shared)

    def settle(self) -> None:
        """Nothing is copied."""

    @property
    def held_bytes(self) -> int:
        """As `Window.held_bytes`."""
        return self._pool.held_bytes

    def rest(self) -> None:
        """As `Window.rest`."""
        self._pool.free_idle()

    def close(self) -> None:
        """As `Window.close`."""
        self._pool.close()


class DeviceWindow:
    """A window of a device with memory of its own.

    A unit passes through memory of the kind `pinned_host`, from which the device copies
    while the next unit is read. On the host it stays only if an update takes it.

    Args:
      device: The device, of `jax.devices`.
      device_bytes: Memory for units on the device.
      host_bytes: Memory for buffers on the host: two of the largest unit, and room for
        the units that wait for their update. A third one is taken beside it, pinned.
    """

    def __init__(self, device: Any, device_bytes: int, host_bytes: int) -> None:
        self._pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
        self._sharding = SingleDeviceSharding(device)
        self._room = _Room(device_bytes)
        self._pool = BufferPool(max(host_bytes, PAGE_BYTES))
        self._copying: tuple[jax.Array, Lease] | None = None

    def bring(
        self,
        unit: Unit,
        read: Callable[[Sequence[Array]], None],
        is_stopped: Callable[[], bool],
        *,
        is_for_update: bool,
    ) -> Brought | None:
        """As `Window.bring`."""
        buffer = _acquire(self._pool, unit, is_stopped)
        if buffer is None:
            return None
        room = None
        try:
            shards = unit.views(buffer.array)
            read(shards)
            self.settle()
            room = self._room.acquire(unit.num_bytes, is_stopped)
            if room is None:
                buffer.release()
                return None
            # Devices copy from one pinned array for each shard.
            pinned = [jax.device_put(shard, self._pinned) for shard in shards]
            on_device = unit.on_devices(pinned, self._sharding)
        except BaseException:
            buffer.release()
            if room is not None:
                room.release()
            raise
        # The pinned array may be the buffer itself, as on a CPU.
        shared = _Shared(buffer, 1 + is_for_update)
        self._copying = on_device, shared
        return Brought(on_device, room, shards, shared if is_for_update else None)

    def settle(self) -> None:
        """Waits for the copy that is under way, and frees its source."""
        if self._copying is not None:
            on_device, buffer = self._copying
            self._copying = None
            try:
                jax.block_until_ready(on_device)
            finally:
                buffer.release()

    @property
    def held_bytes(self) -> int:
        """As `Window.held_bytes`."""
        return self._pool.held_bytes

    def rest(self) -> None:
        """As `Window.rest`."""
        self.settle()
        self._pool.free_idle()

    def close(self) -> None:
        """As `Window.close`."""
        self.settle()
        self._pool.close()


def make_window(
    reading: Reading, division: Division, device: Any
) -> tuple[Window, int]:
    """Makes the window for reads; returns it and the memory that no param needs."""
    room = reading.room_bytes
    if division.staged:
        return DeviceWindow(device, room, division.staged - reading.largest_bytes), 0
    return HostWindow(reading.needed_bytes), room - reading.needed_bytes


class _Shared:
    """A buffer that is released when the last of its holders has released it."""

    def __init__(self, buffer: Buffer, num_holders: int) -> None:
        self._buffer = buffer
        self._num_holders = num_holders
        self._lock = threading.Lock()

    def release(self) -> None:
        with self._lock:
            self._num_holders -= 1
            is_last = not self._num_holders
        if is_last:
            self._buffer.release()


class _Room:
    """Counts bytes of the device's memory."""

    def __init__(self, capacity_bytes: int) -> None:
        self._free_bytes = capacity_bytes
        self._changed = threading.Condition()

    def acquire(
        self, num_bytes: int, is_stopped: Callable[[], bool]
    ) -> "_Counted | None":
        with self._changed:
            while num_bytes > self._free_bytes:
                if is_stopped():
                    return None
                self._changed.wait(_LOOK_S)
            self._free_bytes -= num_bytes
        return _Counted(self, num_bytes)

    def give_back(self, num_bytes: int) -> None:
        with self._changed:
            self._free_bytes += num_bytes
            self._changed.notify_all()


class _Counted:
    """Bytes of the device's memory that a unit takes."""

    def __init__(self, room: _Room, num_bytes: int) -> None:
        self._room = room
        self._num_bytes = num_bytes

    def release(self) -> None:
        self._room.give_back(self._num_bytes)
        self._num_bytes = 0


def _acquire(
    pool: BufferPool, unit: Unit, is_stopped: Callable[[], bool]
) -> Buffer | None:
    while not is_stopped():
        try:
            return pool.acquire(max(unit.held_bytes, 1), timeout_s=_LOOK_S)
        except TimeoutError:
            continue
    return None
