"""Chooses for each segment whether it runs forward again, and for each value whether it
is kept or offloaded, so that a step takes the least time in the memory it has.

    which segments run again ─► calls ─► fitting evictions ─► simulated step ─► the best

The segments that run again are searched; for each set of them Belady's rule gives the
values that leave, and a step is simulated with measured times and bandwidths.

Invariant: a choice changes time, memory and traffic, never bits.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TypeAlias

from jaxinf.schedule.placement import Eviction, Tiers, Waiting
from jaxinf.schedule.simulator import Trips
from jaxinf.streaming.plan.calls import Calls, Slot
from jaxinf.streaming.plan.forms import Form
from jaxinf.streaming.plan.offload import fitted
from jaxinf.streaming.plan.sequence import (
    Reach,
    Repeats,
    all_repeats,
    make_calls,
)
from jaxinf.streaming.plan.simulator import Profile, simulate
from jaxinf.streaming.program.graph import Graph, Piece, num_bytes
from jaxinf.streaming.program.programs import Programs
from jaxinf.terminal import format_bytes

MOST_EXHAUSTIVE = 128
"""No more choices of segments than these are searched completely."""

LEAST_TRIED = 100
"""At least so many sets are simulated, however many calls they have."""

_NUM_CLIMBS = 8
# So many calls are simulated in all, some 10 us each.
_MOST_CALLS = 16_000

_Chosen: TypeAlias = frozenset[tuple[int, Reach]]


@dataclass(frozen=True)
class Problem:
    """What there is to choose, and the limits.

    Attributes:
      memory: Returns the memory during each call, such as `Calls.call_bytes`.
      resident: Parts of params that are in memory in any case.
      admits: Returns whether calls that were chosen do fit; may compile them.
      loads: Returns for calls and their peak memory the reads of params; None if all
        are in memory.
      tiers: Returns where values of calls wait; None if the device's memory is the
        host's.
      waiting: Gradients that wait for the last one; None if none does.
    """

    graph: Graph
    programs: Programs
    budget_bytes: int
    memory: Callable[[Calls], Sequence[int]]
    resident: frozenset[Piece] = frozenset()
    admits: Callable[[Calls], bool] = lambda calls: True
    loads: Callable[[Calls, int], Trips | None] = lambda calls, peak_bytes: None
    form: Form | None = None
    tiers: Callable[[Calls], Tiers | None] = lambda calls: None
    waiting: Waiting | None = None

    def simulated_s(self, calls: Calls, peak_bytes: int, profile: Profile) -> float:
        """Returns the time of a step by given times of its calls and moves."""
        loads, tiers = self.loads(calls, peak_bytes), self.tiers(calls)
        return simulate(calls, profile, loads, tiers, self.waiting)


@dataclass(frozen=True)
class Choice:
    """A plan of a step, and what it is expected to cost.

    Attributes:
      bound_s: A time that no plan can beat: that of the programs, each run once.
      without_drive: The choices that need no drive, of those that fit.
    """

    repeats: Repeats
    calls: Calls = field(repr=False)
    peak_bytes: int
    expected_s: float
    bound_s: float
    without_drive: tuple["Choice", ...] = field(default=(), repr=False)

    @property
    def key(self) -> tuple[_Chosen, frozenset[tuple[Slot, Eviction]]]:
        """Equal for choices that run alike."""
        evictions = self.calls.evictions.items()
        return frozenset(self.repeats.items()), frozenset(evictions)

    @property
    def leaves(self) -> bool:
        return bool(self.calls.evictions)

    @property
    def offloaded_bytes(self) -> int:
        evictions = self.calls.evictions.items()
        return sum(self.calls.stored_bytes(slot, one.needed) for slot, one in evictions)

    @property
    def value_bytes(self) -> int:
        return max(self.calls.value_bytes(), default=0)

    def __str__(self) -> str:
        over = self.expected_s / self.bound_s - 1 if self.bound_s else 0.0
        return (
            f"{len(self.calls.evictions)} values of "
            f"{format_bytes(self.offloaded_bytes)} leave, {len(self.repeats)} "
            f"segments run forward again; expected {self.expected_s:.3f} s a step, at "
            f"most {over:.1%} above the best, {format_bytes(self.peak_bytes)} of "
            f"memory and {format_bytes(self.value_bytes)} of values"
        )


def choose(problem: Problem, profile: Profile) -> Choice | None:
    """Returns the fastest plan that fits; None if none does.

    Few segments are searched completely. For more, the search tries sets that a rule
    would give (none, all, the first, the last or the cheapest n), and changes the best
    of them by one segment at a time as long as that helps.
    """
    search = _Search(problem, profile)
    safe = search.without_drive()
    options = search.options.values()
    if math.prod(1 + len(own) for own in options) <= MOST_EXHAUSTIVE:
        for chosen in product(*((None, *own) for own in options)):
            search.try_one(frozenset(filter(None, chosen)))
    else:
        for chosen in search.starts():
            search.try_one(chosen)
        tried = search.tried
        for chosen in sorted(tried, key=tried.__getitem__)[:_NUM_CLIMBS]:
            search.climb(chosen)
    return search.best and replace(search.best, without_drive=safe)


def without_drive(problem: Problem, profile: Profile) -> tuple[Choice, ...]:
    """Returns those of two choices that fit: all values kept, all made again."""
    return _Search(problem, profile).without_drive()


class _Search:
    """The sets of segments tried so far, and the best."""

    def __init__(self, problem: Problem, profile: Profile) -> None:
        self._problem, self._profile = problem, profile
        self.tried: dict[_Chosen, float] = {}
        self.best: Choice | None = None
        self._once = self._calls({})
        times = profile.seconds_of(self._once)
        once_s = sum(times[call.program.key] for call in self._once.calls)
        num_calls = max(len(self._once.calls), 1)
        self._most_tried = max(LEAST_TRIED, _MOST_CALLS // num_calls)
        self._bound_s = profile.num_parts * once_s + profile.outside_s
        segments = range(len(problem.programs.forward) - 1)
        self.options = {k: own for k in segments if (own := self._of(k))}

    def starts(self) -> Iterator[_Chosen]:
        """Sets of segments to begin with."""
        own = [options[0] for options in self.options.values()]
        every = [one for options in self.options.values() for one in options]
        orders = [own, own[::-1], *(sorted(of, key=self._cost) for of in (own, every))]
        step = max(1, len(own) // 16)
        for count in (*range(0, len(own), step), len(own)):
            for order in orders:
                # Of a segment's options the first one counts.
                first = {one[0]: one for one in reversed(order[:count])}
                yield frozenset(first.values())

    def climb(self, chosen: _Chosen) -> None:
        """Changes a set by one segment at a time as long as that helps."""
        best_s = self.try_one(chosen)
        is_better = True
        while is_better:
            is_better = False
            for segment, options in self.options.items():
                for option in (None, *options):
                    rest = {one for one in chosen if one[0] != segment}
                    other = frozenset(rest | {option} if option else rest)
                    other_s = self.try_one(other)
                    if other_s < best_s:
                        chosen, best_s, is_better = other, other_s, True

    def try_one(self, chosen: _Chosen) -> float:
        """Simulates a set of segments that run again; returns its time.

        It is infinite if the set does not fit, or too many have been tried.
        """
        if chosen not in self.tried:
            if len(self.tried) >= self._most_tried:
                return math.inf
            repeats = dict(sorted(chosen))
            calls = self._calls(repeats)
            found = self._consider(repeats, calls)
            found = found or self._consider(repeats, self._fitted(calls))
            self.tried[chosen] = math.inf if found is None else found.expected_s
        return self.tried[chosen]

    def without_drive(self) -> tuple[Choice, ...]:
        """Simulates what needs no drive, which the search has to beat."""
        every = all_repeats(self._problem.programs)
        kept = self._consider({}, self._once)
        recomputed = self._consider(every, self._calls(every))
        return tuple(filter(None, (kept, recomputed)))

    def _fitted(self, calls: Calls) -> Calls:
        return fitted(calls, self._problem.budget_bytes, self._problem.memory)

    def _of(self, segment: int) -> list[tuple[int, Reach]]:
        """The ways in which a segment may run again, other than not at all."""
        programs = self._problem.programs
        made = set(programs.forward[segment].outputs)
        readers = [
            k for k, one in enumerate(programs.backward) if one and made & {*one.inputs}
        ]
        reaches: list[Reach] = ["own"] if segment in readers else []
        if readers and readers != [segment]:
            reaches.append("all")
        return [(segment, reach) for reach in reaches]

    def _cost(self, option: tuple[int, Reach]) -> float:
        """The time that running a segment again costs for each byte it saves."""
        programs, (segment, reach) = self._problem.programs, option
        forward, backward = programs.forward[segment], programs.backward[segment]
        readers = programs.backward if reach == "all" else [backward]
        read = {value for one in readers if one is not None for value in one.inputs}
        size = num_bytes(read & {*forward.outputs})
        return self._profile.seconds[forward.key] / max(size, 1)

    def _consider(self, repeats: Repeats, calls: Calls) -> Choice | None:
        """Simulates calls, and keeps the best; returns None if they do not fit."""
        problem, calls = self._problem, calls.lent()
        peak = max(problem.memory(calls), default=0)
        tiers = problem.tiers(calls)
        if peak > problem.budget_bytes or (tiers is not None and tiers.least_bytes):
            return None
        expected_s = problem.simulated_s(calls, peak, self._profile)
        found = Choice(repeats, calls, peak, expected_s, self._bound_s)
        if self.best is None or _rank(found) < _rank(self.best):
            self.best = found
        return found

    def _calls(self, repeats: Repeats) -> Calls:
        problem = self._problem
        calls = make_calls(problem.graph, problem.programs, "plan", repeats)
        return replace(calls, resident=problem.resident, form=problem.form)


def _rank(choice: Choice) -> tuple[float, int, list[tuple[int, Reach]]]:
    """By time, then by wear of the drive."""
    return (
        round(choice.expected_s, 6),
        choice.offloaded_bytes,
        sorted(choice.repeats.items()),
    )
