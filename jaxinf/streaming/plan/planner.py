"""Plans a step by measured times, and plans again when they change.

    first steps ─► times, bandwidths ─► choose ─► steps ─► as expected? ─► choose again
    (recompute)                                    ▲                            │
                                                   └────────────────────────────┘

A drive that was left is probed between steps: a few bytes are written and read. It is
tried again if it has become faster.

Invariant: a choice changes time, memory and traffic, never bits. What was found counts
more than what was expected, so a choice that turns out slower than recomputing all does
not stay. `Retrying` bounds the time of probes and of tries.
"""

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from jaxinf.streaming.plan.retrying import Moved, Retrying
from jaxinf.streaming.plan.search import Choice, Problem, choose, without_drive
from jaxinf.streaming.plan.simulator import Profile
from jaxinf.terminal import format_bytes

# Steps whose medians count, and the fewest of them before they are believed.
_WINDOW, _LEAST = 9, 5
# Found times may differ so much from the expected ones.
_TOLERANCE = 0.05
# And a drive's bandwidth may be so many times what it was, or that part of it.
_CHANGED = 1.5
# What another choice must gain.
_GAIN = 0.02
# The most steps of a choice before times that are not as expected count again.
_MOST_PATIENCE = 80
# Steps that try a drive whose bandwidth is not known.
_NUM_TRIED = 2
# Bandwidth of a drive that is not measured yet; high, so that it is tried.
_ASSUMED = 4e9
# How often something else is chosen if it turns out not to fit.
_TRIES = 4


@dataclass(frozen=True)
class Forecast:
    """What was chosen; its expected time and memory, and those that were found.

    Attributes:
      expected_s: Expected time of a step.
      found_s: Median of the last steps; None before the second step of a plan.
      spread_s: The fastest and the slowest of these steps.
      num_steps: Number of these steps, at most 9. The first of a plan does not count.
      expected_peak_bytes, found_peak_bytes: The most bytes of values in memory; 0 found
        before the first step of a plan.
      num_choices: How often a plan was chosen by measured times.
      num_offloaded, offloaded_bytes: Number of values that leave for a drive, and their
        bytes there; of each part of the batch.
      num_repeated: Number of segments that run forward again.
    """

    expected_s: float
    found_s: float | None
    spread_s: tuple[float, float] | None
    num_steps: int
    expected_peak_bytes: int
    found_peak_bytes: int
    num_choices: int
    num_offloaded: int
    offloaded_bytes: int
    num_repeated: int

    def __str__(self) -> str:
        text = (
            f"expected {self.expected_s:.3f} s a step and "
            f"{format_bytes(self.expected_peak_bytes)} of values"
        )
        if self.found_s is None or self.spread_s is None:
            return text
        low, high = self.spread_s
        return (
            f"{text}; found {self.found_s:.3f} s [{low:.3f}, {high:.3f}] in "
            f"{self.num_steps} steps and {format_bytes(self.found_peak_bytes)}"
        )


