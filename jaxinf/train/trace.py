"""``trace.json``: what each thread, drive and JAX device did in some steps of a run.

The form is Chrome's, which https://ui.perfetto.dev opens: a track for each thread, for
each drive (several if it had several requests at once) and for programs, and counters.

Invariant: a file holds whole steps, up to the end of the last one's commit. Spans are
kept in memory until then.
"""

import contextlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxinf.io import timeline, write_bytes_atomically
from jaxinf.io.spans import PHASES, Span
from jaxinf.train.backend import Costs
from jaxinf.train.memory import device_bytes, rss_bytes
from jaxinf.typing import JsonValue

NUM_BEFORE = 2
"""Steps that a run makes first, if no steps are named: they compile and read anew."""

_THREADS, _DRIVES, _DEVICE = 1, 2, 3  # the processes of Chrome's form
_NAMES = {_THREADS: "threads", _DRIVES: "drives", _DEVICE: "JAX device"}
_SAMPLE_S = 0.02
_LEAST_WAIT_S = 20e-6
"""Who waited for less has not waited."""

_NAME_LENGTH = 200


class TracedStep(NamedTuple):
    """A step's number, and its beginning and end by `time.perf_counter`."""

    number: int
    began_s: float
    ended_s: float


class _Sample(NamedTuple):
    at_s: float
    counts: Mapping[str, int]


class TraceRecorder:
    """Records steps, and writes them when the last of them is committed."""

    def __init__(self, path: Path, first: int, last: int) -> None:
        self._path, self._first, self._last = path, first, last
        self._steps: list[TracedStep] = []
        self._samples: list[_Sample] = []
        self._ended = threading.Event()
        self._sampler: threading.Thread | None = None

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Records the body if it is one of the steps."""
        if not self._first <= number <= self._last or self._ended.is_set():
            yield
            return
        if not timeline.is_recording:
            self._start()
        began_s = time.perf_counter()
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield
        self._steps.append(TracedStep(number, began_s, time.perf_counter()))

    def ended(self, costs: Costs) -> bool:
        """Called after each step, blocks after the last until its commit is durable.

        Returns:
          Whether the file was written now.
        """
        if not self._steps or self._steps[-1].number < self._last:
            return False
        if self._ended.is_set():
            return False
        costs()
        return self.close()

    def close(self) -> bool:
        """Writes what was recorded and is not written; returns whether it was any."""
        if self._sampler is None or self._ended.is_set():
            return False
        self._ended.set()
        self._sampler.join()
        document = trace_document(timeline.stop(), self._steps, self._samples)
        write_bytes_atomically(self._path, json.dumps(document).encode())
        return True

    def _start(self) -> None:
        self._sampler = threading.Thread(
            target=self._sample, name="jaxinf-trace", daemon=True
        )
        self._sampler.start()
        timeline.start(annotate=jax.profiler.TraceAnnotation)

    def _sample(self) -> None:
        """Notes the memory now and then."""
        is_over = False
        while not is_over:
            counts = {"process": rss_bytes()}
            if (on_device := device_bytes()) is not None:
                counts["JAX device"] = on_device
            self._samples.append(_Sample(time.perf_counter(), counts))
            is_over = self._ended.wait(_SAMPLE_S)


def trace_document(
    spans: Iterable[Span],
    steps: Sequence[TracedStep],
    samples: Sequence[_Sample] = (),
) -> dict[str, JsonValue]:
    """Returns a trace in Chrome's form, with times in us from the first step's begin.

    Args:
      samples: bytes of memory by tier, now and then.
    """
    spans = [span for span in spans if not _is_nothing(span)]
    begin_s = min([one.began_s for one in (*steps, *spans)], default=0.0)
    tracks, threads = _Tracks(begin_s), _ThreadNames()
    for number, began_s, ended_s in steps:
        tracks.add((_THREADS, "steps"), f"step {number}", began_s, ended_s)
    drives: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind == "program":
            place = _DEVICE, "programs"
        else:
            place = _THREADS, threads.name(span.thread)
        tracks.add_span(place, span)
        if span.drive is not None:
            drives[span.drive].append(span)
    for drive, requests in drives.items():
        for lane, request in _in_lanes(requests):
            name = drive if not lane else f"{drive} ({lane + 1})"
            tracks.add_span((_DRIVES, name), request)
        for at_s, on_way in _on_way(requests):
            tracks.count(_DRIVES, f"bytes on their way: {drive}", at_s, on_way)
    for at_s, counts in samples:
        tracks.count(_THREADS, "memory", at_s, counts)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"version": 1, "steps": [one.number for one in steps]},
        "traceEvents": tracks.events(),
    }


class _ThreadNames:
    """Names of threads by their numbers, of which several may have one name."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._num_named: defaultdict[str, int] = defaultdict(int)

    def name(self, thread: tuple[str, int]) -> str:
        name, ident = thread
        if ident not in self._names:
            # Python calls a thread that it did not start a dummy.
            name = "JAX callback" if name.startswith("Dummy") else name
            self._num_named[name] += 1
            count = self._num_named[name]
            self._names[ident] = name if count == 1 else f"{name} ({count})"
        return self._names[ident]


