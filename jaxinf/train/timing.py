"""A step, measured: its time, memory, what was busy, and on demand each piece of work.

``trace.json`` has the pieces of some steps in Chrome's form, which
https://ui.perfetto.dev opens: a track for each thread, for each drive (several if it
had several requests at once) and for programs, and counters.

Invariant: what is busy counts from the end of the step before, so a commit that goes on
counts for the step after. Evaluations and checkpoints count for none. A trace holds
whole steps, up to the end of the last one's commit, and is in memory until then. No two
spans of a drive's track overlap.
"""

import contextlib
import json
import os
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxinf.io import timeline, write_bytes_atomically
from jaxinf.io.spans import PHASES, Busy, Span
from jaxinf.train.config import TrainConfig
from jaxinf.train.metrics import Costs
from jaxinf.typing import JsonValue

_NUM_BEFORE, _NUM_TRACED = 2, 3  # steps that compile and read anew come first
_SAMPLE_S = 0.02
_LEAST_WAIT_S = 20e-6  # who waited for less has not waited
_PROCESSES = ("threads", "drives", "JAX device")  # the processes of Chrome's form
_NAME_LENGTH = 200


class StepTimer:
    """Measures the steps of a run, and traces those that the user has named.

    Args:
      step: number of steps done before.
    """

    def __init__(self, config: TrainConfig, step: int) -> None:
        first, last = config.trace or (0, 0)
        if config.trace is not None and not first:
            first = min(step + _NUM_BEFORE + 1, config.steps)
            last = step + _NUM_BEFORE + _NUM_TRACED
        self._traced = range(first, min(last, config.steps) + 1)
        self._trace = _Trace(config.logs / "trace.json")
        self._step_s = self._busy_s = 0.0
        self._since_s: float | None = None
        self._busy = Busy({}, {})
        self._drives: dict[str, None] = {}  # that were busy so far

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Measures the body, and records it if it is one of the steps to trace."""
        if self._since_s is None:
            timeline.take_busy()
            self._since_s = time.monotonic()
        began_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            if number in self._traced:
                stack.enter_context(self._trace.step(number))
            yield
        ended_s = time.monotonic()
        self._step_s, self._busy_s = ended_s - began_s, ended_s - self._since_s
        self._busy, self._since_s = timeline.take_busy(), ended_s
        self._drives |= dict.fromkeys(self._busy.drives)

    def forget(self) -> None:
        """Counts what is busy from the begin of the next step."""
        self._since_s = None

    def fields(self) -> Mapping[str, Any]:
        """Returns the fields of a `StepLine` that it has measured, of the last step."""
        step_s, busy = self._step_s, self._busy
        none = dict.fromkeys(("read", "update", "write", "wait", "commit"), 0.0)
        phases = {**none, **busy.phases}
        phases.setdefault("program", max(0.0, step_s - phases["wait"]))
        used = rss_bytes()
        return {
            "step_s": step_s,
            "rss_bytes": used,
            "phases": {name: round(seconds, 6) for name, seconds in phases.items()},
            "drives": {
                name: round(min(1.0, busy.drives.get(name, 0.0) / self._busy_s), 4)
                for name in self._drives
            },
            "memory": {"host": used, "device": device_bytes()},
        }

    def ended(self, number: int, costs: Costs) -> None:
        """Called after each step; blocks for the commit of the last traced one.

        Then it writes the trace.
        """
        if number == self._traced.stop - 1:
            costs()
            self.close()

    def close(self) -> None:
        """Writes what was traced and is not written."""
        self._trace.close()


class _Trace:
    """Spans of all threads, and samples of memory, from its first step on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps: list[Span] = []
        self._samples: list[tuple[float, dict[str, int]]] = []
        self._is_over = threading.Event()
        self._sampler: threading.Thread | None = None

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        if self._sampler is None:
            self._sampler = threading.Thread(
                target=self._sample, name="jaxinf-trace", daemon=True
            )
            self._sampler.start()
            timeline.start(annotate=jax.profiler.TraceAnnotation)
        began_s = time.perf_counter()
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield
        ended_s = time.perf_counter()
        self._steps.append(Span("step", number, ("steps", 0), began_s, ended_s))

    def _sample(self) -> None:
        is_over = False
        while not is_over:
            counts = {"process": rss_bytes()}
            if (on_device := device_bytes()) is not None:
                counts["JAX device"] = on_device
            self._samples.append((time.perf_counter(), counts))
            is_over = self._is_over.wait(_SAMPLE_S)

    def close(self) -> None:
        if self._sampler is None or self._is_over.is_set():
            return
        self._is_over.set()
        self._sampler.join()
        document = _document(timeline.stop(), self._steps, self._samples)
        write_bytes_atomically(self._path, json.dumps(document).encode())


# --- memory --------------------------------------------------------------------------


