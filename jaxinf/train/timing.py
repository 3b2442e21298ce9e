"""A step, measured: its time, memory, what was busy, and on demand each piece of work.

``trace.json`` has the pieces of some steps in Chrome's form, which
https://ui.perfetto.dev opens: tracks for threads, for a drive's requests by thread, and
for programs, and a counter of memory.

Invariant: what is busy counts from the end of the step before, so a commit that goes on
counts for the step after. Evaluations and checkpoints count for none. A trace holds
whole steps, up to the end of the last one's commit, and is in memory until then.
"""

import contextlib
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxinf.train.config import TrainConfig
from jaxinf.train.metrics import Costs
from jaxinf.transfer import timeline, write_bytes_atomically
from jaxinf.transfer.spans import PHASES, Busy, Span
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
        self._path, self._steps = config.logs / "trace.json", list[Span]()
        self._samples = list[tuple[float, dict[str, int]]]()
        self._is_over = threading.Event()
        self._sampler = threading.Thread(
            target=self._sample, name="jaxinf-trace", daemon=True
        )
        self._step_s = self._busy_s = 0.0
        self._since_s: float | None = None
        self._busy = Busy({}, {})
        self._drives: dict[str, None] = {}  # that were busy so far

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Measures the body, and records it if it is one of the steps to trace."""
        if number in self._traced and not self._steps:
            self._sampler.start()
            timeline.start(annotate=jax.profiler.TraceAnnotation)
        if self._since_s is None:
            timeline.take_busy()
            self._since_s = time.monotonic()
        began_s, began = time.monotonic(), time.perf_counter()
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield
        ended_s = time.monotonic()
        if number in self._traced:
            ended = time.perf_counter()
            self._steps.append(Span("step", number, ("steps", 0), began, ended))
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
        if self._sampler.is_alive():
            self._is_over.set()
            self._sampler.join()
            document = _document(timeline.stop(), self._steps, self._samples)
            write_bytes_atomically(self._path, json.dumps(document).encode())

    def _sample(self) -> None:
        is_over = False
        while not is_over:
            on_device = device_bytes()
            counts = {} if on_device is None else {"JAX device": on_device}
            counts["process"] = rss_bytes()
            self._samples.append((time.perf_counter(), counts))
            is_over = self._is_over.wait(_SAMPLE_S)


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
) -> JsonValue:
    """Returns a trace in Chrome's form, with times in us from the first begin."""
    spans = [one for one in spans if not _is_nothing(one)]
    zero_s = min([one.began_s for one in (*steps, *spans)], default=0.0)
    tracks: dict[tuple[int, Any], int] = {}
    events: list[dict[str, Any]] = []

    def name_it(kind: str, pid: int, tid: int, name: str) -> None:
        args = {"name": name[:_NAME_LENGTH]}
        events.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})

    def add(process: str, track: Any, title: str, span: Span) -> None:
        pid = _PROCESSES.index(process) + 1
        if (pid, track) not in tracks:
            tracks[pid, track] = len(tracks) + 1
            name_it("thread_name", pid, tracks[pid, track], title)
        what = " ".join(map(str, span.what)) if type(span.what) is tuple else span.what
        args = {"drive": span.drive, "bytes": span.num_bytes}
        events.append(
            {
                "ph": "X",
                "name": f"{span.kind} {what}".rstrip()[:_NAME_LENGTH],
                "cat": PHASES.get(span.kind, span.kind),
                "pid": pid,
                "tid": tracks[pid, track],
                "ts": round((span.began_s - zero_s) * 1e6, 1),
                "dur": round((span.ended_s - span.began_s) * 1e6, 1),
                "args": {name: value for name, value in args.items() if value},
            }
        )

    for number, process in enumerate(_PROCESSES, 1):
        name_it("process_name", number, 0, process)
    for step in steps:
        add("threads", "steps", "steps", step)
    for span in spans:
        # Python calls a thread that it did not start a dummy.
        thread = span.thread[0]
        thread = "JAX callback" if thread.startswith("Dummy") else thread
        if span.kind == "program":
            add("JAX device", "programs", "programs", span)
        else:
            add("threads", span.thread, thread, span)
        if span.drive is not None:  # requests of a thread do not overlap
            add("drives", (span.drive, span.thread), f"{span.drive}: {thread}", span)
    for at_s, counts in samples:
        counter = {"ph": "C", "name": "memory", "pid": 1, "tid": 0, "args": counts}
        events.append({**counter, "ts": round((at_s - zero_s) * 1e6, 1)})
    return {
        "displayTimeUnit": "ms",
        "otherData": {"version": 1, "steps": [one.what for one in steps]},
        "traceEvents": sorted(events, key=lambda one: one.get("ts", -1.0)),
    }


def _is_nothing(span: Span) -> bool:
    is_wait = PHASES.get(span.kind) == "wait"
    return is_wait and span.ended_s - span.began_s < _LEAST_WAIT_S
