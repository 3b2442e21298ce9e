"""What a traced step moves and holds in forward, in backward, and after them.

Invariant: bytes are shared among phases by the time that their span is in each.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from jaxinf.cli.report.figures import is_amount
from jaxinf.terminal import format_bytes

__all__ = ["phase_rows"]

_PHASES = ("forward", "backward", "after them")
_MOST_STEPS = 10


class _Span(NamedTuple):
    name: str
    kind: str
    began_us: float
    ended_us: float
    num_bytes: float

    def within(self, began_us: float, ended_us: float) -> float:
        """The time that it is in a window."""
        return max(0.0, min(self.ended_us, ended_us) - max(self.began_us, began_us))


def phase_rows(
    events: Sequence[Mapping[str, Any]],
) -> tuple[list[str], list[list[str]]]:
    """Returns head and rows of a table; no rows if the programs have no phases.

    Args:
      events: Those of a trace; what has another form is left out.
    """
    spans = list(_spans(events))
    windows = _windows(spans)
    samples = [
        (event["ts"], event["args"]["process"])
        for event in events
        if event.get("name") == "memory"
        and isinstance(event.get("args"), dict)
        and is_amount(event.get("ts"))
        and is_amount(event["args"].get("process"))
    ]
    rows = []
    for phase in filter(windows.get, _PHASES):
        parts = windows[phase]
        whole_us = sum(end - begin for begin, end in parts)

        def moved(kind: str, parts: Sequence[tuple[float, float]] = parts) -> float:
            shares = (
                one.num_bytes * one.within(*part) / (one.ended_us - one.began_us)
                for one in spans
                for part in parts
                if one.kind == kind
            )
            return sum(shares)

        busy_us = sum(o.within(*p) for o in spans for p in parts if o.kind == "program")
        held = [m for at, m in samples if any(b <= at < e for b, e in parts)]
        texts = [f"{whole_us / 1e6 / len(parts):.3g} s", f"{busy_us / whole_us:.0%}"]
        texts += [
            f"{format_bytes(round(moved(kind) * 1e6 / whole_us))}/s"
            for kind in ("read", "write")
        ]
        shown = (min(held), sum(held) / len(held), max(held)) if held else ()
        texts.append(" / ".join(format_bytes(round(one)) for one in shown))
        rows.append([phase, *texts])
    head = ["phase", "of a step", "programs busy", "drives read", "drives write"]
    return [*head, "memory: least / mean / most"], rows


def _spans(events: Sequence[Mapping[str, Any]]) -> Iterator[_Span]:
    """Yields steps, programs, and what drives do, which has tracks of its own."""
    drives = {
        event.get("pid")
        for event in events
        if event.get("name") == "process_name" and "drives" in str(event.get("args"))
    }
    for event in events:
        began_us, took_us = event.get("ts"), event.get("dur")
        if event.get("ph") != "X" or not (is_amount(began_us) and is_amount(took_us)):
            continue
        args, kind = event.get("args"), str(event.get("cat", "step"))
        is_of_thread = event.get("pid") not in drives
        if not took_us or (kind in ("read", "write") and is_of_thread):
            continue
        found = args.get("bytes") if isinstance(args, dict) else 0
        num_bytes = found if is_amount(found) else 0
        name = str(event.get("name"))[:80]
        yield _Span(name, kind, began_us, began_us + took_us, num_bytes)


def _windows(spans: Sequence[_Span]) -> Mapping[str, list[tuple[float, float]]]:
    """Returns the time of each phase in each of the first traced steps.

    Backward begins with its first program; what runs forward again is a part of it.
    """
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    steps = [one for one in spans if one.kind == "step"]
    backward = [one for one in spans if one.name.startswith("program backward")]
    for step in steps[:_MOST_STEPS]:
        own = [one for one in backward if step.within(one.began_us, one.ended_us)]
        if own:
            begins, ends = min(o.began_us for o in own), max(o.ended_us for o in own)
            times = step.began_us, begins, ends, step.ended_us
            for phase, part in zip(_PHASES, pairwise(times), strict=True):
                if part[0] < part[1]:
                    found[phase].append(part)
    return found