class Planner:
    """Chooses for a step, by what its steps measure. Used from one thread.

    Args:
      num_parts: Number of times that the calls run in a step.

    Attributes:
      num_choices: How often it was chosen by measured times.
    """

    def __init__(self, problem: Problem, num_parts: int = 1) -> None:
        self._problem = problem
        self._measured = _Measured(problem, num_parts)
        self._found: dict[Any, deque[float]] = defaultdict(_window)
        self.choice = _first(problem)
        self.num_choices = 0
        self._num_steps = 0  # of this choice
        self._num_since = 0  # since it was made, or made again
        self._patience = _LEAST
        self._peak_bytes = 0
        self._safe_s = math.inf
        self._is_assumed = False
        self._retrying = Retrying(_NUM_TRIED + 1, _LEAST + 1)

    def observe(
        self,
        step_s: float,
        call_s: Sequence[float],
        moved: Mapping[str, Moved],
        peak_bytes: int = 0,
    ) -> bool:
        """Takes the measures of a step; returns whether `choice` is another now.

        Args:
          call_s: Time of each call, in order; of all parts of the batch in turn.
          moved: Values that were `"written"` and `"read"`, and `"params"`, which were
            read; of a device with memory of its own, values that went `"out"` and
            `"back"`.
        """
        self._num_steps += 1
        self._num_since += 1
        self._peak_bytes = peak_bytes
        self._retrying.step(step_s)
        if self._num_steps == 1:  # memory and files were new
            self._found.pop(self.choice.key, None)
            return False
        self._found[self.choice.key].append(step_s)
        self._measured.add(self.choice, call_s, moved)
        return self._is_due() and self._choose()

    @property
    def is_probe_due(self) -> bool:
        """Whether a drive that was left should be probed now."""
        return self._retrying.is_due

    def probed(self, moved: Mapping[str, Moved]) -> bool:
        """Takes what a probe has `"written"` and `"read"`; returns as `observe`."""
        ratios = self._retrying.probed(moved, _CHANGED)
        if ratios is None:
            return False
        self._measured.scale(ratios)
        is_other = self._choose()
        self._is_assumed = is_other  # it is judged after a few steps
        return is_other

    def chosen_by(self, profile: Profile) -> Choice:
        """Returns what is the fastest by given times and bandwidths."""
        return self._best(profile)

    @property
    def forecast(self) -> Forecast | None:
        """What was expected and found; None before something was chosen by measures."""
        if not self.num_choices:
            return None
        found = self._found.get(self.choice.key, ()) if self._num_steps else ()
        return Forecast(
            self.choice.expected_s,
            statistics.median(found) if found else None,
            (min(found), max(found)) if found else None,
            len(found),
            self.choice.value_bytes,
            self._peak_bytes,
            self.num_choices,
            len(self.choice.calls.evictions),
            self.choice.offloaded_bytes,
            len(self.choice.repeats),
        )

    def _is_due(self) -> bool:
        if not self.num_choices:
            return True
        if self._is_assumed:
            return self._num_since > _NUM_TRIED
        if self._num_since <= self._patience:
            return False
        found_s, expected_s = self._found_s(self.choice), self.choice.expected_s
        is_off = abs(found_s - expected_s) > _TOLERANCE * expected_s
        is_slow = found_s > (1 + _GAIN) * self._safe_s
        is_changed = self.choice.leaves and self._measured.is_changed()
        is_due = is_off or is_slow or is_changed
        if not is_due:
            self._patience = _LEAST
        return is_due

    def _choose(self) -> bool:
        """Chooses by what is measured now; returns whether that is something else."""
        now_s = self._found_s(self.choice)
        if self._measured.is_changed():  # what was found with another drive is past
            for key in [*self._found]:
                if key[1] and key != self.choice.key:
                    del self._found[key]
        next_one = self._best(self._measured.profile(self.choice, now_s))
        if self.num_choices and not self._is_assumed:
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self._is_assumed = False
        self.num_choices += 1
        self._num_since = 0
        is_better = (1 + _GAIN) * self._found_s(next_one) < now_s
        if not is_better or next_one.key == self.choice.key:
            self.choice = replace(
                self.choice,
                expected_s=now_s,
                bound_s=min(next_one.bound_s, now_s),
                without_drive=next_one.without_drive,
            )
            return False
        if self.choice.leaves and not next_one.leaves:
            self._retrying.left(now_s - self._found_s(next_one))
        elif next_one.leaves:
            self._retrying.taken()
        self.choice = next_one
        self._is_assumed = self._measured.is_assumed(next_one)
        self._num_steps = self._peak_bytes = 0
        return True

    def _best(self, profile: Profile) -> Choice:
        """The choice that is or will be the fastest, among those that fit."""
        problem = self._problem
        for _ in range(_TRIES):
            best = choose(problem, profile)
            if best is None:
                break
            safe = best.without_drive
            self._safe_s = min(map(self._found_s, safe), default=math.inf)
            found = min([best, *safe], key=self._found_s)
            if problem.admits(found.calls):
                return replace(found, without_drive=safe)
        return self.choice

    def _found_s(self, choice: Choice) -> float:
        """The time of a choice: as found, else as expected."""
        found = self._found.get(choice.key)
        return statistics.median(found) if found else choice.expected_s


