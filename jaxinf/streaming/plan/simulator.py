"""The time of a step, simulated from measured times and bandwidths.

    calls    ──F0──F1──F2──…──B2──B1──B0──►   in turn
    values     ──w0──w1──…     ──r1──r0──     one queue for the drives
    params   ──p0──p1──p2──…                  another, read ahead

Where the device has memory of its own, values have a queue out to the host before that
of the drives, and one back to the device after it.

Invariant: a call waits as in `move.values` and `move.fetch`.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxinf.streaming.plan.calls import Absence, Calls, Slot
from jaxinf.streaming.plan.tiers import NUM_COPIES, Tiers

__all__ = ["Profile", "simulate"]

# Params are read while two calls are in flight, and for the next.
_READ_AHEAD = 3


@dataclass(frozen=True)
class Profile:
    """Measured times and bandwidths, those of drives beside a running step.

    Attributes:
      seconds: Time of a call by its program's key, beside transfers of values.
      alone: The same without such transfers; None if it is not known.
      num_parts: Number of times that the calls run in a step.
      write, read: Bandwidth for values that leave and come back, in bytes a second.
      params: Bandwidth for params.
      outside_s: Time of a step before its first call and after its last one.
      out, back: Bandwidth between host and device, if that has memory of its own.
    """

    seconds: Mapping[str, float]
    write: float
    read: float
    params: float = math.inf
    outside_s: float = 0.0
    alone: Mapping[str, float] | None = None
    num_parts: int = 1
    out: float = math.inf
    back: float = math.inf

    def seconds_of(self, calls: Calls) -> Mapping[str, float]:
        """Times of programs in given calls: some of their values leave, or none."""
        if calls.absences or self.alone is None:
            return self.seconds
        return self.alone


def simulate(
    calls: Calls,
    profile: Profile,
    fetched: Mapping[int, int] | None = None,
    tiers: Tiers | None = None,
) -> float:
    """Returns the time of a step.

    A call starts when the one before it has ended, what must be gone is written, and
    what it reads is back.

    Args:
      calls: The calls, with absences.
      profile: Measured times.
      fetched: Bytes of params that are read for a call, by its number.
      tiers: Where values wait; None if the device's memory is the host's.
    """
    ways = _Drives(calls, profile) if tiers is None else _Ways(calls, profile, tiers)
    events, fetched, seconds = _events(calls), fetched or {}, profile.seconds_of(calls)
    written: dict[Slot, float] = {}
    back: dict[Slot, float] = {}
    ends = [0.0] * _READ_AHEAD  # of the calls before, the last one last
    handed_s = params_s = 0.0
    for number, call in enumerate(calls.calls):
        for slot in events.writes.get(number - 2, ()):
            written[slot] = ways.leave(slot, ends[-2])
        waits = [written[slot] for slot in events.gone.get(number, ())]
        handed_s = max(handed_s, ends[-2], *waits) if waits else max(handed_s, ends[-2])
        for slot in events.back.get(number, ()):
            back[slot] = ways.bring(slot, handed_s)
        ready = [back[slot] for slot in events.needed.get(number, ())]
        if number in fetched:
            params_s = max(params_s, ends[0]) + fetched[number] / profile.params
            ready.append(params_s)
        began_s = max([ends[-1], handed_s, *ready])
        ends = [*ends[1:], began_s + seconds[call.program.key]]
    return profile.num_parts * ends[-1] + profile.outside_s


class _Drives:
    """The way of values to the drives and back: one queue."""

    def __init__(self, calls: Calls, profile: Profile) -> None:
        self._profile = profile
        self._stored = {
            slot: calls.stored_bytes(slot, one.needed)
            for slot, one in calls.absences.items()
        }
        self._drive_s = 0.0

    def leave(self, slot: Slot, at_s: float) -> float:
        """Returns when a value is gone that may leave at a time."""
        return self._move(at_s, self._stored[slot] / self._profile.write)

    def bring(self, slot: Slot, at_s: float) -> float:
        """Returns when a value is back whose memory is there at a time."""
        return self._move(at_s, self._stored[slot] / self._profile.read)

    def _move(self, at_s: float, seconds: float) -> float:
        self._drive_s = max(self._drive_s, at_s) + seconds
        return self._drive_s


class _Ways(_Drives):
    """The way out to the host, to the drives, from there, and back: three queues.

    What waits on the host for either limits what comes after it.
    """

    def __init__(self, calls: Calls, profile: Profile, tiers: Tiers) -> None:
        super().__init__(calls, profile)
        self._sizes = {slot: calls.lives[slot].num_bytes for slot in calls.absences}
        self._on_drive = set(tiers.on_drive)
        self._leaving = _Room(tiers.leaving_bytes // NUM_COPIES)
        self._ahead = _Room(tiers.buffer_bytes)
        self._written: dict[Slot, float] = {}
        self._out_s = self._back_s = 0.0

    def leave(self, slot: Slot, at_s: float) -> float:
        """As `_Drives.leave`."""
        size, is_on_drive = self._sizes[slot], slot in self._on_drive
        room_s = self._leaving.free_s(size) if is_on_drive else 0.0
        self._out_s = max(self._out_s, at_s, room_s) + size / self._profile.out
        if is_on_drive:
            self._written[slot] = super().leave(slot, self._out_s)
            self._leaving.take(size, self._written[slot])
        return self._out_s

    def bring(self, slot: Slot, at_s: float) -> float:
        """As `_Drives.bring`."""
        size, read_s = self._sizes[slot], 0.0
        if slot in self._on_drive:
            room_s = self._ahead.free_s(size)
            read_s = super().bring(slot, max(self._written[slot], room_s))
        self._back_s = max(self._back_s, at_s, read_s) + size / self._profile.back
        if slot in self._on_drive:
            self._ahead.take(size, self._back_s)
        return self._back_s


class _Room:
    """Memory that is taken and freed in turn."""

    def __init__(self, capacity_bytes: int) -> None:
        self._free_bytes = capacity_bytes
        self._taken: deque[tuple[int, float]] = deque()

    def free_s(self, num_bytes: int) -> float:
        """Returns when there is room."""
        found = 0.0
        while self._taken and self._free_bytes < num_bytes:
            freed, found = self._taken.popleft()
            self._free_bytes += freed
        return found

    def take(self, num_bytes: int, until_s: float) -> None:
        """Takes memory until a time."""
        self._free_bytes -= num_bytes
        self._taken.append((num_bytes, until_s))


@dataclass(frozen=True)
class _Events:
    """Values by the call at which something happens."""

    writes: Mapping[int, list[Slot]]
    gone: Mapping[int, list[Slot]]
    back: Mapping[int, list[Slot]]
    needed: Mapping[int, list[Slot]]


def _events(calls: Calls) -> _Events:
    in_order = sorted(calls.absences.items(), key=lambda item: item[1].needed)

    def by(
        number: Callable[[Absence], int], order: Callable[[Absence], int] = lambda _: 0
    ) -> Mapping[int, list[Slot]]:
        found: defaultdict[int, list[Slot]] = defaultdict(list)
        for slot, absence in sorted(in_order, key=lambda item: order(item[1])):
            found[number(absence)].append(slot)
        return found

    return _Events(
        by(lambda one: one.written, lambda one: one.gone),
        by(lambda one: one.gone),
        by(lambda one: one.back),
        by(lambda one: one.needed),
    )
