"""Times of this process's work: sums by phase and drive, and names for a profiler.

    with span("read", drive="/mnt/nvme0"):
        …

Invariant: sums are always kept. A phase, or a drive, that several threads are busy with
is busy once.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PHASES: Mapping[str, str] = {
    "read": "read",
    "write": "write",
    "update": "update",
    "leaf": "wait",
    "wait": "wait",
    "program": "program",
    "out": "copy",
    "back": "copy",
    "drain": "commit",
    "sync": "commit",
    "record": "commit",
    "meet": "commit",
    "flip": "commit",
}
"""The phase of a step that each kind of span belongs to.

Other kinds have none: ``"fetch"`` (params of a streamed step) and ``"checksum"``. In
``"leaf"``, the callback that brought a leaf's gradient waits for its update."""


@dataclass
class Clock:
    """The time in which at least one thread was busy. Not thread-safe."""

    num_running: int = 0
    since_s: float = 0.0
    total_s: float = 0.0

    def start(self) -> None:
        if not self.num_running:
            self.since_s = time.perf_counter()
        self.num_running += 1

    def stop(self) -> None:
        self.num_running -= 1
        if not self.num_running:
            self.total_s += time.perf_counter() - self.since_s

    def take_s(self) -> float:
        """Returns the time since the last call, also of threads that are still busy."""
        if self.num_running:
            now_s = time.perf_counter()
            self.total_s, self.since_s = self.total_s + now_s - self.since_s, now_s
        taken_s, self.total_s = self.total_s, 0.0
        return taken_s


@dataclass(frozen=True)
class Busy:
    """Seconds in which a phase was under way somewhere, and each drive was busy."""

    phases: Mapping[str, float]
    drives: Mapping[str, float]


class PhaseTotals:
    """The time of each phase and drive, summed over all threads. Thread-safe."""

    def __init__(self) -> None:
        # Makes a profiler's context for a kind of span.
        self.annotate: Callable[..., Any] | None = None
        self._lock = threading.Lock()
        self._phases: defaultdict[str, Clock] = defaultdict(Clock)
        self._drives: defaultdict[str, Clock] = defaultdict(Clock)

    def span(
        self, kind: str, *, drive: str | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context that adds the time of its body to its phase and drive."""
        if self.annotate is None and kind not in PHASES:
            return _NO_SPAN
        return _Span(self, kind, drive)

    def add(self, kind: str, began_s: float, ended_s: float) -> None:
        """Adds work whose times are known; its kind must be in `PHASES`."""
        with self._lock:
            self._phases[PHASES[kind]].total_s += ended_s - began_s

    def take_busy(self) -> Busy:
        """Returns the sums since the last call."""
        with self._lock:
            return Busy(_take_times(self._phases), _take_times(self._drives))


class _Span:
    """A span's context; a class for speed, since a step has thousands."""

    __slots__ = ("_annotation", "_clocks", "_drive", "_kind", "_totals")

    def __init__(self, totals: PhaseTotals, kind: str, drive: str | None) -> None:
        self._totals, self._kind, self._drive = totals, kind, drive

    def __enter__(self) -> None:
        totals = self._totals
        phase, drive = PHASES.get(self._kind), self._drive
        with totals._lock:
            clocks = [] if phase is None else [totals._phases[phase]]
            if drive is not None:
                clocks.append(totals._drives[drive])
            for clock in clocks:
                clock.start()
        self._clocks = clocks
        self._annotation = None
        if totals.annotate is not None:
            self._annotation = totals.annotate(self._kind)
            self._annotation.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        with self._totals._lock:
            for clock in self._clocks:
                clock.stop()


def _take_times(clocks: Mapping[str, Clock]) -> Mapping[str, float]:
    times_s = {key: clock.take_s() for key, clock in clocks.items()}
    return {key: time_s for key, time_s in times_s.items() if time_s}


_NO_SPAN = contextlib.nullcontext()

phase_totals = PhaseTotals()
"""Those of this process; several stores may share its drives and threads."""

span, add_span = phase_totals.span, phase_totals.add
