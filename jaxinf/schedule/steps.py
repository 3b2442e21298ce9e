"""The time of a step with its updates: calls, moves, state and commits on one clock.

    processor  ──F0──F1──…──B1──u1──B0──u0─────►
    drives     ──state──…──params──…  ──w1────w0──► commit ─► state of the next step

An update takes state, which is read ahead as there is memory, a gradient, and the time
of a kernel; then it is written. A commit follows the last write, and the reads of the
next step follow the commit.

Invariant: the calls and the tensors beside them are those of `schedule.simulator`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from jaxinf.schedule.clock import Clock
from jaxinf.schedule.simulator import Event, Moving, Trips, nothing, run_calls

PROCESSOR, HOST = "processor", "host"
"""Names of servers: what programs run on, and the host's cores."""

_NUM_STEPS = 4


def drive_name(number: int) -> str:
    return f"drives {number}" if number else "drives"


class Update(NamedTuple):
    """The update of a part of the state.

    Attributes:
      made: Number of the call that completes its gradient; the number of calls if it
        waits for the last one.
      read_bytes, written_bytes: State that is read for it and written after it.
    """

    made: int
    seconds: float
    read_bytes: int = 0
    written_bytes: float = 0
    memory_bytes: int = 0
    drive: int = 0


class StepTime(NamedTuple):
    """The time of a step in a run of many."""

    step_s: float
    busy_s: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What a step has to do.

    Attributes:
      call_s: Times of the calls in one run of them.
      moved: Tensors that move beside each run of the calls.
      last: Tensors that move beside the last run alone.
      updates: In the order of their gradients.
      kernels: What updates run on: `PROCESSOR` or `HOST`.
      rates: Of each drive, for state, in bytes a second.
      move_s: Time of each read or write of state beside that of its bytes.
      memory_bytes: Memory for state between its read and its write.
      commit_s: Time from the last write to the end of the commit.
      joins: Whether a step begins after the commit of the one before, since its calls
        read what that has written; else after its last update. Then state is read
        after the params that have room when the step begins, and else with the commit.
    """

    call_s: Sequence[float]
    moved: Sequence[Trips] = ()
    last: Sequence[Trips] = ()
    num_parts: int = 1
    updates: Sequence[Update] = ()
    kernels: str = PROCESSOR
    rates: Sequence[float] = ()
    move_s: float = 0.0
    memory_bytes: int = 0
    commit_s: float = 0.0
    joins: bool = False

    def simulated(self) -> StepTime:
        """Returns the time of a step after some others."""
        clock: Clock[Event] = Clock()
        state = _State(self, clock)
        begins, busy = [0.0], [dict(clock.busy_s)]
        for _ in range(_NUM_STEPS):
            begins.append(self._step(clock, state, begins[-1]))
            busy.append(dict(clock.busy_s))
        before, after = busy[-2:]
        names = {name: after[name] - before.get(name, 0.0) for name in after}
        return StepTime(begins[-1] - begins[-2], names)

    def _step(self, clock: Clock[Event], state: "_State", begin_s: float) -> float:
        """Simulates a step; returns when the next one can begin."""

        def run(ready_s: float, seconds: float) -> float:
            return seconds + clock.start(PROCESSOR, seconds, nothing, ready_s)

        state.begin()
        clock.run_until(begin_s)
        at_s = begin_s
        for part in range(self.num_parts):
            is_last = part == self.num_parts - 1
            moved = (*self.moved, *(self.last if is_last else ()))
            beside: list[Moving | _State] = [
                Moving(one, clock) for one in moved if one.trips
            ]
            state.read()  # after the params that the first calls wait for
            beside += [state] if is_last else []
            at_s = run_calls(self.call_s, beside, run, at_s)
        return state.ended(joins=self.joins)


class _State:
    """The state of the updates: read ahead, updated, written, committed."""

    def __init__(self, work: StepWork, clock: Clock[Event]) -> None:
        self._work, self._clock = work, clock
        self._updates = work.updates
        self._by_call: defaultdict[int, list[int]] = defaultdict(list)
        for number, one in enumerate(work.updates):
            self._by_call[one.made].append(number)
        self._free_bytes = work.memory_bytes
        self._num_computed = self._num_written = 0
        self._next = 0
        self._is_read = [False] * len(self._updates)
        self.begin()
        self._committed()

    def begin(self) -> None:
        """Begins a step: no gradient is there."""
        self._is_given = [False] * len(self._updates)
        self._num_computed = 0
        self._is_open = True

    def end(self, number: int, at_s: float) -> float:
        self._clock.run_until(at_s)
        return at_s

    def before(self, number: int, at_s: float) -> float:
        return at_s

    def made(self, number: int, at_s: float) -> None:
        self._clock.at(at_s, partial(self._give, self._by_call.get(number, ())))

    def ended(self, *, joins: bool) -> float:
        """Gives the rest of the gradients; returns when the next step can begin."""
        self._give(self._by_call.get(len(self._work.call_s), ()))
        if self._updates:
            while self._num_computed < len(self._updates) or (joins and self._is_open):
                self._clock.end()()
        return self._clock.now_s

    def _give(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._is_given[number] = True
            self._try(number)

    def read(self) -> None:
        """Reads state for the next updates, as there is memory."""
        while self._next < len(self._updates):
            number, one = self._next, self._updates[self._next]
            is_alone = self._free_bytes == self._work.memory_bytes
            if one.memory_bytes > self._free_bytes and not is_alone:
                return
            self._next += 1
            self._free_bytes -= one.memory_bytes
            self._move(one.drive, one.read_bytes, partial(self._was_read, number))

    def _move(self, drive: int, num_bytes: float, event: Event) -> None:
        if num_bytes:
            seconds = num_bytes / self._work.rates[drive] + self._work.move_s
            self._clock.start(drive_name(drive), seconds, event)
        else:
            self._clock.at(self._clock.now_s, event)

    def _was_read(self, number: int) -> None:
        self._is_read[number] = True
        self._try(number)

    def _try(self, number: int) -> None:
        if self._is_read[number] and self._is_given[number]:
            seconds = self._updates[number].seconds
            computed = partial(self._computed, number)
            self._clock.start(self._work.kernels, seconds, computed)

    def _computed(self, number: int) -> None:
        self._num_computed += 1
        self._is_read[number] = False
        one = self._updates[number]
        self._move(one.drive, one.written_bytes, partial(self._was_written, number))

    def _was_written(self, number: int) -> None:
        self._free_bytes += self._updates[number].memory_bytes
        self._num_written += 1
        if self._num_written == len(self._updates):
            self._clock.at(self._clock.now_s + self._work.commit_s, self._committed)
        else:
            self.read()

    def _committed(self) -> None:
        """Ends the step before; state may be read for the next one."""
        self._num_written = self._next = 0
        self._is_open = False
        if not self._work.joins:
            self.read()
