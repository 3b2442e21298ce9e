"""The time of a step: its calls and moves on a virtual clock.

    calls    ──F0──F1──F2──…──B2──B1──B0──►   in turn, two at a time
    values     ──w0──w1──…     ──r1──r0──     one queue for the drives
    params   ──p0──p1──p2──…                  another, read ahead

Invariant: what moves next is what `Moves` says, as in a run; a call waits as there.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from jaxinf.schedule.moves import Kind, Moves, Tensor
from jaxinf.schedule.placement import Absence

__all__ = ["Away", "Host", "simulate"]

# Params are read while two calls are in flight, and for the next.
_READ_AHEAD = 3
_QUEUES: Mapping[Kind, str] = {"out": "out", "back": "back"}


class Away(NamedTuple):
    """A tensor that is not in the device's memory for a time.

    Attributes:
      absence: The calls.
      last: The last call that reads it.
      seconds: Times of its moves.
      num_bytes: Memory of the host for it, in whole pages.
      way_bytes: Memory of the host that it takes on its way to drives.
      is_on_drive: Whether it goes on to drives.
    """

    absence: Absence
    last: int
    seconds: Mapping[Kind, float]
    num_bytes: int = 0
    way_bytes: int = 0
    is_on_drive: bool = True


class Host(NamedTuple):
    """Memory of the host beside a device with memory of its own.

    Attributes:
      way_bytes: For tensors on their way to drives.
      room: Before each call, bytes for tensors that are read ahead.
    """

    way_bytes: int
    room: Sequence[int]


def simulate(
    call_s: Sequence[float],
    away: Sequence[Away],
    read_s: Mapping[int, float],
    host: Host | None = None,
) -> float:
    """Returns the time from the first call's start to the last one's end.

    A call starts when the one before it has ended, what must be gone is written, and
    what it reads is there.

    Args:
      call_s: Times of the calls.
      away: Tensors that leave, in the order in which they are needed.
      read_s: Times of reads of params for a call, by its number.
      host: None if the device's memory is the host's.
    """
    events = _Events(away)
    clock = _Clock(host, events.order)
    ends = [0.0] * _READ_AHEAD  # of the calls before, the last one last
    handed_s = params_s = 0.0
    for number, seconds in enumerate(call_s):
        handed_s = max(handed_s, ends[-2])
        if away:
            handed_s = clock.end(handed_s, events.ends.get(number - 2, ()))
            waits = (by.get(number, ()) for by in events.waits)
            handed_s = clock.before(number, *waits)
        began_s = max(ends[-1], handed_s)
        if number in read_s:
            params_s = max(params_s, ends[0]) + read_s[number]
            began_s = max(began_s, params_s)
        ends = [*ends[1:], began_s + seconds]
        for tensor in events.written.get(number, ()):
            tensor.ready_s = ends[-1]
            clock.moves.evict(tensor)
    for number in (len(call_s) - 2, len(call_s) - 1) if away else ():
        ends[-1] = clock.end(ends[-1], events.ends.get(number, ()))
    return ends[-1]


@dataclass(eq=False)
class _Tensor(Tensor):
    seconds: Mapping[Kind, float] = field(default_factory=dict)
    ready_s: float = 0.0


class _Clock:
    """Runs moves in virtual time: each queue one at a time."""

    def __init__(self, host: Host | None, order: Sequence[Hashable]) -> None:
        self._host = host
        self._now_s = 0.0
        self._free_s: defaultdict[str, float] = defaultdict(float)
        self._ends: list[tuple[float, int, _Tensor, Kind]] = []
        self._numbers = count()
        self.moves: Moves[_Tensor] = Moves(
            self,
            has_link=host is not None,
            way_bytes=0 if host is None else host.way_bytes,
        )
        self.moves.clear(order if host else ())

    def end(self, at_s: float, over: Sequence[_Tensor]) -> float:
        """Releases tensors at a time; returns when nothing moves them any more."""
        while self._ends and self._ends[0][0] <= at_s:
            self._step()
        self._now_s = max(self._now_s, at_s)
        for tensor in over:
            while tensor.num_moves:
                self._step()
            self.moves.release(tensor)
        return self._now_s

    def before(
        self,
        number: int,
        gone: Sequence[_Tensor],
        back: Sequence[_Tensor],
        needed: Sequence[_Tensor],
    ) -> float:
        """Makes ready what a call needs; returns when it may start."""
        moves = self.moves
        if self._host is not None and self._host.room:
            moves.read_bytes = self._host.room[number]
            moves.advance()
        for tensor in gone:
            while not moves.is_evicted(tensor):
                self._step()
        for tensor in back:
            moves.prefetch(tensor)
        for tensor in needed:
            while not tensor.is_ready:
                self._step()
        return self._now_s

    def _step(self) -> None:
        self._now_s, _, tensor, kind = heappop(self._ends)
        self.moves.ended(tensor, kind, True, None)

    # --- as the executor of `Moves` --------------------------------------------------

    def start(self, tensor: _Tensor, kind: Kind, part: int) -> None:
        """As `Executor.start`."""
        queue = _QUEUES.get(kind, "drive")
        end_s = max(self._free_s[queue], self._now_s, tensor.ready_s)
        end_s += tensor.seconds[kind]
        self._free_s[queue] = end_s
        heappush(self._ends, (end_s, next(self._numbers), tensor, kind))

    def allocate(self, tensor: _Tensor) -> Any:
        """As `Executor.allocate`."""
        return True

    def free_memory(self, memory: Any) -> None:
        """As `Executor.free_memory`."""


class _Events:
    """Tensors by the call at which something happens."""

    def __init__(self, away: Sequence[Away]) -> None:
        self.written: dict[int, list[_Tensor]] = {}
        self.ends: dict[int, list[_Tensor]] = {}
        self.waits: tuple[dict[int, list[_Tensor]], ...] = ({}, {}, {})
        pairs = [
            (
                one,
                _Tensor(
                    number,
                    int(one.is_on_drive),
                    one.num_bytes,
                    one.way_bytes,
                    value=True,
                    seconds=one.seconds,
                ),
            )
            for number, one in enumerate(away)
        ]
        for one, tensor in sorted(pairs, key=lambda pair: pair[0].absence.gone):
            self.written.setdefault(one.absence.written, []).append(tensor)
        for one, tensor in pairs:
            self.ends.setdefault(one.last, []).append(tensor)
            for by, number in zip(self.waits, one.absence[1:], strict=True):
                by.setdefault(number, []).append(tensor)
        self.order = [tensor.key for one, tensor in pairs if one.is_on_drive]
