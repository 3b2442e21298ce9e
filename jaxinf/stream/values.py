"""The values of a step between the calls that make and read them.

    call a makes v ─► … ─► written ─► gone … back ─► call b reads v
                              memory is free in between

Invariant: a value that was on a drive has the bits that it left with, unless the calls
give it a form in fewer bits.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxinf.activations import Cache, CacheCounts, Scratch
from jaxinf.stream.calls import Calls, Slot
from jaxinf.typing import Array

__all__ = ["Offloaded", "Values"]


class Values:
    """All values are in memory. Used from one thread.

    Attributes:
      num_bytes: Bytes that are written to drives in a step, and read again.
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


class Offloaded(Values):
    """Some values are on a drive for a part of the step, as the calls' absences say.

    Args:
      calls: The calls of a step.
      scratch: Files for the values; closed with this.

    Attributes:
      num_bytes: As for `Values`.
      cache: The values on their way.
    """

    def __init__(self, calls: Calls, scratch: Scratch) -> None:
        super().__init__()
        self._scratch = scratch
        absences = calls.absences
        self._absences = absences
        self._lives = {slot: calls.lives[slot] for slot in absences}
        scratch.reset()
        places = {
            slot: scratch.allocate(
                calls.lives[slot].num_bytes, calls.coding(slot, one.needed)
            )
            for slot, one in absences.items()
        }
        scratch.reserve()
        self.num_bytes = sum(place.num_bytes for place in places.values())
        sizes = {slot: place.memory_bytes for slot, place in places.items()}
        ends = {slot: calls.lives[slot].reads[-1] for slot in absences}
        self.cache = Cache(scratch, places, _most_back(calls, sizes))
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
        return self._array(slot, *self.cache.look(slot))

    def before(self, number: int) -> None:
        """Waits for values that must be gone, and starts to read others."""
        for slot in self._gone.get(number, ()):
            self.cache.gone(slot)
            del self._held[slot]
            self._away.add(slot)
            self._count(-self._lives[slot].num_bytes)
        for slot in self._back.get(number, ()):
            self.cache.bring(slot)
            self._count(self._lives[slot].num_bytes)

    def after(self, number: int, drops: Sequence[Slot]) -> None:
        """Drops values, and starts to write others, which may still be read."""
        super().after(number, drops)
        for slot in self._writes.get(number, ()):
            self.cache.leave(slot, self._held[slot])

    def done(self, number: int) -> None:
        """Frees memory that the call of that number was the last to read."""
        super().done(number)
        for slot in self._ends.get(number, ()):
            self._away.discard(slot)
            self.cache.release(slot)

    def reset(self) -> None:
        """Drops everything; blocks until no transfer is under way."""
        super().reset()
        self._away.clear()
        self.cache.reset()

    def counts(self) -> CacheCounts:
        """Returns the traffic of values since the last call."""
        return self.cache.take_counts()

    def close(self) -> None:
        """Frees memory and ends the threads; idempotent."""
        super().close()
        self.cache.close()
        self._scratch.close()

    def _taken(self, slot: Slot) -> jax.Array:
        return self._array(slot, *self.cache.take(slot))

    def _array(self, slot: Slot, raw: Array | None, value: Any) -> jax.Array:
        if raw is None:
            return value
        life = self._lives[slot]
        aval = life.aval
        array = raw[: life.num_bytes].view(aval.dtype).reshape(aval.shape)
        return jax.device_put(array)


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