class _Tracks:
    """Events of Chrome's form by track, which is a process and a name."""

    def __init__(self, begin_s: float) -> None:
        self._begin_s = begin_s
        self._numbers: dict[tuple[int, str], int] = {}
        self._events: list[dict[str, Any]] = []

    def _us(self, at_s: float) -> float:
        return round((at_s - self._begin_s) * 1e6, 1)

    def add(
        self,
        place: tuple[int, str],
        name: str,
        began_s: float,
        ended_s: float,
        **more: Any,
    ) -> None:
        number = self._numbers.setdefault(place, len(self._numbers) + 1)
        times = {"ts": self._us(began_s), "dur": round((ended_s - began_s) * 1e6, 1)}
        event = {"ph": "X", "name": name[:_NAME_LENGTH], "pid": place[0], "tid": number}
        self._events.append(event | times | more)

    def add_span(self, place: tuple[int, str], span: Span) -> None:
        what, args = _shown(span.what), {}
        if span.drive is not None:
            args["drive"] = span.drive
        if span.num_bytes:
            args["bytes"] = span.num_bytes
        name = f"{span.kind} {what}".rstrip()
        phase = PHASES.get(span.kind, span.kind)
        self.add(place, name, span.began_s, span.ended_s, cat=phase, args=args)

    def count(
        self, process: int, name: str, at_s: float, counts: Mapping[str, int]
    ) -> None:
        event = {"ph": "C", "name": name, "pid": process, "tid": 0}
        self._events.append(event | {"ts": self._us(at_s), "args": dict(counts)})

    def events(self) -> list[JsonValue]:
        """Returns all events in the order of their times, names of tracks first."""
        processes = dict.fromkeys(one["pid"] for one in self._events)
        names = [_named("process_name", pid, 0, _NAMES[pid]) for pid in processes]
        names += [
            _named("thread_name", pid, number, name)
            for (pid, name), number in self._numbers.items()
        ]
        return [*names, *sorted(self._events, key=lambda one: one["ts"])]


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, JsonValue]:
    args: JsonValue = {"name": name[:_NAME_LENGTH]}
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _is_nothing(span: Span) -> bool:
    is_wait = PHASES.get(span.kind) == "wait"
    return is_wait and span.ended_s - span.began_s < _LEAST_WAIT_S


def _shown(what: Any) -> str:
    return " ".join(map(str, what)) if type(what) is tuple else str(what)


def _in_lanes(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Yields spans with a lane each, in which no two overlap."""
    ends: list[float] = []
    for span in sorted(spans, key=lambda one: one.began_s):
        free = (lane for lane, end_s in enumerate(ends) if end_s <= span.began_s)
        lane = next(free, len(ends))
        ends[lane : lane + 1] = [span.ended_s]
        yield lane, span


def _on_way(spans: Iterable[Span]) -> Iterator[tuple[float, Mapping[str, int]]]:
    """Yields the bytes under way, read and written, whenever they change."""
    changes = []
    for span in spans:
        changes.append((span.began_s, span.kind, span.num_bytes))
        changes.append((span.ended_s, span.kind, -span.num_bytes))
    now = {"read": 0, "write": 0}
    for at_s, kind, change in sorted(changes):
        now[kind] += change
        yield at_s, dict(now)
