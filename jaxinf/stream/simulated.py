"""The time of a step, simulated from measured times and bandwidths.

    calls    ──F0──F1──F2──…──B2──B1──B0──►   in turn
    values     ──w0──w1──…     ──r1──r0──     one queue for the drives
    params   ──p0──p1──p2──…                  another, read ahead

Invariant: a call waits as in `jaxinf.stream.values` and `jaxinf.stream.fetch`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxinf.stream.calls import Absence, Calls, Slot

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
    """

    seconds: Mapping[str, float]
    write: float
    read: float
    params: float = math.inf
    outside_s: float = 0.0
    alone: Mapping[str, float] | None = None
    num_parts: int = 1

    def seconds_of(self, calls: Calls) -> Mapping[str, float]:
        """Times of programs in given calls: some of their values leave, or none."""
        if calls.absences or self.alone is None:
            return self.seconds
        return self.alone


def simulate(
    calls: Calls, profile: Profile, fetched: Mapping[int, int] | None = None
) -> float:
    """Returns the time of a step.

    A call starts when the one before it has ended, what must be gone is written, and
    what it reads is back.

    Args:
      calls: The calls, with absences.
      profile: Measured times.
      fetched: Bytes of params that are read for a call, by its number.
    """
    events, fetched, seconds = _events(calls), fetched or {}, profile.seconds_of(calls)
    written: dict[Slot, float] = {}
    back: dict[Slot, float] = {}
    ends = [0.0] * _READ_AHEAD  # of the calls before, the last one last
    drive_s = handed_s = params_s = 0.0
    for number, call in enumerate(calls.calls):
        for slot in events.writes.get(number - 2, ()):
            drive_s = max(drive_s, ends[-2]) + events.bytes[slot] / profile.write
            written[slot] = drive_s
        waits = [written[slot] for slot in events.gone.get(number, ())]
        handed_s = max(handed_s, ends[-2], *waits) if waits else max(handed_s, ends[-2])
        for slot in events.back.get(number, ()):
            drive_s = max(drive_s, handed_s) + events.bytes[slot] / profile.read
            back[slot] = drive_s
        ready = [back[slot] for slot in events.needed.get(number, ())]
        if number in fetched:
            params_s = max(params_s, ends[0]) + fetched[number] / profile.params
            ready.append(params_s)
        began_s = max([ends[-1], handed_s, *ready])
        ends = [*ends[1:], began_s + seconds[call.program.key]]
    return profile.num_parts * ends[-1] + profile.outside_s


@dataclass(frozen=True)
class _Events:
    """Bytes of values on drives; values by the call at which something happens."""

    bytes: Mapping[Slot, int]
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
        {slot: calls.stored_bytes(slot, one.needed) for slot, one in in_order},
        by(lambda one: one.written, lambda one: one.gone),
        by(lambda one: one.gone),
        by(lambda one: one.back),
        by(lambda one: one.needed),
    )
