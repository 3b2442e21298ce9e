"""The time of a step: its calls and moves on a virtual clock.

    calls    ──F0──F1──F2──…──B2──B1──B0──►   in turn, two at a time
    values     ──w0──w1──…     ──r1──r0──     one queue for the drives
    params   ──p0──p1──p2──…                  another, read ahead as there is room

Invariant: what moves next is what `Moves` says, as in a run; a call waits as there.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from jaxinf.schedule.moves import Kind, Moves, Tensor
from jaxinf.schedule.placement import Absence

__all__ = ["NO_LOADS", "Away", "Host", "Load", "Loads", "simulate"]

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


class Load(NamedTuple):
    """A tensor that is read for calls, such as params.

    Attributes:
      first, last: The first and the last call that use it.
      end: The last call during which it is on the host, for an update.
      num_bytes: Bytes that are read.
      host_bytes: Memory of the host for it.
    """

    first: int
    last: int
    end: int
    num_bytes: int
    host_bytes: int


class Loads(NamedTuple):
    """The reads of a step, and the memory for them.

    Attributes:
      loads: The reads, in order.
      read_bytes: Memory of the host.
      device_bytes: Memory of a device with memory of its own; None if it is the host's.
    """

    loads: Sequence[Load] = ()
    read_bytes: int = 0
    device_bytes: int | None = None


NO_LOADS = Loads()
"""Those of a step whose tensors are all in memory."""


def simulate(
    call_s: Sequence[float],
    away: Sequence[Away] = (),
    host: Host | None = None,
    loads: Loads = NO_LOADS,
    rates: Mapping[Kind, float] = MappingProxyType({}),
) -> float:
    """Returns the time from the first call's start to the last one's end.

    A call starts when the one before it has ended, what must be gone is written, and
    what it reads is there.

    Args:
      call_s: Times of the calls.
      away: Tensors that leave, in the order in which they are needed.
      host: None if the device's memory is the host's.
      loads: Tensors that are read for calls.
      rates: Bandwidths of their hops, in bytes a second.
    """
    values, params = _Values(away, host), _Params(loads, rates)
    ends = [0.0, 0.0]  # of the calls before
    handed_s = 0.0
    for number, seconds in enumerate(call_s):
        handed_s = max(handed_s, ends[-2])
        if away:
            handed_s = values.end(number - 2, handed_s)
        if loads.loads:
            params.end(number - 2, handed_s)
        if away:
            handed_s = values.before(number, handed_s)
        if loads.loads:
            handed_s = params.before(number, handed_s)
        ends = [ends[-1], max(ends[-1], handed_s) + seconds]
        values.made(number, ends[-1])
    for number in (len(call_s) - 2, len(call_s) - 1) if away else ():
        ends[-1] = values.end(number, ends[-1])
    return ends[-1]


@dataclass(eq=False, slots=True)
class _Tensor(Tensor):
    seconds: Mapping[Kind, float] = field(default_factory=dict)
    ready_s: float = 0.0


class _Clock:
    """Runs moves in virtual time: each queue one at a time. Arguments as `Moves`."""

    def __init__(self, **memory: Any) -> None:
        self._now_s = 0.0
        self._free_s: defaultdict[str, float] = defaultdict(float)
        self._ends: list[tuple[float, int, _Tensor, Kind]] = []
        self._numbers = count()
        self.moves: Moves[_Tensor] = Moves(self, **memory)

    def until(self, at_s: float) -> None:
        """Runs what ends by a time, which is now then."""
        while self._ends and self._ends[0][0] <= at_s:
            self._step()
        self._now_s = max(self._now_s, at_s)

    def release(self, tensors: Iterable[_Tensor]) -> float:
        """Releases tensors; returns when nothing moves them any more."""
        for tensor in tensors:
            while tensor.num_moves:
                self._step()
            self.moves.release(tensor)
        return self._now_s

    def get(self, tensors: Iterable[_Tensor]) -> float:
        """Returns when tensors are ready."""
        for tensor in tensors:
            while not tensor.is_ready:
                self._step()
        return self._now_s

    def wait_evicted(self, tensors: Iterable[_Tensor]) -> None:
        """Waits until no tensor is in the device's memory."""
        for tensor in tensors:
            while not self.moves.is_evicted(tensor):
                self._step()

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


_ByCall: TypeAlias = dict[int, list[_Tensor]]


class _Values(_Clock):
    """Values that leave and come back, by the call at which something happens."""

    def __init__(self, away: Sequence[Away], host: Host | None) -> None:
        super().__init__(
            has_link=host is not None, way_bytes=0 if host is None else host.way_bytes
        )
        self._room = () if host is None else host.room
        self._made: _ByCall = {}
        self._ends_at: _ByCall = {}
        self._waits: tuple[_ByCall, _ByCall, _ByCall] = ({}, {}, {})
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
            self._made.setdefault(one.absence.written, []).append(tensor)
        for one, tensor in pairs:
            self._ends_at.setdefault(one.last, []).append(tensor)
            for by, number in zip(self._waits, one.absence[1:], strict=True):
                by.setdefault(number, []).append(tensor)
        if host is not None:
            self.moves.clear(tensor.key for one, tensor in pairs if one.is_on_drive)

    def end(self, number: int, at_s: float) -> float:
        """Ends a call; returns when the values that it was the last to read are."""
        self.until(at_s)
        return self.release(self._ends_at.get(number, ()))

    def before(self, number: int, at_s: float) -> float:
        """Makes ready what a call needs; returns when it may start."""
        gone, back, needed = (by.get(number, ()) for by in self._waits)
        if self._room:
            self.moves.read_bytes = self._room[number]
            self.moves.advance()
        self.wait_evicted(gone)
        for tensor in back:
            self.moves.prefetch(tensor)
        return max(at_s, self.get(needed))

    def made(self, number: int, at_s: float) -> None:
        """Lets values leave that a call has made at a time."""
        for tensor in self._made.get(number, ()):
            tensor.ready_s = at_s
            self.moves.evict(tensor)


class _Params(_Clock):
    """Tensors that are read for calls, by the calls that need and end them."""

    def __init__(self, loads: Loads, rates: Mapping[Kind, float]) -> None:
        has_link = loads.device_bytes is not None
        super().__init__(
            has_link=has_link,
            read_bytes=loads.read_bytes,
            device_bytes=loads.device_bytes or 0,
        )
        self._needed: _ByCall = {}
        self._last: _ByCall = {}
        self._held: _ByCall = {}
        tensors = []
        for key, one in enumerate(loads.loads):
            tensor = _Tensor(
                key,
                1,
                one.host_bytes,
                device_bytes=one.num_bytes if has_link else 0,
                is_held=one.end > one.last,
                seconds={kind: one.num_bytes / rate for kind, rate in rates.items()},
            )
            tensors.append(tensor)
            self._needed.setdefault(one.first, []).append(tensor)
            self._last.setdefault(one.last, []).append(tensor)
            if tensor.is_held:
                self._held.setdefault(one.end, []).append(tensor)
        self.moves.load(tensors)

    def end(self, number: int, at_s: float) -> None:
        """Ends a call; frees what it was the last to use."""
        self.until(at_s)
        self.release(self._last.get(number, ()))
        for tensor in self._held.get(number, ()):
            self.moves.free(tensor)

    def before(self, number: int, at_s: float) -> float:
        """Returns when a call may start: what it reads is there."""
        needed = self._needed.get(number)
        return max(at_s, self.get(needed)) if needed else at_s
