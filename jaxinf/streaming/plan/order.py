"""The order of a step's calls, and that of the parts of a batch.

    none recomputed    F0 F1 F2 B2 B1 B0
    all recomputed     F0 F1 F2 B2 F1 B1 F0 B0   what others read of F1 is kept

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
from jaxinf.streaming.plan.calls import Call, Plan, Policy, StepValue
from jaxinf.streaming.plan.offload import least_peak_bytes, may_offload
from jaxinf.streaming.program.graph import Origin, Piece
from jaxinf.streaming.program.lifetimes import OrderedProgram, Stay, last_uses
from jaxinf.streaming.program.programs import (
    Program,
    Programs,
    make_programs,
    sum_program,
)


def make_plan(
    ordered: OrderedProgram,
    cuts: Sequence[int],
    policy: Policy = "recompute",
    num_parts: int = 1,
    recomputed: Container[int] = (),
) -> Plan:
    """Returns the plan of given cuts, without values that leave and temporaries.

    Args:
      recomputed: Segments that backward recomputes; all with ``"recompute"``.
    """
    if policy == "recompute":
        recomputed = range(len(cuts))
    programs, calls = make_programs(ordered, tuple(cuts)), _Calls(ordered, num_parts)
    starts = [calls.add_block(b) for b in _blocks(programs, recomputed, num_parts)]
    pairs = itertools.product(range(num_parts), ordered.graph.results)
    results = tuple(calls.values[pair] for pair in pairs)
    if num_parts == 1:
        starts = range(len(calls.calls))
    plan = Plan(
        traced=ordered.traced,
        cuts=tuple(cuts),
        policy=policy,
        num_parts=num_parts,
        calls=_free_values(calls.calls, results),
        results=results,
        param_stays=_param_stays(calls.calls, starts),
        may_offload=may_offload(ordered.traced, policy, num_parts),
    )
    return replace(plan, peak_bytes=least_peak_bytes(plan))


class _Turn(NamedTuple):
    """A program's turn for a part of the batch; a repeat recomputes for the next."""

    program: Program
    part: int
    is_repeat: bool = False


class _Calls:
    """Calls as they are made, and the value of each part that each graph's value is."""

    def __init__(self, ordered: OrderedProgram, num_parts: int) -> None:
        self._ordered, self._num_parts = ordered, num_parts
        self.calls = list[Call]()
        self.values: dict[tuple[int, Value], StepValue] = {}
        self._sums: dict[Program, Sequence[StepValue]] = {}  # of the parts so far
        self._numbers = itertools.count()
        self._targets = defaultdict[Value, list[Piece]](list)
        for piece, value in ordered.graph.gradients.items():
            self._targets[value].append(piece)

    def add_block(self, block: Iterable[_Turn]) -> int:
        """Adds the calls of a block; returns the number of the first."""
        start = len(self.calls)
        recomputed: dict[Value, StepValue] = {}  # for the next call
        for turn in block:
            program, part, is_repeat = turn
            takes = [
                v.origin or recomputed.get(v) or self.values[part, v]
                for v in program.inputs
            ]
            outputs = enumerate(program.outputs)
            pieces = {i: self._targets[v] for i, v in outputs if v in self._targets}
            is_summed = self._num_parts > 1 and bool(pieces)
            is_complete = not (is_summed or is_repeat)
            makes = self._add(turn, takes, pieces, is_complete=is_complete)
            made = dict(zip(program.outputs, makes, strict=True))
            recomputed = made if is_repeat else {}
            if not is_repeat:
                self.values |= {(part, v): value for v, value in made.items()}
                if is_summed:
                    self._add_sum(turn, pieces, [makes[i] for i in pieces])
        return start

    def _add_sum(
        self,
        turn: _Turn,
        pieces: Mapping[int, Sequence[Piece]],
        sums: Sequence[StepValue],
    ) -> None:
        """Adds gradients of a part to those of the parts before it."""
        program, part, _ = turn
        if part:
            is_last = part == self._num_parts - 1
            avals = tuple([program.outputs[i].aval for i in pieces])
            count = self._num_parts if is_last else None
            total = sum_program(self._ordered, avals, part == 1, count)
            origins = [v.origin for v in total.inputs if v.origin is not None]
            takes = [*self._sums[program], *sums, *origins]
            of_sums = dict(enumerate(pieces.values()))
            sums = self._add(_Turn(total, part), takes, of_sums, is_complete=is_last)
        self._sums[program] = sums

    def _add(
        self,
        turn: _Turn,
        takes: Iterable[Origin | StepValue],
        pieces: Mapping[int, Sequence[Piece]],
        *,
        is_complete: bool,
    ) -> Sequence[StepValue]:
        """Adds a call, whose outputs are gradients of `pieces`; returns its values."""
        makes = tuple(StepValue(next(self._numbers)) for _ in turn.program.outputs)
        pairs = tuple((piece, i) for i, same in pieces.items() for piece in same)
        call = Call(
            **turn._asdict(),
            takes=tuple(takes),
            makes=makes,
            pieces=pairs,
            gradients=pairs if is_complete else (),
        )
        self.calls.append(call)
        return makes


