"""Params that stay in memory between steps.

    begin, bring ─► programs: get                         ─► end
                    updates: take ─► target ─► free

Invariant: a unit has the bits of the store's last finished step. If a step was given up
  after its update, or another has been made elsewhere, it is read again.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import SingleDeviceSharding

from jaxinf.io.buffers import aligned
from jaxinf.streaming.program.shards import handed_out, shards_of
from jaxinf.streaming.program.units import Unit
from jaxinf.typing import Array

Version: TypeAlias = tuple[object, int]
"""An open store and its last finished step."""


class Resident:
    """Units in the memory of the JAX device.

    `get` is called by the thread that runs programs, `take`, `target` and `free` by
    that of the updates, when the unit's gradient is complete.

    Args:
      is_host: Whether its memory is the host's: programs then read where updates write.
    """

    def __init__(self, device: Any, *, is_host: bool) -> None:
        self._sharding = SingleDeviceSharding(device)
        self._is_host = is_host
        self._version: Version = (None, -1)
        # What programs read, if that is there: the shards of each unit.
        self._on_host: dict[Unit, Sequence[Array]] = {}
        self._on_device: dict[Unit, jax.Array] = {}
        self._changed: set[Unit] = set()
        self._next: dict[Unit, Sequence[Array]] = {}  # values for the next step
        self._in_place: Collection[Unit] = ()

    def begin(
        self,
        version: Version,
        units: Collection[Unit],
        in_place: Collection[Unit] = (),
        *,
        is_shared: bool = False,
    ) -> list[Unit]:
        """Drops what is out of date; returns the units that must be brought.

        Args:
          version: The store and the step that the units must be of.
          in_place: Those that no program reads after their update.
          is_shared: Whether other units stay, too.
        """
        if version != self._version:
            self.drop()
        others = () if is_shared else self._on_device.keys() - set(units)
        for unit in [*self._changed, *others]:
            self._forget(unit)
        self._changed.clear()
        self._next.clear()
        self._version, self._in_place = version, in_place
        return _in_order(unit for unit in units if unit not in self._on_device)

    def bring(self, unit: Unit, read: Callable[[Unit, Sequence[Array]], None]) -> None:
        """Reads a unit; blocks.

        Args:
          read: Fills arrays with its shards; may raise.
        """
        shards = _new(unit)
        read(unit, shards)
        self._hold(unit, shards)

    def get(self, unit: Unit) -> jax.Array:
        return self._on_device[unit]

    def take(self, unit: Unit) -> Sequence[Array]:
        """Returns the shards of a unit's params on the host, for its update."""
        if self._is_host:
            return self._on_host[unit]
        return shards_of(handed_out(self.get(unit), copies=True), unit.shards)

    def target(self, unit: Unit) -> Sequence[Array]:
        """Returns memory for the new params: where `take`'s are, if that is possible.

        No program that reads the unit may be under way, if it is updated in place.
        """
        self._changed.add(unit)
        if not self._is_host or unit not in self._in_place:
            self._next[unit] = _new(unit)
            return self._next[unit]
        del self._on_device[unit]  # it would not notice that its memory changes
        return self._on_host[unit]

    def free(self, unit: Unit) -> None:
        """Notes that the update has filled the `target`."""
        if unit not in self._changed or unit not in self._in_place:
            return
        self._hold(unit, self._next.pop(unit, None) or self._on_host[unit])

    def end(self) -> None:
        """Notes that the store has advanced by this step."""
        for unit in _in_order(self._next):
            self._hold(unit, self._next.pop(unit))
        self._changed.clear()
        opened, step = self._version
        self._version = opened, step + 1

    def drop(self) -> None:
        """Frees all; no program may be under way."""
        for unit in [*self._on_device, *self._on_host]:
            self._forget(unit)
        self._next.clear()

    def _hold(self, unit: Unit, shards: Sequence[Array]) -> None:
        if self._is_host:
            self._on_host[unit] = shards
        if unit.is_shared:
            self._on_device[unit] = unit.put_together(shards, in_place=self._is_host)
        else:
            self._on_device[unit] = unit.on_devices(shards, self._sharding)

    def _forget(self, unit: Unit) -> None:
        """Drops a unit. An update that was given up may still write to its memory."""
        self._on_host.pop(unit, None)
        self._on_device.pop(unit, None)


def _in_order(units: Iterable[Unit]) -> list[Unit]:
    return sorted(units, key=lambda unit: unit.place)


def _new(unit: Unit) -> Sequence[Array]:
    return unit.views(aligned(unit.held_bytes))
