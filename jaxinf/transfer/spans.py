"""Times of this process's work: sums by phase and drive, and on demand each piece.

    with span("read", "params of h0", drive="/mnt/nvme0", num_bytes=4096):
        …

Invariant: sums are always kept, pieces only from `start` to `stop`. A phase, or a
drive, that several threads are busy with is busy once.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

PHASES: Mapping[str, str] = MappingProxyType(
    {
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
        "publish": "commit",
        "meet": "commit",
    }
)
"""The phase of a step that each kind of span belongs to; other kinds have none.

A leaf's update is waited for by the callback of JAX that brought its gradient."""


class Span(NamedTuple):
    """A piece of work with its times.

    Attributes:
      kind: one of `PHASES`, or ``"fetch"`` (params of a streamed step), ``"checksum"``.
      what: the leaf, program or value that it was about; shown by `str`.
      drive: the drive that was busy, by its directory; None if none was.
    """

    kind: str
    what: Any
    thread: tuple[str, int]
    began_s: float
    ended_s: float
    drive: str | None = None
    num_bytes: int = 0


@dataclass
class Clock:
    """Adds up the time in which at least one thread is busy. Not thread-safe."""

    num_running: int = 0
    since_s: float = 0.0
    total_s: float = 0.0

    def start(self) -> None:
        """A thread becomes busy."""
        if not self.num_running:
            self.since_s = time.perf_counter()
        self.num_running += 1

    def stop(self) -> None:
        """A thread is no longer busy."""
        self.num_running -= 1
        if not self.num_running:
            self.total_s += time.perf_counter() - self.since_s

    def take_s(self) -> float:
        """Returns the time since the last call, that of who is busy now included."""
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


class Timeline:
    """Spans of all threads, in the order in which they ended. Thread-safe."""

    def __init__(self) -> None:
        self._spans: list[Span] | None = None
        self._annotate: Callable[..., Any] | None = None
        self._lock = threading.Lock()
        self._phases: defaultdict[str, Clock] = defaultdict(Clock)
        self._drives: defaultdict[str, Clock] = defaultdict(Clock)

    def start(self, annotate: Callable[..., Any] | None = None) -> None:
        """Records spans from here on.

        Args:
          annotate: makes a context for each span's name, as a profiler wants it.
        """
        self._annotate = annotate
        self._spans = []

    def stop(self) -> list[Span]:
        spans, self._spans, self._annotate = self._spans or [], None, None
        return spans

    @property
    def is_recording(self) -> bool:
        """Whether spans are recorded, so that their names are of use."""
        return self._spans is not None

    def span(
        self,
        kind: str,
        what: Any = "",
        *,
        drive: str | None = None,
        num_bytes: int = 0,
    ) -> contextlib.AbstractContextManager[None]:
        """Records the time of the body; see `Span`."""
        if self._spans is None and kind not in PHASES:
            return _OFF
        return _Running(self, kind, what, drive, num_bytes)

    def add(self, kind: str, what: Any, began_s: float, ended_s: float) -> None:
        """Records work of one of `PHASES` whose times are known."""
        with self._lock:
            self._phases[PHASES[kind]].total_s += ended_s - began_s
        if self._spans is not None:
            self._spans.append(Span(kind, what, _thread(), began_s, ended_s))

    def take_busy(self) -> Busy:
        """Returns the sums since the last call."""
        with self._lock:
            return Busy(*(_taken(one) for one in (self._phases, self._drives)))


class _Running:
    """See `Timeline.span`; a class, as there are thousands in a step."""

    __slots__ = (
        *("_annotation", "_began_s", "_clocks"),
        *("_drive", "_kind", "_num_bytes", "_timeline", "_what"),
    )

    def __init__(
        self,
        timeline: Timeline,
        kind: str,
        what: Any,
        drive: str | None,
        num_bytes: int,
    ) -> None:
        self._timeline = timeline
        self._kind, self._what = kind, what
        self._drive, self._num_bytes = drive, num_bytes

    def __enter__(self) -> None:
        timeline = self._timeline
        phase, drive = PHASES.get(self._kind), self._drive
        with timeline._lock:
            clocks = [] if phase is None else [timeline._phases[phase]]
            if drive is not None:
                clocks.append(timeline._drives[drive])
            for clock in clocks:
                clock.start()
        self._clocks = clocks
        self._annotation = None
        if timeline._annotate is not None:
            self._annotation = timeline._annotate(self._kind)
            self._annotation.__enter__()
        self._began_s = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        ended_s, timeline = time.perf_counter(), self._timeline
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        with timeline._lock:
            for clock in self._clocks:
                clock.stop()
        spans = timeline._spans
        if spans is not None:
            times = self._began_s, ended_s
            rest = self._drive, self._num_bytes
            spans.append(Span(self._kind, self._what, _thread(), *times, *rest))


def _thread() -> tuple[str, int]:
    return threading.current_thread().name, threading.get_ident()


def _taken(clocks: Mapping[str, Clock]) -> Mapping[str, float]:
    taken = {key: clock.take_s() for key, clock in clocks.items()}
    return {key: seconds for key, seconds in taken.items() if seconds}


_OFF = contextlib.nullcontext()

timeline = Timeline()
"""That of this process, whose drives and threads several stores may share."""

span, add_span = timeline.span, timeline.add
