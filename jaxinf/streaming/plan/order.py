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
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

from jaxinf.program import Graph, Value
from jaxinf.streaming.plan.calls import Call, Slot
from jaxinf.streaming.program.graph import Origin, Piece
from jaxinf.streaming.program.programs import Program, Programs

_Run: TypeAlias = tuple[Program, int, bool]
"""A program, the part of the batch, and whether it only recomputes for the next one."""

Sums: TypeAlias = Mapping[Program, Sequence[Program]]
"""Programs that add gradients of a part to those before it, by what makes them."""


def sequence(
    graph: Graph,
    programs: Programs,
    again: Container[int],
    sums: Sums,
    num_parts: int = 1,
) -> tuple[tuple[Call, ...], tuple[Slot, ...]]:
    """Returns the calls of one step, and the slots of its results.

    Args:
      again: Segments whose values are computed again for backward.
      sums: From `sum_programs`, for several parts of a batch.
    """
    targets = defaultdict[Value, list[Piece]](list)
    for piece, value in graph.gradients.items():
        targets[value].append(piece)
    slots: dict[tuple[int, Value], Slot] = {}
    totals: dict[Program, Sequence[Slot]] = {}
    calls, starts, num_slots = list[Call](), list[int](), 0

    def add(
        run: _Run, takes: Sequence[Origin | Slot], own: Mapping[int, Sequence[Piece]]
    ) -> Sequence[Slot]:
        nonlocal num_slots
        program, part, is_repeat = run
        makes = [Slot(num_slots + i) for i in range(len(program.outputs))]
        num_slots += len(makes)
        gradients = tuple((piece, i) for i, pieces in own.items() for piece in pieces)
        what = program, tuple(takes), tuple(makes), (), gradients
        calls.append(Call(*what, is_repeat, part))
        return makes

    def add_up(maker: Program, part: int, found: Sequence[Slot], own: list) -> None:
        if part:
            program = sums[maker][part - 1]
            numbers = [v.origin for v in program.inputs if v.origin is not None]
            handed = dict(enumerate(own)) if part == num_parts - 1 else {}
            takes = [*totals[maker], *found, *numbers]
            found = add((program, part, False), takes, handed)
        totals[maker] = found

    for block in _blocks(programs, again, num_parts):
        starts.append(len(calls))
        recomputed: dict[Value, Slot] = {}  # for the next call
        for program, part, is_repeat in block:
            takes = [
                v.origin or recomputed.get(v) or slots[part, v] for v in program.inputs
            ]
            outputs = () if is_repeat else enumerate(program.outputs)
            own = {i: targets[v] for i, v in outputs if v in targets}
            is_summed = program in sums and not is_repeat
            handed = {} if is_summed else own
            found = add((program, part, is_repeat), takes, handed)
            outs = zip(program.outputs, found, strict=True)
            recomputed = dict(outs) if is_repeat else {}
            if not is_repeat:
                made = zip(program.outputs, found, strict=True)
                slots |= {(part, value): slot for value, slot in made}
            if is_summed:
                add_up(program, part, [found[i] for i in own], [*own.values()])
    results = tuple(
        slots[n, value] for n in range(num_parts) for value in graph.results
    )
    held = _held(calls, starts) if num_parts > 1 else {}
    return _with_lives(calls, results, held), results


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


def _held(
    calls: Sequence[Call], starts: Sequence[int]
) -> Mapping[int, Mapping[Piece, int]]:
    """Returns by call the params that it does not read, but calls around it do."""
    held = defaultdict[int, dict[Piece, int]](dict)
    for start, stop in pairwise([*starts, len(calls)]):
        last: dict[Piece, int] = {}
        for number in range(start, stop):
            for piece, num_bytes in calls[number].program.params:
                for between in range(last.get(piece, number) + 1, number):
                    held[between][piece] = num_bytes
                last[piece] = number
    return held


def _with_lives(
    calls: Sequence[Call],
    results: Sequence[Slot],
    held: Mapping[int, Mapping[Piece, int]],
) -> tuple[Call, ...]:
    """Returns the calls with what they free, and no slots for what none takes."""
    last: dict[Slot, int] = {}
    for number, call in enumerate(calls):
        last.update((ref, number) for ref in call.takes if type(ref) is Slot)
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
            held=tuple(held[number].items()) if number in held else (),
        )
        for number, call in enumerate(calls)
    )


def lenders_of(
    calls: Sequence[Call], programs: Programs, sums: Sums, *, may_leave: bool
) -> frozenset[Slot] | None:
    """Returns the values whose memory outputs may reuse; None for all.

    Others may leave, and then lend nothing, so memory is planned without that.
    """
    if not may_leave:
        return None
    makers = set[Program]() if sums else {one for one in programs.backward if one}
    makers |= {program for own in sums.values() for program in own}
    made = (call.makes for call in calls if call.program in makers)
    return frozenset(slot for own in made for slot in own if slot is not None)
