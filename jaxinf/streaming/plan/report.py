"""A plan as text for a terminal.

Invariant: neighbouring segments that run the same programs share a line.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from jaxinf.streaming.plan.calls import Calls, Policy
from jaxinf.streaming.plan.search import Choice
from jaxinf.streaming.plan.wear import Wear
from jaxinf.streaming.program.graph import Piece, aval_bytes
from jaxinf.streaming.program.meshes import mesh_text
from jaxinf.streaming.program.programs import Program, Programs
from jaxinf.streaming.program.trace import Traced
from jaxinf.terminal import format_bytes

__all__ = ["plan_text"]

_MOST_NAMES = 3


@dataclass(frozen=True)
class _Row:
    """A segment: numbers of its programs, bytes of its params, and their names."""

    segment: int
    forward: int
    backward: int | None
    param_bytes: int
    names: tuple[str, ...]

    @property
    def programs(self) -> tuple[int, int | None, int]:
        return self.forward, self.backward, self.param_bytes


def plan_text(
    traced: Traced,
    programs: Programs,
    calls: Calls,
    policy: Policy,
    peak_bytes: int,
    kept_bytes: int = 0,
    choice: Choice | None = None,
    wear: Wear | None = None,
) -> str:
    """The segments of a plan, a line each, after the cost of a step.

    Args:
      traced: The loss function and its gradient.
      programs: The segments' programs.
      calls: Their calls.
      policy: The treatment of values that backward needs.
      peak_bytes: The peak memory of a step.
      kept_bytes: Memory of params that stay between steps, in addition.
      choice: What was chosen for values and segments.
      wear: The wear of drives.
    """
    held_bytes = sum(aval_bytes(leaf) for leaf in traced.params)
    first, *others = calls.calls
    fetched_bytes = calls.fetched_bytes(first) + sum(
        calls.fetched_bytes(after, before)
        for before, after in zip(calls.calls, others, strict=False)
    )
    numbers = _numbers(calls)
    head = (
        f"{len(traced.names)} leaves of {format_bytes(held_bytes)}; "
        f"{len(programs.forward)} segments, {len(calls.calls)} calls of "
        f"{len(numbers)} programs a step ({policy}); at most "
        f"{format_bytes(fetched_bytes)} of params read, {format_bytes(peak_bytes)} of "
        "memory"
    )
    if traced.mesh is not None:
        head += f"; on {mesh_text(traced.mesh)}"
    if kept_bytes:
        head += f"; {format_bytes(kept_bytes)} of params stay"
    if choice is not None:
        head += f"\n{choice}"
    if wear is not None:
        head += f"\n{wear}"
    lines = [head, "", f"{'segment':>9}  {'forward':>7}  {'backward':>8}  params"]
    for _, group in groupby(_rows(traced, programs, numbers), lambda r: r.programs):
        lines.append(_line(list(group)))
    return "\n".join(lines)


def _numbers(calls: Calls) -> dict[str, int]:
    """A number for each program, in the order of their first call."""
    found: dict[str, int] = {}
    for call in calls.calls:
        found.setdefault(call.program.key, len(found) + 1)
    return found


def _rows(
    traced: Traced, programs: Programs, numbers: dict[str, int]
) -> Iterator[_Row]:
    pairs = zip(programs.forward, programs.backward, strict=True)
    for segment, (forward, backward) in enumerate(pairs):
        sizes = {**_pieces(forward), **_pieces(backward)}
        yield _Row(
            segment,
            numbers.get(forward.key, 0),
            numbers.get(backward.key) if backward else None,
            sum(sizes.values()),
            tuple(_names(traced, sizes)),
        )


def _pieces(program: Program | None) -> dict[Piece, int]:
    if program is None:
        return {}
    return {
        value.origin: aval_bytes(value.aval)
        for value in program.inputs
        if isinstance(value.origin, Piece)
    }


def _names(traced: Traced, pieces: Iterable[Piece]) -> Iterator[str]:
    """The parts of the model that pieces belong to, each once."""
    return iter(dict.fromkeys(_part(traced, piece) for piece in pieces))


def _part(traced: Traced, piece: Piece) -> str:
    index = "".join(f"[{i}]" for i in piece.index)
    rows = f"[{piece.rows[0]}:{piece.rows[1]}]" if piece.rows else ""
    return f"{traced.names[piece.leaf].rsplit('/', 1)[0]}{index}{rows}"


def _line(rows: Sequence[_Row]) -> str:
    first, last = rows[0], rows[-1]
    segments = str(first.segment)
    if len(rows) > 1:
        segments += f"-{last.segment}"
    names = list(first.names[:_MOST_NAMES])
    if len(first.names) > _MOST_NAMES:
        names.append(f"{len(first.names) - _MOST_NAMES} more")
    text = ", ".join(names) or "none"
    each = " each" if len(rows) > 1 else ""
    if len(rows) > 1 and last.names:
        text = f"{text} … {last.names[-1]}"
    backward = "" if first.backward is None else first.backward
    size = format_bytes(first.param_bytes)
    return f"{segments:>9}  {first.forward:>7}  {backward:>8}  {size}{each}: {text}"
