"""``trace.json``: what each thread, drive and JAX device did in some steps of a run.

The form is Chrome's, which https://ui.perfetto.dev opens: a track for each thread, for
each drive (several if it had several requests at once) and for programs, and counters.

Invariant: no two spans of a drive's track overlap.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxinf.io.spans import PHASES, Span
from jaxinf.typing import JsonValue

_PROCESSES = ("threads", "drives", "JAX device")  # the processes of Chrome's form
_LEAST_WAIT_S = 20e-6
"""Who waited for less has not waited."""

_NAME_LENGTH = 200


class TracedStep(NamedTuple):
    """A step's number, and its beginning and end by `time.perf_counter`."""

    number: int
    began_s: float
    ended_s: float


class Sample(NamedTuple):
    """Bytes of memory by tier, at a time of `time.perf_counter`."""

    at_s: float
    counts: Mapping[str, int]


def trace_document(
    spans: Iterable[Span], steps: Sequence[TracedStep], samples: Sequence[Sample] = ()
) -> dict[str, JsonValue]:
    """Returns a trace in Chrome's form, with times in us from the first begin."""
    spans = [span for span in spans if not _is_nothing(span)]
    begin_s = min([one.began_s for one in (*steps, *spans)], default=0.0)
    events: list[dict[str, Any]] = []
    tracks: dict[tuple[str, str], int] = {}

    def us(at_s: float) -> float:
        return round((at_s - begin_s) * 1e6, 1)

    def add(process: str, track: str, name: str, span: Any, **more: Any) -> None:
        number = tracks.setdefault((process, track), len(tracks) + 1)
        place = {"pid": _PROCESSES.index(process) + 1, "tid": number}
        num_us = round((span.ended_s - span.began_s) * 1e6, 1)
        times = {"ts": us(span.began_s), "dur": num_us}
        events.append({"ph": "X", "name": name[:_NAME_LENGTH]} | place | times | more)

    def add_span(process: str, track: str, span: Span) -> None:
        what = " ".join(map(str, span.what)) if type(span.what) is tuple else span.what
        args = {"drive": span.drive} if span.drive is not None else {}
        args |= {"bytes": span.num_bytes} if span.num_bytes else {}
        phase = PHASES.get(span.kind, span.kind)
        name = f"{span.kind} {what}".rstrip()
        add(process, track, name, span, cat=phase, args=args)

    def count(process: str, name: str, at_s: float, counts: Mapping[str, int]) -> None:
        place = {"pid": _PROCESSES.index(process) + 1, "tid": 0, "ts": us(at_s)}
        events.append({"ph": "C", "name": name, "args": dict(counts)} | place)

    for step in steps:
        add("threads", "steps", f"step {step.number}", step)
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
        _add_lanes(drive, requests, add_span)
        on_way = {"read": 0, "write": 0}
        ends = [(r.ended_s, r.kind, -r.num_bytes) for r in requests]
        for at_s, kind, change in sorted(
            [(r.began_s, r.kind, r.num_bytes) for r in requests] + ends
        ):
            on_way[kind] += change
            count("drives", f"bytes on their way: {drive}", at_s, on_way)
    for at_s, counts in samples:
        count("threads", "memory", at_s, counts)
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
        "otherData": {"version": 1, "steps": [one.number for one in steps]},
        "traceEvents": [*named, *sorted(events, key=lambda one: one["ts"])],
    }


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, JsonValue]:
    args: JsonValue = {"name": name[:_NAME_LENGTH]}
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _thread_names(spans: Iterable[Span]) -> dict[tuple[str, int], str]:
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


def _add_lanes(drive: str, spans: Iterable[Span], add: Any) -> None:
    """Adds a drive's requests to tracks in which no two overlap."""
    ends: list[float] = []
    for span in sorted(spans, key=lambda one: one.began_s):
        free = (lane for lane, end_s in enumerate(ends) if end_s <= span.began_s)
        lane = next(free, len(ends))
        ends[lane : lane + 1] = [span.ended_s]
        add("drives", drive if not lane else f"{drive} ({lane + 1})", span)


def _is_nothing(span: Span) -> bool:
    is_wait = PHASES.get(span.kind) == "wait"
    return is_wait and span.ended_s - span.began_s < _LEAST_WAIT_S
