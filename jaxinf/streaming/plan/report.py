"""A plan as text for a terminal: a loop over its calls.

Invariant: neighbouring segments that run the same programs share a line.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from jaxinf.streaming.program.graph import Piece, aval_bytes
from jaxinf.streaming.program.meshes import mesh_text
from jaxinf.terminal import format_bytes

_MOST_NAMES = 3
_MOST_PIECES = 4
_TITLES = ("calls", "segment", "programs", "memory")
_TITLES += ("values leaving", "params read", "params")


def plan_text(plan: Any) -> str:
    """The calls of a `Plan`, those of neighbouring segments in a line."""
    traced = plan.traced
    read_bytes = sum(one.unit.num_bytes for one in plan.reading.repeated)
    away_bytes = sum(plan.lives[slot].num_bytes for slot in plan.evictions)
    kept_bytes = sum(one.num_bytes for one in plan.reading.never_again)
    head = (
        f"{len(traced.names)} leaves of "
        f"{format_bytes(sum(map(aval_bytes, traced.params)))}; "
        f"{len(plan.cuts) - 1} segments, {len(plan.calls)} calls of "
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


def _segments(plan: Any) -> Iterator[tuple[tuple[Any, ...], str, list[int]]]:
    """Yields what a segment's calls run, read and lose; its number; and the calls."""
    numbers = {key: str(number) for number, key in enumerate(plan.programs, 1)}
    left, read = Counter[int](), Counter[int]()
    for one in plan.reading.repeated:
        read[one.first] += one.unit.num_bytes
    for slot, one in plan.evictions.items():
        left[one.written] += plan.lives[slot].num_bytes
    places, place = [], ("", "")
    for call in plan.calls:
        direction, _, segment = call.program.name.partition(" ")
        if not call.program.is_sum:  # which is of the segment before it
            place = "backward" if call.is_repeat else direction, segment
        places.append(place)
    for (direction, segment), group in groupby(range(len(places)), places.__getitem__):
        own = list(group)
        keys = dict.fromkeys(numbers[plan.calls[n].program.key] for n in own)
        left_bytes, read_bytes = (sum(one[n] for n in own) for one in (left, read))
        yield (direction, " ".join(keys), left_bytes, read_bytes), segment, own


def _lines(plan: Any) -> Iterator[tuple[str, ...]]:
    """Yields a line for each run of segments that are called alike."""
    memory_bytes = plan.call_bytes()
    for alike, group in groupby(_segments(plan), lambda one: one[0]):
        direction, programs, *moved = alike
        rows = list(group)
        names = [
            list(
                dict.fromkeys(_name(plan, p) for n in own for p in plan.calls[n].reads)
            )
            for _, _, own in rows
        ]
        each = " each" if len(rows) > 1 else ""
        text = ", ".join(names[0][:_MOST_NAMES])
        if len(names[0]) > _MOST_NAMES:
            text += f", {len(names[0]) - _MOST_NAMES} more"
        if each and names[-1]:
            text += f" … {names[-1][-1]}"
        first, last = rows[0][2][0], rows[-1][2][-1]
        yield (
            _range(first, last),
            f"{direction} {_range(rows[0][1], rows[-1][1])}",
            programs,
            format_bytes(max(memory_bytes[first : last + 1])),
            *(f"{format_bytes(n)}{each}" if n else "" for n in moved),
            text,
        )


def _range(first: Any, last: Any) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _name(plan: Any, piece: Piece) -> str:
    name = plan.traced.names[piece.leaf].rsplit("/", 1)[0]
    return f"{name}{_index_text(piece)}"


def _index_text(piece: Piece) -> str:
    """The index of a part of a leaf, as Python writes it."""
    index = "".join(f"[{i}]" for i in piece.index)
    return f"{index}[{piece.rows[0]}:{piece.rows[1]}]" if piece.rows else index
