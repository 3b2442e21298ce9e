"""A plan as text for a terminal: a loop over its calls.

Invariant: every call is in one line, in the order in which they run.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from jaxinf.program import aval_bytes
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.meshes import mesh_text
from jaxinf.terminal import format_bytes

_MOST_NAMES = 3
_MOST_PIECES = 4
_TITLES = ("calls", "program", "memory", "values leaving", "params read", "params")


def plan_text(plan: Any) -> str:
    """The calls of a `Plan`, successive ones of a segment in a line."""
    traced, reading, show = plan.traced, plan.reads, format_bytes
    read_bytes = sum(one.unit.num_bytes for one in reading.repeated)
    away_bytes = sum(plan.lives[slot].num_bytes for slot in plan.evictions)
    kept = {one.unit for one in reading.fetches}
    kept -= {one.unit for one in reading.repeated}
    head = [
        f"{len(traced.names)} leaves of {show(sum(map(aval_bytes, traced.params)))}",
        f"{len(plan.cuts) - 1} segments, {len(plan.calls)} calls of "
        f"{len(plan.programs)} programs a step ({plan.policy})",
        f"{show(read_bytes)} of params read, {show(away_bytes)} of values that leave, "
        f"{show(plan.peak_bytes)} of memory",
    ]
    if plan.num_parts > 1:
        head.append(f"{plan.num_parts} parts of a batch")
    if traced.mesh is not None:
        head.append(f"on {mesh_text(traced.mesh)}")
    if stay_bytes := plan.resident_bytes + sum(unit.num_bytes for unit in kept):
        head.append(f"{show(stay_bytes)} of params stay from step to step")
    lines = [_TITLES, *_lines(plan)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = ([*map(str.rjust, line[:-1], widths), line[-1]] for line in lines)
    return "\n".join(["; ".join(head), "", *("  ".join(one).rstrip() for one in cells)])


def largest_text(plan: Any) -> str:
    """Names what takes most in a `Plan`."""
    params = {one for call in plan.calls for one in call.program.params}
    sizes = sorted(params, key=lambda one: -one[1])[:_MOST_PIECES]
    names = plan.traced.names
    named = [
        f"{names[p.leaf]}{_index_text(p)} ({format_bytes(size)})" for p, size in sizes
    ]
    value_bytes = max((life.num_bytes for life in plan.lives.values()), default=0)
    largest = f"the largest value between programs has {format_bytes(value_bytes)}"
    return f"{', '.join(named)}; {largest}"


def _lines(plan: Any) -> Iterator[tuple[str, ...]]:
    memory_bytes, left, read = plan.call_bytes(), Counter[int](), Counter[int]()
    for one in plan.reads.repeated:
        read[one.first] += one.unit.num_bytes
    for slot, one in plan.evictions.items():
        left[one.written] += plan.lives[slot].num_bytes
    programs = [call.program for call in plan.calls]
    for name, group in groupby(range(len(programs)), lambda n: programs[n].name):
        own = [*group]
        params = [piece for n in own for piece, _ in programs[n].params]
        names = list(dict.fromkeys(_name(plan, piece) for piece in params))
        more = [f"{len(names) - _MOST_NAMES} more"] * (len(names) > _MOST_NAMES)
        moved = (sum(counter[n] for n in own) for counter in (left, read))
        yield (
            f"{own[0]}-{own[-1]}" if own[1:] else f"{own[0]}",
            name,
            format_bytes(max(memory_bytes[n] for n in own)),
            *(format_bytes(num_bytes) if num_bytes else "" for num_bytes in moved),
            ", ".join([*names[:_MOST_NAMES], *more]),
        )


def _name(plan: Any, piece: Piece) -> str:
    return f"{plan.traced.names[piece.leaf].rsplit('/', 1)[0]}{_index_text(piece)}"


def _index_text(piece: Piece) -> str:
    """The index of a part of a leaf, as Python writes it."""
    index = "".join(f"[{i}]" for i in piece.index)
    return f"{index}[{piece.rows[0]}:{piece.rows[1]}]" if piece.rows else index
