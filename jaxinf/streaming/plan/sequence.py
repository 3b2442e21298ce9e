"""Puts the calls of one step in order.

    keep          F0 F1 F2 B2 B1 B0
    recompute     F0 F1 F2 B2 F1 B1 F0 B0   what other segments read of F1 is kept

Of several parts of a batch, a segment runs for each before the next one does; the last
ones, with loss and scores, for one part after another. So params are read for all parts
at once. Gradients are added up as they are made:

    2 parts, keep F0 F0' F1 F1' F2 B2 F2' B2' + B1 B1' + B0 B0' +

Invariant: to compute a value again, the same program is called again with the same
inputs, so its bits are the same.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from jaxinf.program.graph import Graph, Value
from jaxinf.streaming.plan.calls import Call, Policy, Slot
from jaxinf.streaming.program.graph import Origin, Piece
from jaxinf.streaming.program.programs import Program, Programs


def sequence(
    graph: Graph,
    programs: Programs,
    policy: Policy,
    sums: Mapping[Program, Sequence[Program]],
    num_parts: int = 1,
) -> tuple[tuple[Call, ...], tuple[Slot, ...]]:
    """Returns the calls of one step under a policy, and the slots of its results.

    Args:
      sums: From `sum_programs`, for several parts of a batch.
    """
    builder = _Builder(graph, sums, num_parts)
    last, num_early = len(programs.forward) - 1, programs.num_early

    def backward(k: int, part: _Part) -> None:
        program = programs.backward[k]
        if program is None:
            return
        if policy == "recompute" and k < last:
            builder.repeat(programs.forward[k], program, part)
        builder.call(program, part)

    for program in programs.forward[:num_early]:
        for part in builder.block():
            builder.call(program, part)
    for part in builder.block():
        for program in programs.forward[num_early:]:
            builder.call(program, part)
        for k in range(last, num_early - 1, -1):
            backward(k, part)
    for k in range(num_early - 1, -1, -1):
        for part in builder.block():
            backward(k, part)
    for program in programs.free:
        for part in builder.block():
            builder.call(program, part)
    return builder.finish()


def lenders_of(
    calls: Sequence[Call],
    programs: Programs,
    sums: Mapping[Program, Sequence[Program]],
    *,
    may_leave: bool,
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


@dataclass(eq=False)
class _Part:
    """The values of a part of the batch, as far as calls have made them."""

    number: int
    slots: dict[Value, Slot] = field(default_factory=dict)
    repeated: dict[Value, Slot] = field(default_factory=dict)

    def slot(self, value: Value) -> Slot:
        return self.repeated.get(value) or self.slots[value]


class _Builder:
    def __init__(
        self,
        graph: Graph,
        sums: Mapping[Program, Sequence[Program]],
        num_parts: int,
    ) -> None:
        self.results = graph.results
        self._targets: dict[Value, list[Piece]] = {}
        for piece, value in graph.gradients.items():
            self._targets.setdefault(value, []).append(piece)
        self._sums = sums
        self._parts = [_Part(number) for number in range(num_parts)]
        self._totals: dict[Program, Sequence[Slot]] = {}
        self._calls: list[Call] = []  # whose last reads are not known yet
        self._starts: list[int] = []  # of blocks
        self._num_slots = 0

    def block(self) -> Sequence[_Part]:
        """Begins calls between which params stay; returns the parts to call for."""
        self._starts.append(len(self._calls))
        return self._parts

    def call(self, program: Program, part: _Part) -> None:
        if program.outputs:
            part.slots.update(self._add(program, part))
        part.repeated = {}

    def repeat(self, forward: Program, reader: Program, part: _Part) -> None:
        """Calls a program again for what its own backward part reads, if anything."""
        if set(forward.outputs) & set(reader.inputs):
            part.repeated = self._add(forward, part, is_repeat=True)

    def _add(
        self, program: Program, part: _Part, *, is_repeat: bool = False
    ) -> dict[Value, Slot]:
        inputs = [v.origin or part.slot(v) for v in program.inputs]
        targets = {} if is_repeat else self._targets_of(program)
        is_summed = program in self._sums and not is_repeat
        handed = {} if is_summed else targets
        slots = self._append(program, part, inputs, handed, is_repeat=is_repeat)
        if is_summed:
            self._sum(program, part, [slots[i] for i in targets], [*targets.values()])
        return dict(zip(program.outputs, slots, strict=True))

    def _targets_of(self, program: Program) -> Mapping[int, Sequence[Piece]]:
        """Returns what the outputs of a program are the gradients of, if of any."""
        outputs = enumerate(program.outputs)
        return {i: self._targets[v] for i, v in outputs if v in self._targets}

    def _sum(
        self,
        maker: Program,
        part: _Part,
        found: Sequence[Slot],
        targets: Sequence[Sequence[Piece]],
    ) -> None:
        """Adds gradients of a part to those of the parts before it."""
        if part.number:
            program = self._sums[maker][part.number - 1]
            numbers = [v.origin for v in program.inputs if v.origin is not None]
            is_last = part.number == len(self._parts) - 1
            inputs = [*self._totals[maker], *found, *numbers]
            handed = dict(enumerate(targets)) if is_last else {}
            found = self._append(program, part, inputs, handed)
        self._totals[maker] = found

    def _append(
        self,
        program: Program,
        part: _Part,
        inputs: Sequence[Origin | Slot],
        targets: Mapping[int, Sequence[Piece]],
        *,
        is_repeat: bool = False,
    ) -> Sequence[Slot]:
        start = self._num_slots
        self._num_slots += len(program.outputs)
        slots = tuple(map(Slot, range(start, self._num_slots)))
        gradients = tuple((piece, i) for i, own in targets.items() for piece in own)
        self._calls.append(
            Call(program, tuple(inputs), slots, (), gradients, is_repeat, part.number)
        )
        return slots

    def finish(self) -> tuple[tuple[Call, ...], tuple[Slot, ...]]:
        results = tuple(
            part.slots[value] for part in self._parts for value in self.results
        )
        last: dict[Slot, int] = {}  # the calls that read slots last
        for number, call in enumerate(self._calls):
            last.update((ref, number) for ref in call.takes if type(ref) is Slot)
        last.update(dict.fromkeys(results, len(self._calls)))
        held = self._held() if len(self._parts) > 1 else {}
        calls = [
            replace(
                call,
                makes=tuple(slot if slot in last else None for slot in call.makes),
                frees=tuple(
                    dict.fromkeys(
                        ref
                        for ref in call.takes
                        if type(ref) is Slot and last[ref] == number
                    )
                ),
                held=tuple(held[number].items()) if number in held else (),
            )
            for number, call in enumerate(self._calls)
        ]
        return tuple(calls), results

    def _held(self) -> Mapping[int, dict[Piece, int]]:
        """Returns by call the params that it does not read, but calls around it do."""
        held: defaultdict[int, dict[Piece, int]] = defaultdict(dict)
        for start, stop in pairwise([*self._starts, len(self._calls)]):
            last: dict[Piece, int] = {}
            for number in range(start, stop):
                for piece, num_bytes in self._calls[number].program.params:
                    for between in range(last.get(piece, number) + 1, number):
                        held[between][piece] = num_bytes
                    last[piece] = number
        return held