class _Measured:
    """Medians of the last steps."""

    def __init__(self, problem: Problem, num_parts: int) -> None:
        self._problem = problem
        self._num_parts = num_parts
        self._calls = {False: defaultdict(_window), True: defaultdict(_window)}
        self._rates = defaultdict(_window)
        self._before: Mapping[str, float] = {}

    def add(
        self, choice: Choice, call_s: Sequence[float], moved: Mapping[str, Moved]
    ) -> None:
        own: defaultdict[str, list[float]] = defaultdict(list)
        for call, seconds in zip(cycle(choice.calls.calls), call_s, strict=False):
            own[call.program.key].append(seconds)
        for key, times in own.items():
            self._calls[choice.leaves][key].append(statistics.fmean(times))
        for name, one in moved.items():
            if one.num_bytes and one.seconds > 0:
                self._rates[name].append(one.num_bytes / one.seconds)

    def scale(self, ratios: Mapping[str, float]) -> None:
        """Takes rates to be so many times what they were."""
        for name in self._rates.keys() & ratios.keys():
            rate = ratios[name] * statistics.median(self._rates[name])
            self._rates[name] = deque([rate], maxlen=_WINDOW)

    def is_changed(self) -> bool:
        """Whether a drive is much slower or faster than in the last profile."""
        now = _medians(self._rates)
        before = self._before
        ratios = [now[n] / before[n] for n in ("written", "read") if n in before]
        return any(not 1 / _CHANGED < ratio < _CHANGED for ratio in ratios)

    def is_assumed(self, choice: Choice) -> bool:
        """Whether a bandwidth that a choice depends on is not measured."""
        tiers = self._problem.tiers(choice.calls)
        names = {"written", "read"} if tiers is None or tiers.on_drive else set()
        names |= {"out", "back"} if tiers is not None else set()
        return choice.leaves and not names <= self._rates.keys()

    def profile(self, choice: Choice, found_s: float) -> Profile:
        """Returns measured times and rates.

        What a simulation of `choice` does not explain of the time that was found for it
        counts as time outside of the calls.
        """
        alone, beside = (_medians(self._calls[leaves]) for leaves in (False, True))
        self._before = _medians(self._rates)
        rates = {"params": math.inf} | self._before
        profile = Profile(
            _completed(beside, alone),
            rates.get("written", _ASSUMED),
            rates.get("read", _ASSUMED),
            rates["params"],
            alone=_completed(alone, beside),
            num_parts=self._num_parts,
            out=rates.get("out", math.inf),
            back=rates.get("back", math.inf),
        )
        simulated_s = self._problem.simulated_s(
            choice.calls, choice.peak_bytes, profile
        )
        return replace(profile, outside_s=max(0.0, found_s - simulated_s))


def _first(problem: Problem) -> Choice:
    """What needs no measures: all kept, else all recomputed, else as it fits."""
    seconds: Mapping[str, float] = defaultdict(float)
    profile = Profile(seconds, _ASSUMED, _ASSUMED)
    found = None
    for _ in range(_TRIES):
        safe = without_drive(problem, profile)
        found = next(iter(safe), None) or choose(problem, profile) or found
        if found is not None and problem.admits(found.calls):
            break
    assert found is not None, "the plan was cut to fit"
    return found


def _window() -> deque[float]:
    return deque(maxlen=_WINDOW)


def _medians(windows: Mapping[str, Iterable[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in windows.items()}


def _completed(
    own: Mapping[str, float], other: Mapping[str, float]
) -> Mapping[str, float]:
    """Times of calls; where they are not known, the other ones at the usual ratio."""
    ratios = [own[key] / other[key] for key in own.keys() & other.keys() if other[key]]
    ratio = statistics.median(ratios) if ratios else 1.0
    return {key: ratio * seconds for key, seconds in other.items()} | dict(own)
