"""The order of a step's calls, and that of the parts of a batch.

    none again    F0 F1 F2 B2 B1 B0
    all again     F0 F1 F2 B2 F1 B1 F0 B0   what other segments read of F1 is kept

Of several parts of a batch, a segment runs for each before the next one does; the last
ones, with loss and scores, for one part after another. So params are read for all parts
at once. Gradients are added up as they are made:

    2 parts       F0 F0' F1 F1' F2 B2 F2' B2' + B1 B1' + B0 B0' +

Invariant: to compute a value again, the same program is called again with the same
inputs, so its bits are the same.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, pairwise
from typing import Any, TypeAlias

from jaxinf.program import Graph, Value
from jaxinf.streaming.plan.calls import Call, Slot
from jaxinf.streaming.program.graph import Origin, Piece
from jaxinf.streaming.program.keys import Keys
from jaxinf.streaming.program.lifetimes import Stay, last_uses
from jaxinf.streaming.program.programs import Program, Programs, sum_program

_Run: TypeAlias = tuple[Program, int, bool]
"""A program, the part of the batch, and whether it only recomputes for the next one."""


def order_calls(
    graph: Graph,
    programs: Programs,
    again: Container[int],
    keys: Keys,
    num_parts: int = 1,
) -> tuple[tuple[Call, ...], tuple[Slot, ...], tuple[Stay, ...]]:
    """Returns the calls of one step, the slots of its results, and the uses of params.

    Args:
      again: Segments whose values are computed again for backward.
      keys: Of the graph, for programs that add up gradients of parts.
    """
    targets = defaultdict[Value, list[Piece]](list)
    for piece, value in graph.gradients.items():
        targets[value].append(piece)
    slots: dict[tuple[int, Value], Slot] = {}
    totals: dict[Program, Sequence[Slot]] = {}
    calls, starts, numbers = list[Call](), list[int](), count()

    def add(
        run: _Run,
        takes: Iterable[Origin | Slot],
        own: Mapping[int, Sequence[Piece]],
        is_complete: bool,
    ) -> tuple[Slot, ...]:
        """Appends a call; returns what it makes."""
        program, part, is_repeat = run
        makes = tuple(Slot(next(numbers)) for _ in program.outputs)
        pieces = tuple((piece, i) for i, found in own.items() for piece in found)
        what = program, tuple(takes), makes, (), pieces, is_complete
        calls.append(Call(*what, is_repeat, part))
        return makes

    for block in _blocks(programs, again, num_parts):
        starts.append(len(calls))
        recomputed: dict[Value, Slot] = {}  # for the next call
        for run in block:
            program, part, is_repeat = run
            takes = (
                v.origin or recomputed.get(v) or slots[part, v] for v in program.inputs
            )
            outputs = enumerate(program.outputs)
            own = {i: targets[v] for i, v in outputs if v in targets}
            is_summed = num_parts > 1 and bool(own) and not is_repeat
            made = add(run, takes, own, not (is_summed or is_repeat))
            values = dict(zip(program.outputs, made, strict=True))
            recomputed = values if is_repeat else {}
            if not is_repeat:
                slots |= {(part, value): slot for value, slot in values.items()}
            if not is_summed:
                continue
            sums = [made[i] for i in own]
            if part:
                added = [program.outputs[i] for i in own]
                total = sum_program(added, part, num_parts, keys)
                given = (v.origin for v in total.inputs if v.origin is not None)
                handed, is_last = dict(enumerate(own.values())), part == num_parts - 1
                takes = (*totals[program], *sums, *given)
                sums = add((total, part, False), takes, handed, is_last)
            totals[program] = sums
    results = tuple(
        slots[n, value] for n in range(num_parts) for value in graph.results
    )
    blocks = starts if num_parts > 1 else range(len(calls))
    return _with_lives(calls, results), results, _uses(calls, blocks)


def _blocks(
    programs: Programs, again: Container[int], num_parts: int
) -> Iterator[Sequence[_Run]]:
    """Yields calls in order; params stay from the first to the last of a block."""
    parts, forward, early = range(num_parts), programs.forward, programs.num_early
    last = len(forward) - 1

    def backward(k: int, part: int) -> Iterator[_Run]:
        program = programs.backward[k]
        if program is None:
            return
        is_read = not {*program.inputs}.isdisjoint(forward[k].outputs)
        if k in again and k < last and is_read:
            yield forward[k], part, True
        yield program, part, False

    def each(program: Program) -> Sequence[_Run]:
        return [(program, part, False) for part in parts if program.outputs]

    yield from map(each, forward[:early])
    yield [
        run
        for part in parts
        for run in (
            *((one, part, False) for one in forward[early:] if one.outputs),
            *(run for k in range(last, early - 1, -1) for run in backward(k, part)),
        )
    ]
    for k in range(early - 1, -1, -1):
        yield [run for part in parts for run in backward(k, part)]
    yield from map(each, programs.free)


def _uses(calls: Sequence[Call], starts: Sequence[int]) -> tuple[Stay, ...]:
    """Returns when parts of params are in memory, in order.

    A part stays between calls of a block that read it, and from a call to the next.

    Args:
      starts: First calls of blocks.
    """
    latest, found = dict[Piece, list[Any]](), list[list[Any]]()
    for start, end in pairwise([*starts, len(calls)]):
        for number in range(start, end):
            for piece, num_bytes in calls[number].program.params:
                own = latest.get(piece)
                if own is None or own[1] <= min(start, number - 1):
                    own = latest[piece] = [number, number + 1, num_bytes, piece]
                    found.append(own)
                own[1] = number + 1
    return tuple(Stay(*own) for own in found)


def _with_lives(calls: Sequence[Call], results: Sequence[Slot]) -> tuple[Call, ...]:
    """Returns the calls with what they free, and no slots for what none takes."""
    last = last_uses(call.takes for call in calls)
    last.update(dict.fromkeys(results, len(calls)))
    return tuple(
        replace(
            call,
            makes=tuple(slot if slot in last else None for slot in call.makes),
            frees=tuple(
                ref
                for ref in dict.fromkeys(call.takes)
                if type(ref) is Slot and last[ref] == number
            ),
        )
        for number, call in enumerate(calls)
    )