def rss_bytes() -> int:
    """Resident memory of this process now; its peak where the system says no more."""
    return _now_bytes() or peak_rss_bytes()


def peak_rss_bytes() -> int:
    """Returns the peak resident memory of this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return max(peak, _now_bytes())  # the kernel updates its peak only now and then


def device_bytes() -> int | None:
    """Memory in use on this process's JAX devices; None where it is the host's."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    used = [one["bytes_in_use"] for one in stats if one and "bytes_in_use" in one]
    return sum(used) if used else None


def _now_bytes() -> int:
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


# --- the trace -----------------------------------------------------------------------


def _document(
    spans: Sequence[Span],
    steps: Sequence[Span],
    samples: Sequence[tuple[float, Mapping[str, int]]],
) -> dict[str, JsonValue]:
    """Returns a trace in Chrome's form, with times in us from the first begin."""
    spans = [one for one in spans if not _is_nothing(one)]
    begin_s = min([one.began_s for one in (*steps, *spans)], default=0.0)
    events: list[dict[str, Any]] = []
    tracks: dict[tuple[str, str], int] = {}

    def add(form: str, process: str, at_s: float, name: str, **more: Any) -> None:
        at_us = round((at_s - begin_s) * 1e6, 1)
        place = {"pid": _PROCESSES.index(process) + 1, "tid": 0, "ts": at_us}
        events.append({"ph": form, "name": name[:_NAME_LENGTH]} | place | more)

    def add_span(process: str, track: str, span: Span) -> None:
        what = " ".join(map(str, span.what)) if type(span.what) is tuple else span.what
        args = {"drive": span.drive} if span.drive is not None else {}
        args |= {"bytes": span.num_bytes} if span.num_bytes else {}
        more = {"cat": PHASES.get(span.kind, span.kind), "args": args}
        more["dur"] = round((span.ended_s - span.began_s) * 1e6, 1)
        more["tid"] = tracks.setdefault((process, track), len(tracks) + 1)
        name = f"{span.kind} {what}".rstrip()
        add("X", process, span.began_s, name, **more)

    for step in steps:
        add_span("threads", "steps", step)
    drives: defaultdict[str, list[Span]] = defaultdict(list)
    names = _thread_names(spans)
    for span in spans:
        if span.kind == "program":
            add_span("JAX device", "programs", span)
        else:
            add_span("threads", names[span.thread], span)
        if span.drive is not None:
            drives[span.drive].append(span)
    for drive, requests in drives.items():
        for lane, span in _lanes(requests):
            add_span("drives", drive if not lane else f"{drive} ({lane + 1})", span)
        under_way = {"read": 0, "write": 0}
        begins = [(one.began_s, one.kind, one.num_bytes) for one in requests]
        ends = [(one.ended_s, one.kind, -one.num_bytes) for one in requests]
        for at_s, kind, change in sorted(begins + ends):
            under_way[kind] += change
            name = f"bytes on their way: {drive}"
            add("C", "drives", at_s, name, args=dict(under_way))
    for at_s, counts in samples:
        add("C", "threads", at_s, "memory", args=dict(counts))
    pids = dict.fromkeys(one["pid"] for one in events)
    named: list[JsonValue] = [
        _named("process_name", pid, 0, _PROCESSES[pid - 1]) for pid in pids
    ]
    named += [
        _named("thread_name", _PROCESSES.index(process) + 1, number, track)
        for (process, track), number in tracks.items()
    ]
    return {
        "displayTimeUnit": "ms",
        "otherData": {"version": 1, "steps": [one.what for one in steps]},
        "traceEvents": [*named, *sorted(events, key=lambda one: one["ts"])],
    }


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, JsonValue]:
    args: JsonValue = {"name": name[:_NAME_LENGTH]}
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _thread_names(spans: Sequence[Span]) -> dict[tuple[str, int], str]:
    """Returns names of threads, which are told apart where several have one."""
    found: dict[tuple[str, int], str] = {}
    num_named: defaultdict[str, int] = defaultdict(int)
    for thread in dict.fromkeys(span.thread for span in spans):
        # Python calls a thread that it did not start a dummy.
        name = "JAX callback" if thread[0].startswith("Dummy") else thread[0]
        num_named[name] += 1
        count = num_named[name]
        found[thread] = name if count == 1 else f"{name} ({count})"
    return found


def _lanes(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Yields a drive's requests, each with the number of a lane that is free."""
    ends: list[float] = []
    for span in sorted(spans, key=lambda one: one.began_s):
        free = (lane for lane, end_s in enumerate(ends) if end_s <= span.began_s)
        lane = next(free, len(ends))
        ends[lane : lane + 1] = [span.ended_s]
        yield lane, span


def _is_nothing(span: Span) -> bool:
    is_wait = PHASES.get(span.kind) == "wait"
    return is_wait and span.ended_s - span.began_s < _LEAST_WAIT_S
