"""Reads params before the programs need them, into memory of a fixed size.

    drive ─► buffer, which the device reads in place         a device with the host's
    drive ─► buffer ─► pinned_host ─► device                 … with memory of its own

Invariant: units are read in the order in which calls need them, so those that a call
waits for always get room. A buffer is read into only when no program, no copy and no
update can still read it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import SingleDeviceSharding

from jaxinf.schedule.reads import Fetch
from jaxinf.streaming.move.mover import Mover, MoverCounts
from jaxinf.streaming.move.tensors import PINNED, Moved
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.reads import Reading
from jaxinf.streaming.program.units import Unit
from jaxinf.typing import Array

__all__ = ["Fetcher", "Source", "make_fetcher"]


class Source(Protocol):
    """The source of units."""

    def begin(self) -> None:
        """Prepares for the reads of a step."""
        ...

    def read(self, unit: Unit, shards: Sequence[Array]) -> None:
        """Fills arrays with the unit's shards; blocks."""
        ...

    def read_again(self, unit: Unit, shards: Sequence[Array]) -> None:
        """Fills arrays with a unit's shards beside the reads of a step; blocks."""
        ...

    def close(self) -> None:
        """Ends the reads of a step."""
        ...


@dataclass(eq=False, kw_only=True)
class _Fetched(Moved):
    """A unit on its way to the device, or to one like it."""

    unit: Unit
    source: Source
    device: Any

    def queue(self, part: int) -> int:
        return 0

    def read(self, part: int, out: Array, bounce: Array) -> int:
        self.source.read(self.unit, self.unit.views(out))
        return self.unit.num_bytes

    def on_device(self, raw: Array, *, has_link: bool) -> jax.Array:
        shards, unit = self.unit.views(raw), self.unit
        if not has_link:
            return unit.on_devices(shards)
        # Devices copy from one pinned array for each shard, maybe the buffer itself.
        pinned = SingleDeviceSharding(self.device, memory_kind=PINNED)
        copies = [jax.device_put(shard, pinned) for shard in shards]
        own = SingleDeviceSharding(self.device)
        return jax.block_until_ready(unit.on_devices(copies, own))


class Fetcher:
    """Reads a step's units ahead, on a thread of its own.

    Args:
      source: The source of units.
      fetches: The reads of each step, in order.
      room_bytes: Memory for units on the device; at least `window_bytes`.
      host_bytes: Of a device with memory of its own, memory for buffers on the host:
        two of the largest unit, and room for the units that wait for their update. A
        third one is taken beside it, pinned. None if its memory is the host's.
      device: The device, of `jax.devices`.

    Attributes:
      fetches: The reads of each step.
    """

    def __init__(
        self,
        source: Source,
        fetches: Sequence[Fetch],
        room_bytes: int,
        host_bytes: int | None = None,
        device: Any = None,
    ) -> None:
        self._source = source
        self.fetches = fetches
        self._device = device
        self._has_link = host_bytes is not None
        self._mover = Mover(
            [1],
            has_link=self._has_link,
            read_bytes=room_bytes if host_bytes is None else host_bytes,
            device_bytes=room_bytes,
            name="jaxinf-fetch",
        )
        self._lasts: dict[Unit, list[int]] = {}  # of its fetches, in order
        self._ends: dict[int, list[tuple[Unit, int]]] = {}  # by their last call
        for fetch in fetches:
            self._lasts.setdefault(fetch.unit, []).append(fetch.last)
            self._ends.setdefault(fetch.last, []).append((fetch.unit, fetch.last))
        self._updates = {
            one.unit: (one.unit, one.last)
            for one in fetches
            if one.gradient is not None
        }
        self.counts = MoverCounts()

    def begin(self, *, is_last: bool = True) -> None:
        """Starts reading for a run; the previous one and its updates have ended.

        Args:
          is_last: Whether updates take what the plan gives them.
        """
        self.stop()
        self.free_updates()
        if self.fetches:
            self._source.begin()
            self._mover.load([self._fetched(one, is_last) for one in self.fetches])

    def _fetched(self, fetch: Fetch, is_last: bool) -> _Fetched:
        unit = fetch.unit
        return _Fetched(
            (unit, fetch.last),
            num_parts=1,
            host_bytes=unit.page_bytes,
            device_bytes=unit.num_bytes if self._has_link else 0,
            is_held=is_last and fetch.gradient is not None,
            unit=unit,
            source=self._source,
            device=self._device,
        )

    def get(self, number: int, unit: Unit) -> jax.Array:
        """Returns the unit for the call of that number; blocks until it has been read.

        Raises:
          BaseException: The exception that stopped the read.
        """
        lasts = self._lasts[unit]
        key = (unit, lasts[bisect_left(lasts, number)])
        return self._mover.get(key)

    def done(self, number: int) -> None:
        """Notes that a call has run; frees units that no later call needs."""
        for key in self._ends.get(number, ()):
            self._mover.release(key)

    def take(self, unit: Unit) -> Sequence[Array] | None:
        """Returns the params of a unit whose gradient is complete, for its update.

        They are its shards, and stay until `free`. None if the update has to read them.
        """
        key = self._updates.get(unit)
        memory = None if key is None else self._mover.held(key)
        return None if memory is None else unit.views(memory)

    def free(self, unit: Unit) -> None:
        """Frees what `take` returned."""
        if unit in self._updates:
            self._mover.free(self._updates[unit])

    def free_updates(self) -> None:
        """Frees units that updates of a step have left, which was given up."""
        for unit in self._updates:
            self.free(unit)

    def stop(self) -> None:
        """Ends the reads, and frees the units; no program may be in flight.

        Units that updates take stay until these have freed them.
        """
        self._mover.reset()
        self.counts.add(self._mover.take_counts())
        self._source.close()

    @property
    def held_bytes(self) -> int:
        """Memory of the host that reads have now."""
        return self._mover.held_bytes

    def rest(self) -> None:
        """Frees the memory until the next step; no step is under way."""
        self.free_updates()
        self._mover.rest()

    def close(self) -> None:
        """Stops, and frees the memory; idempotent."""
        self.stop()
        self.free_updates()
        self._mover.close()


def make_fetcher(
    source: Source, reading: Reading, division: Division, device: Any
) -> tuple[Fetcher, int]:
    """Makes what reads params; returns it and the memory that no param needs."""
    host_bytes, device_bytes = reading.memory(division)
    if device_bytes is not None:
        return Fetcher(source, reading.fetches, device_bytes, host_bytes, device), 0
    unused_bytes = reading.room_bytes - host_bytes
    return Fetcher(source, reading.fetches, host_bytes), unused_bytes