def _blocks(
    programs: Programs, recomputed: Container[int], num_parts: int
) -> Iterator[Sequence[_Turn]]:
    """Yields calls in order; params stay from the first to the last of a block."""
    parts, forward, early = range(num_parts), programs.forward, _num_early(programs)
    last = len(forward) - 1

    def backward(k: int, part: int) -> Iterator[_Turn]:
        program = programs.backward[k]
        if program is None:
            return
        is_read = not {*program.inputs}.isdisjoint(forward[k].outputs)
        if k in recomputed and k < last and is_read:
            yield _Turn(forward[k], part, is_repeat=True)
        yield _Turn(program, part)

    def each(program: Program) -> Sequence[_Turn]:
        return [_Turn(program, part) for part in parts if program.outputs]

    yield from map(each, forward[:early])
    yield [
        turn
        for part in parts
        for turn in (
            *(_Turn(program, part) for program in forward[early:] if program.outputs),
            *(turn for k in range(last, early - 1, -1) for turn in backward(k, part)),
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
    readers = [k for k, pair in pairs if any(x and x.params for x in pair)]
    early = max(readers, default=0)
    late = {param for program in forward[early:] for param in program.params}
    while early and (before := backward[early - 1]) is not None:
        if late.isdisjoint({*before.params} - {*forward[early - 1].params}):
            break
        early -= 1
    return early


def _param_stays(calls: Sequence[Call], starts: Sequence[int]) -> tuple[Stay, ...]:
    """Returns when pieces of params are in memory, in order.

    A piece stays between calls of a block that read it, and from a call to the next.
    """
    latest, stays = dict[Piece, int](), list[Stay]()
    for start, end in itertools.pairwise([*starts, len(calls)]):
        for number in range(start, end):
            for piece, num_bytes in calls[number].program.params:
                last = latest.get(piece)
                if last is None or stays[last].stop <= min(start, number - 1):
                    last = latest[piece] = len(stays)
                    stays.append(Stay(number, number + 1, num_bytes, piece))
                stays[last] = stays[last]._replace(stop=number + 1)
    return tuple(stays)


def _free_values(
    calls: Sequence[Call], results: Sequence[StepValue]
) -> tuple[Call, ...]:
    """Returns the calls with what they free, and None for values that none takes."""
    last = last_uses(call.takes for call in calls)
    last.update(dict.fromkeys(results, len(calls)))
    return tuple(
        replace(
            call,
            makes=tuple(value if value in last else None for value in call.makes),
            frees=tuple(
                ref
                for ref in dict.fromkeys(call.takes)
                if type(ref) is StepValue and last[ref] == number
            ),
        )
        for number, call in enumerate(calls)
    )
