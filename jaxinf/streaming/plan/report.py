"""A plan as text for a terminal.

Invariant: neighbouring segments that run the same programs share a line.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from jaxinf.streaming.program.graph import Piece, aval_bytes
from jaxinf.streaming.program.meshes import mesh_text
from jaxinf.streaming.program.trace import Traced
from jaxinf.terminal import format_bytes

_MOST_NAMES = 3
_MOST_PIECES = 4


def plan_text(plan: Any) -> str:
    """The segments of a `Plan`, a line each, after the cost of a step."""
    traced, calls = plan.traced, plan.calls
    held_bytes = sum(aval_bytes(leaf) for leaf in traced.params)
    befores = [None, *calls.calls]
    fetched_bytes = sum(map(calls.fetched_bytes, calls.calls, befores))
    numbers = {key: number for number, key in enumerate(calls.programs, 1)}
    head = (
        f"{len(traced.names)} leaves of {format_bytes(held_bytes)}; "
        f"{len(plan.programs.forward)} segments, {len(calls.calls)} calls of "
        f"{len(numbers)} programs a step ({plan.policy}); at most "
        f"{format_bytes(fetched_bytes)} of params read, "
        f"{format_bytes(plan.peak_bytes)} of memory"
    )
    if plan.programs.num_parts > 1:
        head += f"; {plan.programs.num_parts} parts of a batch"
    if traced.mesh is not None:
        head += f"; on {mesh_text(traced.mesh)}"
    if plan.resident_bytes:
        head += f"; {format_bytes(plan.resident_bytes)} of params stay"
    title = f"{'segment':>9}  {'forward':>7}  {'backward':>8}  params"
    return "\n".join([head, "", title, *_lines(plan, numbers)])


def largest_text(plan: Any, sizes: Mapping[Piece, int]) -> str:
    """Names what takes most in a `Plan`, by the sizes of parts of params."""
    calls, names = plan.calls, plan.traced.names
    worst = max(calls.calls, key=calls.fetched_bytes)
    pieces = sorted(set(worst.pieces), key=lambda p: -sizes[p])[:_MOST_PIECES]
    named = ", ".join(
        f"{names[p.leaf]}{_index_text(p)} ({sizes[p]} bytes)" for p in pieces
    )
    value_bytes = max((life.num_bytes for life in calls.lives.values()), default=0)
    return f"{named}; the largest value between programs has {value_bytes} bytes"


def _lines(plan: Any, numbers: dict[str, int]) -> Iterator[str]:
    rows = []
    pairs = zip(plan.programs.forward, plan.programs.backward, strict=True)
    for segment, (forward, backward) in enumerate(pairs):
        sizes = dict(forward.params + (backward.params if backward else ()))
        second = numbers.get(backward.key, "") if backward else ""
        alike = numbers.get(forward.key, 0), second, sum(sizes.values())
        names = dict.fromkeys(_part(plan.traced, piece) for piece in sizes)
        rows.append((alike, segment, list(names)))
    for (first, second, num_bytes), group in groupby(rows, lambda row: row[0]):
        (_, start, names), *_, (_, end, last_names) = [*group] * 2
        is_one = start == end
        text = ", ".join(names[:_MOST_NAMES]) or "none"
        if len(names) > _MOST_NAMES:
            text += f", {len(names) - _MOST_NAMES} more"
        if not is_one and last_names:
            text += f" … {last_names[-1]}"
        segments = str(start) if is_one else f"{start}-{end}"
        size = f"{format_bytes(num_bytes)}{'' if is_one else ' each'}"
        yield f"{segments:>9}  {first:>7}  {second:>8}  {size}: {text}"


def _part(traced: Traced, piece: Piece) -> str:
    return f"{traced.names[piece.leaf].rsplit('/', 1)[0]}{_index_text(piece)}"


def _index_text(piece: Piece) -> str:
    """The index of a part of a leaf, as Python writes it."""
    index = "".join(f"[{i}]" for i in piece.index)
    return f"{index}[{piece.rows[0]}:{piece.rows[1]}]" if piece.rows else index
