"""The time of a step: its calls and moves on a virtual clock.

    calls    ──F0──F1──F2──…──B2──B1──B0──►   in turn, two at a time
    values     ──w0──w1──…     ──r1──r0──     one queue for the drives
    params   ──p0──p1──p2──…                  another, read ahead as there is room
    gradients              ──…──w1──w0──r…    a third, read after the last call

Invariant: what moves next is what `Moves` says, as in a run; a call waits as there.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from jaxinf.schedule.clock import Clock
from jaxinf.schedule.moves import Kind, Moves, Tensor
from jaxinf.schedule.placement import Eviction

Event: TypeAlias = Callable[[], object]
"""What happens at the end of a task."""

_QUEUES: Mapping[Kind, str] = {"out": "out", "back": "back"}


class Trip(NamedTuple):
    """The way of a tensor to the device, and before that away from it.

    Attributes:
      first, last: The first and the last call that read it there; the number of calls
        for what comes after them.
      num_bytes: Bytes that are copied to the device, and from it.
      stored_bytes: Bytes that are read from drives, and written.
      host_bytes: Memory of the host for it when it has been read.
      way_bytes: Memory of the host that it takes on its way to drives.
      eviction: The calls without it, if a call makes it; None if drives have it, and it
        comes as early as there is room.
      held: The last call during which it is on the host, for an update.
      is_on_drive: Whether it goes to drives, or comes from there.
      num_moves: Reads of it from drives, and writes there.
      drive_bytes: Of the stored bytes, those on each drive; empty for equal parts.
    """

    first: int
    last: int
    num_bytes: int
    stored_bytes: int
    host_bytes: int = 0
    way_bytes: int = 0
    eviction: Eviction | None = None
    held: int = -1
    is_on_drive: bool = True
    num_moves: int = 1
    drive_bytes: Sequence[int] = ()


class Trips(NamedTuple):
    """Tensors that move through the same queues, and the memory for them.

    Attributes:
      trips: Those of a step, in the order in which they are needed.
      rates: Bandwidths of their hops, in bytes a second.
      has_link: Whether the device has memory of its own.
      way_bytes: Memory of the host for tensors on their way to drives.
      read_bytes: Memory of the host for those read ahead.
      device_bytes: Memory of such a device for those without an eviction.
      room: Before each call, `read_bytes` from then on; empty if it stays the same.
      move_s: Time of each read or write on drives beside that of its bytes.
      in_turn: Hops on which a tensor waits for the one before, whatever drive has it.
    """

    trips: Sequence[Trip]
    rates: Mapping[Kind, float]
    has_link: bool = False
    way_bytes: int = 0
    read_bytes: int = 0
    device_bytes: int = 0
    room: Sequence[int] = ()
    move_s: float = 0.0
    drives: Sequence[str] = ("drive",)
    in_turn: Container[Kind] = ()


class Beside(Protocol):
    """What happens beside calls, which may wait for it."""

    def end(self, number: int, at_s: float) -> float:
        """Notes that a call ended at a time; returns when the next may begin."""
        ...

    def before(self, number: int, at_s: float) -> float:
        """Makes ready what a call needs; returns when it may start."""
        ...

    def made(self, number: int, at_s: float) -> None:
        """Notes that a call will have ended at a time."""
        ...


def simulate(call_s: Sequence[float], *moved: Trips) -> float:
    """Returns the time from the first call's start to the end of the last one.

    A call starts when the one before it has ended, what must be gone is written, and
    what it reads is there. What is needed after the last call comes back then.

    Args:
      moved: Tensors that move, those with queues of their own apart.
    """
    beside = [Moving(one, Clock()) for one in moved if one.trips]
    return run_calls(call_s, beside, lambda ready_s, seconds: ready_s + seconds)


def run_calls(
    call_s: Sequence[float],
    beside: Sequence[Beside],
    run: Callable[[float, float], float],
    begin_s: float = 0.0,
) -> float:
    """Returns when the last call has ended, and what is needed after it is there.

    Args:
      run: Takes the time at which a call can start, and its own time; returns its end.
      begin_s: When the first call may start.
    """
    ends = [begin_s, begin_s]  # of the calls before
    handed_s = begin_s
    for number, seconds in enumerate(call_s):
        handed_s = max(handed_s, ends[-2])
        for one in beside:
            handed_s = one.end(number - 2, handed_s)
        for one in beside:
            handed_s = one.before(number, handed_s)
        ends = [ends[-1], run(max(ends[-1], handed_s), seconds)]
        for one in beside:
            one.made(number, ends[-1])
    end_s, num_calls = ends[-1], len(call_s)
    for one in beside:
        for number in (num_calls - 2, num_calls - 1):
            end_s = one.end(number, end_s)
        end_s = one.before(num_calls, end_s)
    return end_s


@dataclass(eq=False, slots=True)
class _Tensor(Tensor):
    seconds: Mapping[Kind, float] = field(default_factory=dict)
    parts: Sequence[tuple[str, float]] = ()  # drives, and their parts of a mean one's


_ByCall: TypeAlias = defaultdict[int, list[_Tensor]]


class Moving:
    """Runs moves in virtual time: each queue one at a time."""

    def __init__(self, moved: Trips, clock: Clock[Event]) -> None:
        self._clock, self._drives = clock, moved.drives
        self._room, self._in_turn = moved.room, moved.in_turn
        self._line: deque[tuple[_Tensor, Kind]] = deque()
        self._moves: Moves[_Tensor] = Moves(
            self,
            has_link=moved.has_link,
            way_bytes=moved.way_bytes,
            read_bytes=moved.read_bytes,
            device_bytes=moved.device_bytes,
        )
        # By the number of the call at which something happens.
        by_call: list[_ByCall] = [defaultdict(list) for _ in range(6)]
        self._made, self._gone, self._back, self._needed, self._last, self._held = (
            by_call
        )
        tensors = [_tensor(key, one, moved) for key, one in enumerate(moved.trips)]
        pairs = list(zip(moved.trips, tensors, strict=True))
        for one, tensor in pairs:
            self._needed[one.first].append(tensor)
            self._last[one.last].append(tensor)
            if one.eviction is not None:
                self._gone[one.eviction.gone].append(tensor)
                self._back[one.eviction.back].append(tensor)
            if tensor.is_held:
                self._held[one.held].append(tensor)
        away = [(one.eviction, tensor) for one, tensor in pairs if one.eviction]
        for eviction, tensor in sorted(away, key=lambda pair: pair[0].gone):
            self._made[eviction.written].append(tensor)
        if moved.has_link:
            self._moves.clear(tensor.key for _, tensor in away if tensor.num_parts)
        self._moves.load(tensor for one, tensor in pairs if not one.eviction)

    def end(self, number: int, at_s: float) -> float:
        self._clock.run_until(at_s)
        for tensor in self._last.get(number, ()):
            while tensor.num_moves:
                self._clock.end()()
            self._moves.release(tensor)
        for tensor in self._held.get(number, ()):
            self._moves.free(tensor)
        return self._clock.now_s

    def before(self, number: int, at_s: float) -> float:
        if number < len(self._room):
            self._moves.read_bytes = self._room[number]
            self._moves.advance()
        for tensor in self._gone.get(number, ()):
            while not self._moves.is_evicted(tensor):
                self._clock.end()()
        for tensor in self._back.get(number, ()):
            self._moves.prefetch(tensor)
        for tensor in self._needed.get(number, ()):
            while not tensor.is_ready:
                self._clock.end()()
        return max(at_s, self._clock.now_s)

    def made(self, number: int, at_s: float) -> None:
        for tensor in self._made.get(number, ()):
            self._clock.at(at_s, partial(self._moves.evict, tensor))

    # --- as the executor of `Moves` --------------------------------------------------

    def start(self, tensor: _Tensor, kind: Kind, part: int) -> None:
        seconds = tensor.seconds[kind]
        ended = partial(self._moves.ended, tensor, kind, True, None)
        if kind in _QUEUES:
            self._clock.start(_QUEUES[kind], seconds, ended)
            return
        if kind in self._in_turn:
            self._line.append((tensor, kind))
            if len(self._line) == 1:
                self._start_parts(tensor, kind, self._next_in_turn)
            return
        if tensor.parts:
            self._start_parts(tensor, kind, ended)
            return
        *others, last = sorted(self._drives, key=self._clock.free_s)
        for drive in others:
            self._clock.start(drive, seconds, nothing)
        self._clock.start(last, seconds, ended)

    def _start_parts(self, tensor: _Tensor, kind: Kind, ended: Event) -> None:
        seconds, end_s = tensor.seconds[kind], self._clock.now_s
        for drive, part in tensor.parts or [(drive, 1.0) for drive in self._drives]:
            begin_s = self._clock.start(drive, part * seconds, nothing)
            end_s = max(end_s, begin_s + part * seconds)
        self._clock.at(end_s, ended)

    def _next_in_turn(self) -> None:
        self._moves.ended(*self._line[0], True, None)
        self._line.popleft()
        if self._line:
            self._start_parts(*self._line[0], self._next_in_turn)

    def allocate(self, tensor: _Tensor) -> Any:
        return True

    def free_memory(self, memory: Any) -> None:
        """As `Executor.free_memory`."""


def nothing() -> None:
    """An event that changes nothing."""


def _tensor(key: int, one: Trip, moved: Trips) -> _Tensor:
    is_loaded, mean = one.eviction is None, one.stored_bytes / len(moved.drives)
    parts = zip(moved.drives, one.drive_bytes, strict=True) if one.drive_bytes else ()
    return _Tensor(
        key,
        int(one.is_on_drive),
        one.host_bytes,
        one.way_bytes,
        device_bytes=one.num_bytes if is_loaded and moved.has_link else 0,
        value=None if is_loaded else True,
        is_held=one.held > one.last,
        parts=[(drive, num_bytes / mean) for drive, num_bytes in parts if num_bytes],
        seconds={
            kind: one.num_bytes / rate
            if kind in _QUEUES
            else one.stored_bytes / rate + one.num_moves * moved.move_s
            for kind, rate in moved.rates.items()
        },
    )
