"""A plan as text for a terminal.

Invariant: neighbouring segments that run the same programs share a line.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from jaxinf.streaming.program.graph import Piece, aval_bytes
from jaxinf.streaming.program.meshes import mesh_text
from jaxinf.streaming.program.trace import Traced
from jaxinf.terminal import format_bytes

_MOST_NAMES = 3
_MOST_PIECES = 4
_TITLES = ("calls", "segment", "programs", "memory")
_TITLES += ("values leaving", "params read", "params")


def plan_text(plan: Any) -> str:
    """The calls of a `Plan`, those of neighbouring segments in a line."""
    traced, calls = plan.traced, plan.calls
    held_bytes = sum(aval_bytes(leaf) for leaf in traced.params)
    read_bytes = sum(one.unit.num_bytes for one in plan.reading.repeated)
    away_bytes = sum(plan.lives[slot].num_bytes for slot in plan.evictions)
    head = (
        f"{len(traced.names)} leaves of {format_bytes(held_bytes)}; "
        f"{len(plan.cuts) - 1} segments, {len(calls)} calls of "
        f"{len(plan.programs)} programs a step ({plan.policy}); "
        f"{format_bytes(read_bytes)} of params read, {format_bytes(away_bytes)} of "
        f"values that leave, {format_bytes(plan.peak_bytes)} of memory"
    )
    if plan.traffic is not None:
        head += (
            f"; drives read {format_bytes(plan.traffic.drive_read_bytes)} and write "
            f"{format_bytes(plan.traffic.drive_write_bytes)}"
        )
    if plan.num_parts > 1:
        head += f"; {plan.num_parts} parts of a batch"
    if traced.mesh is not None:
        head += f"; on {mesh_text(traced.mesh)}"
    kept_bytes = sum(one.num_bytes for one in plan.reading.never_again)
    if stay_bytes := plan.resident_bytes + kept_bytes:
        head += f"; {format_bytes(stay_bytes)} of params stay from step to step"
    lines = [_TITLES, *_lines(plan)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = ([*map(str.rjust, line[:-1], widths), line[-1]] for line in lines)
    return "\n".join([head, "", *("  ".join(line).rstrip() for line in cells)])


def largest_text(plan: Any, sizes: Mapping[Piece, int]) -> str:
    """Names what takes most in a `Plan`, by the sizes of parts of params."""
    names = plan.traced.names
    worst = max(plan.calls, key=lambda call: sum(n for _, n in call.params))

    def order(piece: Piece) -> tuple[Any, ...]:  # a set's differs between processes
        return -sizes[piece], piece.leaf, piece.index, piece.rows or ()

    pieces = sorted(set(worst.reads), key=order)[:_MOST_PIECES]
    named = ", ".join(
        f"{names[p.leaf]}{_index_text(p)} ({sizes[p]} bytes)" for p in pieces
    )
    value_bytes = max((life.num_bytes for life in plan.lives.values()), default=0)
    return f"{named}; the largest value between programs has {value_bytes} bytes"


class _Row(NamedTuple):
    """Neighbouring calls of one segment, in one direction."""

    direction: str
    segment: str
    numbers: Sequence[int]
    programs: str
    read_bytes: int
    left_bytes: int
    names: Sequence[str]

    @property
    def alike(self) -> Any:
        return self.direction, self.programs, self.read_bytes, self.left_bytes


def _rows(plan: Any) -> Iterator[_Row]:
    numbers = {key: str(number) for number, key in enumerate(plan.programs, 1)}
    left, read = Counter[int](), Counter[int]()
    for one in plan.reading.repeated:
        read[one.first] += one.unit.num_bytes
    for slot, one in plan.evictions.items():
        left[one.written] += plan.lives[slot].num_bytes
    places, before = [], ("", "")
    for call in plan.calls:
        direction, _, segment = call.program.name.partition(" ")
        if not call.program.is_sum:
            before = "backward" if call.is_repeat else direction, segment
        places.append(before)
    for (direction, segment), group in groupby(range(len(places)), places.__getitem__):
        own = list(group)
        calls = [plan.calls[n] for n in own]
        yield _Row(
            direction,
            segment,
            own,
            " ".join(dict.fromkeys(numbers[one.program.key] for one in calls)),
            sum(read[n] for n in own),
            sum(left[n] for n in own),
            list(dict.fromkeys(_part(plan.traced, p) for c in calls for p in c.reads)),
        )


def _lines(plan: Any) -> Iterator[tuple[str, ...]]:
    """Yields a line for each run of segments that are called alike."""
    memory_bytes = plan.call_bytes()
    for _, group in groupby(_rows(plan), lambda row: row.alike):
        rows = list(group)
        first, last = rows[0], rows[-1]
        own = range(first.numbers[0], last.numbers[-1] + 1)
        each = " each" if len(rows) > 1 else ""
        text = ", ".join(first.names[:_MOST_NAMES])
        if len(first.names) > _MOST_NAMES:
            text += f", {len(first.names) - _MOST_NAMES} more"
        if each and last.names:
            text += f" … {last.names[-1]}"
        yield (
            _range(own[0], own[-1]),
            f"{first.direction} {_range(first.segment, last.segment)}",
            first.programs,
            format_bytes(max(memory_bytes[n] for n in own)),
            f"{format_bytes(first.left_bytes)}{each}" if first.left_bytes else "",
            f"{format_bytes(first.read_bytes)}{each}" if first.read_bytes else "",
            text,
        )


def _range(first: Any, last: Any) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _part(traced: Traced, piece: Piece) -> str:
    return f"{traced.names[piece.leaf].rsplit('/', 1)[0]}{_index_text(piece)}"


def _index_text(piece: Piece) -> str:
    """The index of a part of a leaf, as Python writes it."""
    index = "".join(f"[{i}]" for i in piece.index)
    return f"{index}[{piece.rows[0]}:{piece.rows[1]}]" if piece.rows else index
