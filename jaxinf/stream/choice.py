"""Chooses for each segment whether it runs forward again, and for each value whether it
is kept or offloaded, so that a step takes the least time in the memory it has.

    which segments run again ─► calls ─► absences that fit ─► simulated step ─► the best

The segments that run again are searched; for each set of them Belady's rule gives the
values that leave, and a step is simulated with measured times and bandwidths. Simple
rules are simulated, too, and the best of all is chosen.

Invariant: a choice changes time, memory and traffic, never bits.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from jaxinf.activations import Form
from jaxinf.stream.absences import fitted
from jaxinf.stream.calls import Absence, Calls, Slot, Targets, make_calls
from jaxinf.stream.graph import Piece, num_bytes
from jaxinf.stream.programs import Programs
from jaxinf.stream.rules import RULES
from jaxinf.stream.simulated import Profile, simulate
from jaxinf.terminal import format_bytes

__all__ = ["Choice", "Problem", "choose", "rules_of"]

# Fewer segments than this are searched completely.
_MOST_EXHAUSTIVE = 7
_MOST_ROUNDS = 4
_MOST_TRIED = 400


def _nothing_fetched(calls: Calls, peak_bytes: int) -> Mapping[int, int]:
    return {}


@dataclass(frozen=True)
class Problem:
    """What there is to choose, and the limits.

    Attributes:
      targets: Results and gradients of the whole program.
      programs: Its segments' programs.
      budget_bytes: The most memory of a step.
      memory: Returns the memory during each call, such as `Calls.call_bytes`.
      resident: Parts of params that are in memory in any case.
      admits: Returns whether calls that were chosen do fit; may compile them.
      fetched: Returns for calls and their peak memory the bytes of params that are read
        for each call, by its number.
      form: Form of values on drives; see `Calls`.
    """

    targets: Targets
    programs: Programs
    budget_bytes: int
    memory: Callable[[Calls], Sequence[int]]
    resident: frozenset[Piece] = frozenset()
    admits: Callable[[Calls], bool] = lambda calls: True
    fetched: Callable[[Calls, int], Mapping[int, int]] = _nothing_fetched
    form: Form | None = None


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
      rules: Simulated times of simple rules; infinite for those that do not fit.
    """

    repeated: frozenset[int]
    calls: Calls = field(repr=False)
    peak_bytes: int
    expected_s: float
    bound_s: float
    num_tried: int = 1
    rules: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[frozenset[int], frozenset[tuple[Slot, Absence]]]:
        """Equal for choices that run alike."""
        return self.repeated, frozenset(self.calls.absences.items())

    @property
    def leaves(self) -> bool:
        """Whether values leave for a drive."""
        return bool(self.calls.absences)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of values that are written in a step."""
        absences = self.calls.absences.items()
        return sum(self.calls.stored_bytes(slot, one.needed) for slot, one in absences)

    @property
    def value_bytes(self) -> int:
        """The most bytes of values in memory."""
        return max(self.calls.value_bytes(), default=0)

    def __str__(self) -> str:
        over = self.expected_s / self.bound_s - 1 if self.bound_s else 0.0
        rules = ", ".join(
            f"{name} {seconds:.3f}" if math.isfinite(seconds) else f"{name} -"
            for name, seconds in self.rules.items()
        )
        return (
            f"{len(self.calls.absences)} values of "
            f"{format_bytes(self.offloaded_bytes)} leave, {len(self.repeated)} "
            f"segments run forward again; expected {self.expected_s:.3f} s a step, at "
            f"most {over:.1%} above the best, {format_bytes(self.peak_bytes)} of "
            f"memory and {format_bytes(self.value_bytes)} of values; by rules: {rules}"
        )


def choose(problem: Problem, profile: Profile) -> Choice | None:
    """Returns the fastest plan that fits; None if none fits.

    Up to 7 segments are searched completely. For more, the search starts with the sets
    that a rule would give (none, all, the first, the last or the cheapest n) and then
    changes one segment at a time as long as that helps.
    """
    search = _Search(problem, profile)
    search.try_rules()
    segments = search.segments
    if len(segments) <= _MOST_EXHAUSTIVE:
        for size in range(len(segments) + 1):
            for chosen in combinations(segments, size):
                search.try_one(frozenset(chosen))
        return search.found()
    for chosen in _starts(segments, search.cheapest()):
        search.try_one(chosen)
    for _ in range(_MOST_ROUNDS):
        before = search.best
        if before is None:
            break
        for segment in segments:
            search.try_one(search.best.repeated ^ {segment} if search.best else None)
        if search.best is before:
            break
    return search.found()


def rules_of(problem: Problem, profile: Profile) -> Mapping[str, Choice]:
    """Returns what simple rules choose, those that fit: keep, recompute and so on."""
    search = _Search(problem, profile)
    search.try_rules()
    return search.by_rule


def _starts(
    segments: Sequence[int], cheapest: Sequence[int]
) -> Iterator[frozenset[int]]:
    step = max(1, len(segments) // 16)
    for count in (*range(0, len(segments), step), len(segments)):
        yield frozenset(segments[:count])
        yield frozenset(segments[len(segments) - count :])
        yield frozenset(cheapest[:count])


class _Search:
    """The sets of segments tried so far, and the best."""

    def __init__(self, problem: Problem, profile: Profile) -> None:
        self._problem, self._profile = problem, profile
        self.tried: set[frozenset[int]] = set()
        self.best: Choice | None = None
        self.by_rule: dict[str, Choice] = {}
        programs = problem.programs
        once = self._calls(frozenset())
        times = profile.seconds_of(once)
        once_s = sum(times[call.program.key] for call in once.calls)
        self._bound_s = profile.num_parts * once_s + profile.outside_s
        every = self._calls(frozenset(range(len(programs.forward) - 1)))
        again = {id(call.program) for call in every.calls if call.is_repeat}
        self.segments = [
            k for k, program in enumerate(programs.forward) if id(program) in again
        ]

    def try_one(self, repeated: frozenset[int] | None) -> None:
        """Simulates a set of segments that run again."""
        if repeated is None or repeated in self.tried:
            return
        if len(self.tried) >= _MOST_TRIED:
            return
        self.tried.add(repeated)
        problem, calls = self._problem, self._calls(repeated)
        if self._consider(repeated, calls) is None:
            calls = fitted(calls, problem.budget_bytes, problem.memory)
            self._consider(repeated, calls)

    def try_rules(self) -> None:
        """Simulates simple rules."""
        problem = self._problem
        once = self._calls(frozenset())
        every = frozenset(self.segments)
        tried = {
            name: (
                frozenset[int](),
                rule(once, problem.budget_bytes, problem.memory, self._profile),
            )
            for name, rule in RULES.items()
        }
        tried["recompute"] = every, self._calls(every)
        for name, (repeated, calls) in tried.items():
            choice = self._consider(repeated, calls)
            if choice is not None:
                self.by_rule[name] = choice

    def cheapest(self) -> list[int]:
        """Segments by the time that running them again costs for each byte it saves."""
        forward = self._problem.programs.forward

        def cost(k: int) -> float:
            size = num_bytes(forward[k].outputs)
            return self._profile.seconds[forward[k].key] / max(size, 1)

        return sorted(self.segments, key=cost)

    def found(self) -> Choice | None:
        """The best, with the times of the rules."""
        times = {
            name: self.by_rule[name].expected_s if name in self.by_rule else math.inf
            for name in (*RULES, "recompute")
        }
        return self.best and replace(self.best, num_tried=len(self.tried), rules=times)

    def _consider(self, repeated: frozenset[int], calls: Calls) -> Choice | None:
        """Simulates calls, and keeps the best; returns None if they do not fit."""
        problem, calls = self._problem, calls.lent()
        peak = max(problem.memory(calls), default=0)
        if peak > problem.budget_bytes:
            return None
        fetched = problem.fetched(calls, peak)
        expected_s = simulate(calls, self._profile, fetched)
        found = Choice(repeated, calls, peak, expected_s, self._bound_s)
        if self.best is None or _rank(found) < _rank(self.best):
            self.best = found
        return found

    def _calls(self, repeated: frozenset[int]) -> Calls:
        problem = self._problem
        calls = make_calls(problem.targets, problem.programs, "plan", repeated)
        return replace(calls, resident=problem.resident, form=problem.form)


def _rank(choice: Choice) -> tuple[float, int, list[int]]:
    """By time, then by wear of the drive."""
    return (
        round(choice.expected_s, 6),
        choice.offloaded_bytes,
        sorted(choice.repeated),
    )
