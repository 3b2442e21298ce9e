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


def describe_plan(plan: Any) -> str:
    """Returns a table of a `Plan`'s calls, successive ones of a program in a line."""
    traced, show = plan.traced, format_bytes
    fetches, repeated = plan.reads.fetches, plan.reads.repeated
    read_bytes = sum(fetch.unit.num_bytes for fetch in repeated)
    lasting = {x.unit for x in fetches} - {x.unit for x in repeated}
    head = [
        f"{len(traced.names)} leaves of {show(sum(map(aval_bytes, traced.params)))}",
        f"{len(plan.cuts) - 1} segments, {len(plan.calls)} calls of "
        f"{len(plan.programs)} programs a step ({plan.policy})",
        f"{show(read_bytes)} of params read, {show(plan.evicted_bytes)} of values that "
        f"leave, {show(plan.peak_bytes)} of memory",
    ]
    if plan.num_parts > 1:
        head.append(f"{plan.num_parts} parts of a batch")
    if traced.mesh is not None:
        head.append(f"on {mesh_text(traced.mesh)}")
    if stay_bytes := plan.resident_bytes + sum(unit.num_bytes for unit in lasting):
        head.append(f"{show(stay_bytes)} of params stay from step to step")
    lines = [_TITLES, *_lines(plan)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ([*map(str.rjust, line[:-1], widths), line[-1]] for line in lines)
    return "\n".join(["; ".join(head), "", *("  ".join(row).rstrip() for row in rows)])


def describe_largest(plan: Any) -> str:
    """Names the largest pieces of params and the largest value of a `Plan`."""
    params = {param for call in plan.calls for param in call.program.params}
    sizes = sorted(params, key=lambda param: -param[1])[:_MOST_PIECES]
    names = plan.traced.names
    named = [
        f"{names[p.leaf]}{_index_text(p)} ({format_bytes(size)})" for p, size in sizes
    ]
    value_bytes = max((life.num_bytes for life in plan.lives.values()), default=0)
    largest = f"the largest value between programs has {format_bytes(value_bytes)}"
    return f"{', '.join(named)}; {largest}"


def _lines(plan: Any) -> Iterator[tuple[str, ...]]:
    memory_bytes, left, read = plan.call_bytes(), Counter[int](), Counter[int]()
    for fetch in plan.reads.repeated:
        read[fetch.first] += fetch.unit.num_bytes
    for value, eviction in plan.evictions.items():
        left[eviction.leave_call] += plan.lives[value].num_bytes
    programs = [call.program for call in plan.calls]
    for name, group in groupby(range(len(programs)), lambda n: programs[n].name):
        numbers = [*group]
        params = [piece for n in numbers for piece, _ in programs[n].params]
        names = list(dict.fromkeys(_name(plan, piece) for piece in params))
        more = [f"{len(names) - _MOST_NAMES} more"] * (len(names) > _MOST_NAMES)
        moved = (sum(counter[n] for n in numbers) for counter in (left, read))
        yield (
            f"{numbers[0]}-{numbers[-1]}" if numbers[1:] else f"{numbers[0]}",
            name,
            format_bytes(max(memory_bytes[n] for n in numbers)),
            *(format_bytes(num_bytes) if num_bytes else "" for num_bytes in moved),
            ", ".join([*names[:_MOST_NAMES], *more]),
        )


def _name(plan: Any, piece: Piece) -> str:
    return f"{plan.traced.names[piece.leaf].rsplit('/', 1)[0]}{_index_text(piece)}"


def _index_text(piece: Piece) -> str:
    index = "".join(f"[{i}]" for i in piece.index)
    return f"{index}[{piece.rows[0]}:{piece.rows[1]}]" if piece.rows else index
