"""The values of a step between the calls that make and read them.

    call a makes v ─► … ─► written ─► gone … back ─► call b reads v
                              memory is free in between

Where the device has memory of its own, a value is gone when the host has it.

Invariant: a value that was away has the bits that it left with, unless the calls
give it a form in fewer bits.
"""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxinf.streaming.move.cache import Cache, CacheCounts
from jaxinf.streaming.move.scratch import Place, Scratch
from jaxinf.streaming.move.tiered_cache import TieredCache
from jaxinf.streaming.plan.calls import Calls, Slot
from jaxinf.streaming.plan.tiers import Tiers
from jaxinf.typing import Array

__all__ = ["Offloaded", "Tiered", "Values"]


class Values:
    """All values are in memory. Used from one thread.

    Attributes:
      num_bytes: Bytes that are written to drives in a step, and read again; at most, as
        a value that is still on its way out comes back from memory.
      peak_bytes: Most bytes of values in memory in the last step.
    """

    num_bytes = 0

    def __init__(self) -> None:
        self._held: dict[Slot, jax.Array] = {}
        self._dropped_bytes: dict[int, int] = {}
        self._now_bytes = self._most_bytes = self.peak_bytes = 0

    def __getitem__(self, slot: Slot) -> jax.Array:
        return self._held[slot]

    def look(self, slot: Slot) -> jax.Array | None:
        """Returns a value that is here or can be read, else None; blocks.

        Raises:
          StoreIOError: The drive failed.
        """
        return self._held.get(slot)

    def give(self, slot: Slot, value: jax.Array) -> None:
        """Takes a value in place of one that could not be read."""
        self._held[slot] = value

    def before(self, number: int) -> None:
        """Makes ready what the call of that number needs; may block."""

    def put(self, slots: Sequence[Slot | None], outputs: Sequence[jax.Array]) -> None:
        """Takes a call's outputs, those that have a slot."""
        for slot, output in zip(slots, outputs, strict=True):
            if slot is not None:
                self._held[slot] = output
                self._count(output.nbytes)

    def after(self, number: int, drops: Sequence[Slot]) -> None:
        """Drops what no call after that of this number reads."""
        dropped = [self._held.pop(slot) for slot in drops]
        self._dropped_bytes[number] = sum(value.nbytes for value in dropped)

    def done(self, number: int) -> None:
        """Notes that a call has run and reads nothing more."""
        self._count(-self._dropped_bytes.pop(number))

    def reset(self) -> None:
        """Drops everything; no call may be under way."""
        self._held.clear()
        self._dropped_bytes.clear()
        if self._most_bytes:  # else it was reset before
            self.peak_bytes, self._most_bytes = self._most_bytes, 0
        self._now_bytes = 0

    def _count(self, num_bytes: int) -> None:
        self._now_bytes += num_bytes
        self._most_bytes = max(self._most_bytes, self._now_bytes)

    def counts(self) -> CacheCounts:
        """Returns the traffic of values since the last call."""
        return CacheCounts()

    def close(self) -> None:
        """Frees memory and files; idempotent."""
        self.reset()


class _Absent(Values):
    """Some values are elsewhere for a part of the step, as the calls' absences say.

    Args:
      calls: The calls of a step.
      scratch: Files for values on drives; closed with this.
      places: Places of the values on drives.
      cache: The values on their way; closed with this.

    Attributes:
      num_bytes: As for `Values`.
    """

    def __init__(
        self,
        calls: Calls,
        scratch: Scratch,
        places: Mapping[Slot, Place],
        cache: Cache | TieredCache,
    ) -> None:
        super().__init__()
        self._scratch = scratch
        self._cache = cache
        absences = calls.absences
        self._lives = {slot: calls.lives[slot] for slot in absences}
        self.num_bytes = sum(place.num_bytes for place in places.values())
        ends = {slot: calls.lives[slot].reads[-1] for slot in absences}
        in_order = sorted(absences.items(), key=lambda item: item[1].needed)
        first_gone = sorted(in_order, key=lambda item: item[1].gone)
        self._writes = _by_call((s, one.written) for s, one in first_gone)
        self._gone = _by_call((s, one.gone) for s, one in in_order)
        self._back = _by_call((s, one.back) for s, one in in_order)
        self._ends = _by_call(ends.items())
        self._away: set[Slot] = set()

    def __getitem__(self, slot: Slot) -> jax.Array:
        if slot in self._away and slot not in self._held:
            self._held[slot] = self._taken(slot)
        return self._held[slot]

    def look(self, slot: Slot) -> jax.Array | None:
        """As `Values.look`."""
        if slot in self._held or slot not in self._away:
            return self._held.get(slot)
        return self._looked(slot)

    def before(self, number: int) -> None:
        """Waits for values that must be gone, and lets others come back."""
        for slot in self._gone.get(number, ()):
            self._cache.gone(slot)
            del self._held[slot]
            self._away.add(slot)
            self._count(-self._lives[slot].num_bytes)
        for slot in self._back.get(number, ()):
            self._cache.bring(slot)
            self._count(self._lives[slot].num_bytes)

    def after(self, number: int, drops: Sequence[Slot]) -> None:
        """Drops values, and lets others leave, which may still be read."""
        super().after(number, drops)
        for slot in self._writes.get(number, ()):
            self._cache.leave(slot, self._held[slot])

    def done(self, number: int) -> None:
        """Frees memory that the call of that number was the last to read."""
        super().done(number)
        for slot in self._ends.get(number, ()):
            self._away.discard(slot)
            self._cache.release(slot)

    def reset(self) -> None:
        """Drops everything; blocks until no transfer is under way."""
        super().reset()
        self._away.clear()
        self._cache.reset()

    def counts(self) -> CacheCounts:
        """Returns the traffic of values since the last call."""
        return self._cache.take_counts()

    def close(self) -> None:
        """Frees memory and ends the threads; idempotent."""
        super().close()
        self._cache.close()
        self._scratch.close()

    @abstractmethod
    def _taken(self, slot: Slot) -> jax.Array:
        """Returns a value that has been brought back; blocks."""

    @abstractmethod
    def _looked(self, slot: Slot) -> jax.Array:
        """Returns a value that is gone, whether it has been brought back or not."""


