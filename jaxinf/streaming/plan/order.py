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

import itertools
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxinf.program import Value
from jaxinf.streaming.plan.calls import Call, Plan, Policy, ValueSlot
from jaxinf.streaming.plan.leaving import least_bytes, may_leave
from jaxinf.streaming.program.graph import Origin, Piece
from jaxinf.streaming.program.lifetimes import OrderedProgram, Stay, last_uses
from jaxinf.streaming.program.programs import (
    Program,
    Programs,
    make_programs,
    sum_program,
)


class _Turn(NamedTuple):
    """A program's turn for a part of the batch.

    Attributes:
      is_repeat: Whether it only recomputes for the next one.
    """

    program: Program
    part: int
    is_repeat: bool = False


def plan_of(
    ready: OrderedProgram,
    cuts: Sequence[int],
    policy: Policy = "recompute",
    num_parts: int = 1,
    again: Container[int] = (),
) -> Plan:
    """Returns the plan of given cuts, without values that leave and temporaries.

    Args:
      again: Segments that are recomputed; all with ``"recompute"``.
    """
    if policy == "recompute":
        again = range(len(cuts))
    graph, programs = ready.graph, make_programs(ready, tuple(cuts))
    targets = defaultdict[Value, list[Piece]](list)
    for piece, value in graph.gradients.items():
        targets[value].append(piece)
    slots: dict[tuple[int, Value], ValueSlot] = {}
    totals: dict[Program, Sequence[ValueSlot]] = {}
    calls, starts, numbers = list[Call](), list[int](), itertools.count()
    last = num_parts - 1

    for block in _blocks(programs, again, num_parts):
        starts.append(len(calls))
        recomputed: dict[Value, ValueSlot] = {}  # for the next call
        for turn in block:
            program, part, is_repeat = turn
            takes = [
                v.origin or recomputed.get(v) or slots[part, v] for v in program.inputs
            ]
            outputs = enumerate(program.outputs)
            own = {i: targets[v] for i, v in outputs if v in targets}
            is_summed = num_parts > 1 and bool(own)
            made = tuple(ValueSlot(next(numbers)) for _ in program.outputs)
            is_complete = not (is_summed or is_repeat)
            calls.append(_call(turn, takes, made, own, is_complete=is_complete))
            values = dict(zip(program.outputs, made, strict=True))
            recomputed = values if is_repeat else {}
            if is_repeat:
                continue
            slots |= {(part, value): slot for value, slot in values.items()}
            sums = tuple([made[i] for i in own])
            if is_summed and part:
                avals, is_last = [program.outputs[i].aval for i in own], part == last
                count = num_parts if is_last else None
                total = sum_program(ready, tuple(avals), part == 1, count)
                given = [v.origin for v in total.inputs if v.origin is not None]
                takes = [*totals[program], *sums, *given]
                sums = tuple(ValueSlot(next(numbers)) for _ in total.outputs)
                handed, end = dict(enumerate(own.values())), _Turn(total, part)
                calls.append(_call(end, takes, sums, handed, is_complete=is_last))
            totals[program] = sums
    results = tuple(
        slots[n, value] for n in range(num_parts) for value in graph.results
    )
    plan = Plan(
        traced=ready.traced,
        cuts=tuple(cuts),
        policy=policy,
        num_parts=num_parts,
        calls=_with_lives(calls, results),
        results=results,
        uses=_uses(calls, starts if num_parts > 1 else range(len(calls))),
        is_offloaded=may_leave(ready.traced, policy, num_parts),
    )
    return replace(plan, peak_bytes=least_bytes(plan))


def _call(
    turn: _Turn,
    takes: Iterable[Origin | ValueSlot],
    makes: tuple[ValueSlot, ...],
    gradients: Mapping[int, Sequence[Piece]],
    *,
    is_complete: bool,
) -> Call:
    pieces = tuple((piece, i) for i, own in gradients.items() for piece in own)
    return Call(
        program=turn.program,
        takes=tuple(takes),
        makes=makes,
        pieces=pieces,
        gradients=pieces if is_complete else (),
        is_repeat=turn.is_repeat,
        part=turn.part,
    )


def _blocks(
    programs: Programs, again: Container[int], num_parts: int
) -> Iterator[Sequence[_Turn]]:
    """Yields calls in order; params stay from the first to the last of a block."""
    parts, forward, early = range(num_parts), programs.forward, _num_early(programs)
    last = len(forward) - 1

    def backward(k: int, part: int) -> Iterator[_Turn]:
        program = programs.backward[k]
        if program is None:
            return
        is_read = not {*program.inputs}.isdisjoint(forward[k].outputs)
        if k in again and k < last and is_read:
            yield _Turn(forward[k], part, is_repeat=True)
        yield _Turn(program, part)

    def each(program: Program) -> Sequence[_Turn]:
        return [_Turn(program, part) for part in parts if program.outputs]

    yield from map(each, forward[:early])
    yield [
        turn
        for part in parts
        for turn in (
            *(_Turn(one, part) for one in forward[early:] if one.outputs),
            *(one for k in range(last, early - 1, -1) for one in backward(k, part)),
        )
    ]
    for k in range(early - 1, -1, -1):
        yield [turn for part in parts for turn in backward(k, part)]
    yield from map(each, programs.free)


def _num_early(programs: Programs) -> int:
    """Returns how many segments run forward for all parts before the next one does.

    From the last one that reads params on, loss and scores are of one part at a time.
    So are the segments before it that read its params in backward alone: of a tied
    table they take the scores' cotangents.
    """
    forward, backward = programs.forward, programs.backward
    pairs = enumerate(zip(forward, backward, strict=True))
    readers = [k for k, pair in pairs if any(one and one.params for one in pair)]
    early = max(readers, default=0)
    late = {one for program in forward[early:] for one in program.params}
    while early and (before := backward[early - 1]) is not None:
        if late.isdisjoint({*before.params} - {*forward[early - 1].params}):
            break
        early -= 1
    return early


def _uses(calls: Sequence[Call], starts: Sequence[int]) -> tuple[Stay, ...]:
    """Returns when parts of params are in memory, in order.

    A part stays between calls of a block that read it, and from a call to the next.

    Args:
      starts: First calls of blocks.
    """
    latest, found = dict[Piece, int](), list[Stay]()
    for start, end in itertools.pairwise([*starts, len(calls)]):
        for number in range(start, end):
            for piece, num_bytes in calls[number].program.params:
                own = latest.get(piece)
                if own is None or found[own].stop <= min(start, number - 1):
                    own = latest[piece] = len(found)
                    found.append(Stay(number, number + 1, num_bytes, piece))
                found[own] = found[own]._replace(stop=number + 1)
    return tuple(found)


def _with_lives(
    calls: Sequence[Call], results: Sequence[ValueSlot]
) -> tuple[Call, ...]:
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
                if type(ref) is ValueSlot and last[ref] == number
            ),
        )
        for number, call in enumerate(calls)
    )
