"""Chooses for each segment whether it runs forward again, and for each value whether it
is kept or offloaded, so that a step takes the least time in the memory it has.

    which segments run again ─► calls ─► absences that fit ─► simulated step ─► the best

The segments that run again are searched; for each set of them Belady's rule gives the
values that leave, and a step is simulated with measured times and bandwidths.

Invariant: a choice changes time, memory and traffic, never bits.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from jaxinf.io.pages import page_ceil
from jaxinf.stream.absences import fitted
from jaxinf.stream.calls import Absence, Calls, Slot, make_calls
from jaxinf.stream.graph import Graph
from jaxinf.stream.programs import Programs
from jaxinf.terminal import format_bytes

__all__ = ["Choice", "Profile", "choose", "simulate"]

# Fewer segments than this are searched completely.
_MOST_EXHAUSTIVE = 7
_MOST_ROUNDS = 4


@dataclass(frozen=True)
class Profile:
    """Measured times and bandwidths.

    Attributes:
      seconds: Time of a call by its program's key.
      write, read: Bandwidth of the drives beside a running step, in bytes a second.
    """

    seconds: Mapping[str, float]
    write: float
    read: float


@dataclass(frozen=True)
class Choice:
    """A plan of a step, and what it is expected to cost.

    Attributes:
      repeated: Segments that run forward again.
      calls: The calls, with absences.
      peak_bytes: The step's peak memory.
      expected_s: The step's simulated time.
      bound_s: A time that no plan can beat: that of the programs, each run once.
      num_tried: Number of sets of segments that were simulated.
    """

    repeated: frozenset[int]
    calls: Calls = field(repr=False)
    peak_bytes: int
    expected_s: float
    bound_s: float
    num_tried: int

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of values that are written in a step."""
        lives = self.calls.lives
        return sum(page_ceil(lives[slot].num_bytes) for slot in self.calls.absences)

    def __str__(self) -> str:
        over = self.expected_s / self.bound_s - 1 if self.bound_s else 0.0
        return (
            f"{len(self.calls.absences)} values of "
            f"{format_bytes(self.offloaded_bytes)} leave, {len(self.repeated)} "
            f"segments run forward again; expected {self.expected_s:.3f} s a step, at "
            f"most {over:.1%} above the best, and {format_bytes(self.peak_bytes)}"
        )


def simulate(calls: Calls, profile: Profile) -> float:
    """Returns the time of a step: calls in turn, and one queue for the drives.

    A call starts when the one before it has ended, what must be gone is written, and
    what it reads is back, as in `jaxinf.stream.values`.
    """
    events = _events(calls)
    written: dict[Slot, float] = {}
    back: dict[Slot, float] = {}
    ends = [0.0, 0.0]  # of the calls before the last, and of the last
    drive_s = handed_s = 0.0
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
        began_s = max([ends[-1], handed_s, *ready])
        ends = [ends[-1], began_s + profile.seconds[call.program.key]]
    return ends[-1]


def choose(
    graph: Graph,
    programs: Programs,
    budget_bytes: int,
    memory: Callable[[Calls], Sequence[int]],
    profile: Profile,
) -> Choice | None:
    """Returns the fastest plan that fits; None if none fits.

    Up to 7 segments are searched completely. For more, the search starts with the sets
    that a rule would give (none, all, the first or last n) and then changes one segment
    at a time as long as that helps.

    Args:
      graph: The whole program.
      programs: Its segments' programs.
      budget_bytes: The most memory of a step.
      memory: Returns the memory during each call, such as `Calls.call_bytes`.
      profile: Measured times.
    """
    search = _Search(graph, programs, budget_bytes, memory, profile)
    segments = search.segments
    if len(segments) <= _MOST_EXHAUSTIVE:
        for size in range(len(segments) + 1):
            for chosen in combinations(segments, size):
                search.try_one(frozenset(chosen))
        return search.best
    for chosen in _starts(segments):
        search.try_one(chosen)
    for _ in range(_MOST_ROUNDS):
        before = search.best
        if before is None:
            break
        for segment in segments:
            search.try_one(search.best.repeated ^ {segment} if search.best else None)
        if search.best is before:
            break
    return search.best and replace(search.best, num_tried=len(search.tried))


def _starts(segments: Sequence[int]) -> Iterator[frozenset[int]]:
    step = max(1, len(segments) // 16)
    for count in (*range(0, len(segments), step), len(segments)):
        yield frozenset(segments[:count])
        yield frozenset(segments[len(segments) - count :])


class _Search:
    """The sets of segments tried so far, and the best."""

    def __init__(
        self,
        graph: Graph,
        programs: Programs,
        budget_bytes: int,
        memory: Callable[[Calls], Sequence[int]],
        profile: Profile,
    ) -> None:
        self._graph, self._programs = graph, programs
        self._budget_bytes, self._memory = budget_bytes, memory
        self._profile = profile
        self.tried: set[frozenset[int]] = set()
        self.best: Choice | None = None
        once = self._calls(frozenset())
        self._bound_s = sum(profile.seconds[c.program.key] for c in once.calls)
        every = self._calls(frozenset(range(len(programs.forward) - 1)))
        again = {id(call.program) for call in every.calls if call.is_repeat}
        self.segments = [
            k for k, program in enumerate(programs.forward) if id(program) in again
        ]

    def try_one(self, repeated: frozenset[int] | None) -> None:
        """Simulates a set of segments that run again."""
        if repeated is None or repeated in self.tried:
            return
        self.tried.add(repeated)
        calls = fitted(self._calls(repeated), self._budget_bytes, self._memory)
        peak = max(self._memory(calls), default=0)
        if peak > self._budget_bytes:
            return
        expected_s = simulate(calls, self._profile)
        found = Choice(
            repeated, calls, peak, expected_s, self._bound_s, len(self.tried)
        )
        if self.best is None or _rank(found) < _rank(self.best):
            self.best = found

    def _calls(self, repeated: frozenset[int]) -> Calls:
        return make_calls(self._graph, self._programs, "offload", repeated)


def _rank(choice: Choice) -> tuple[float, int, list[int]]:
    """By time, then by wear of the drive."""
    return (
        round(choice.expected_s, 6),
        choice.offloaded_bytes,
        sorted(choice.repeated),
    )


@dataclass(frozen=True)
class _Events:
    """Values by the number of the call at which something happens to them."""

    bytes: Mapping[Slot, int]
    writes: Mapping[int, list[Slot]]
    gone: Mapping[int, list[Slot]]
    back: Mapping[int, list[Slot]]
    needed: Mapping[int, list[Slot]]


def _events(calls: Calls) -> _Events:
    in_order = sorted(calls.absences.items(), key=lambda item: item[1].needed)

    def by(number: Callable[[Absence], int]) -> Mapping[int, list[Slot]]:
        found: defaultdict[int, list[Slot]] = defaultdict(list)
        for slot, absence in in_order:
            found[number(absence)].append(slot)
        return found

    return _Events(
        {slot: page_ceil(calls.lives[slot].num_bytes) for slot in calls.absences},
        by(lambda one: one.written),
        by(lambda one: one.gone),
        by(lambda one: one.back),
        by(lambda one: one.needed),
    )