class Offloaded(_Absent):
    """Values leave the host's memory, which is the device's, for drives.

    Args:
      calls: The calls of a step.
      scratch: Files for the values; closed with this.
    """

    def __init__(self, calls: Calls, scratch: Scratch) -> None:
        places = _placed(calls, scratch, calls.absences)
        sizes = {slot: place.memory_bytes for slot, place in places.items()}
        self._drives = Cache(scratch, places, _most_back(calls, sizes))
        super().__init__(calls, scratch, places, self._drives)

    def _taken(self, slot: Slot) -> jax.Array:
        return self._array(slot, *self._drives.take(slot))

    def _looked(self, slot: Slot) -> jax.Array:
        return self._array(slot, *self._drives.look(slot))

    def _array(self, slot: Slot, raw: Array | None, value: Any) -> jax.Array:
        if raw is None:
            return value
        life = self._lives[slot]
        aval = life.aval
        array = raw[: life.num_bytes].view(aval.dtype).reshape(aval.shape)
        return jax.device_put(array)


class Tiered(_Absent):
    """Values leave a device with memory of its own for the host, and some for drives.

    Args:
      calls: The calls of a step.
      scratch: Files for the values; closed with this.
      tiers: Where each waits, and memory of the host.
    """

    def __init__(self, calls: Calls, scratch: Scratch, tiers: Tiers) -> None:
        assert tiers.fits, "the host has room"
        places = _placed(calls, scratch, tiers.on_drive)
        self._tiers = TieredCache(
            scratch,
            {slot: calls.lives[slot].aval for slot in calls.absences},
            places,
            tiers.leaving_bytes,
            tiers.buffer_bytes,
        )
        self._room = tiers.room
        super().__init__(calls, scratch, places, self._tiers)

    def before(self, number: int) -> None:
        """Waits for values that must be gone, and lets others come back."""
        if self._room:
            self._tiers.advance(self._room[number])
        super().before(number)

    def _taken(self, slot: Slot) -> jax.Array:
        return self._tiers.take(slot)

    def _looked(self, slot: Slot) -> jax.Array:
        return self._tiers.look(slot)


def _placed(
    calls: Calls, scratch: Scratch, slots: Iterable[Slot]
) -> Mapping[Slot, Place]:
    """Takes room on drives for values."""
    scratch.reset()
    places: dict[Slot, Place] = {}
    for slot in slots:
        coding = calls.coding(slot, calls.absences[slot].needed)
        places[slot] = scratch.allocate(calls.lives[slot].num_bytes, coding)
    scratch.reserve()
    return places


def _by_call(pairs: Iterable[tuple[Slot, int]]) -> Mapping[int, list[Slot]]:
    found: defaultdict[int, list[Slot]] = defaultdict(list)
    for slot, number in pairs:
        found[number].append(slot)
    return found


def _most_back(calls: Calls, sizes: Mapping[Slot, int]) -> int:
    """The most memory, in whole pages, of values that have come back."""
    change = [0] * (len(calls.calls) + 3)
    for slot, absence in calls.absences.items():
        change[absence.back] += sizes[slot]
        change[calls.lives[slot].reads[-1] + 2] -= sizes[slot]
    peak = held = 0
    for delta in change:
        held += delta
        peak = max(peak, held)
    return peak
