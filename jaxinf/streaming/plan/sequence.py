"""Puts the calls of one step in order, and says which run again.

    keep          F0 F1 F2 B2 B1 B0
    1 for its own F0 F1 F2 B2 F1 B1 B0      what others read of F1 is kept
    1 for all     F0 F1 F2 F1 B2 B1 B0      if B2 reads what F1 makes

Invariant: to compute a value again, the same program is called again with the same
inputs, so its bits are the same.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal, TypeAlias

from jaxinf.program.graph import Value
from jaxinf.streaming.plan.calls import Call, Calls, Policy, Slot
from jaxinf.streaming.program.graph import Graph, Origin, Piece
from jaxinf.streaming.program.programs import Program, Programs

__all__ = ["Reach", "Repeats", "all_repeats", "make_calls"]

Reach: TypeAlias = Literal["own", "all"]

Repeats: TypeAlias = Mapping[int, Reach]
"""Segments that run forward again: for their own backward part, or for all parts.

For its own part a segment runs right before it, and other parts read what was kept. For
all parts it runs before the first that reads one of its values, and none was kept.
"""


def all_repeats(programs: Programs) -> Repeats:
    """Returns that every segment but the last runs forward again.

    For its own backward part if that reads what it makes, else for all parts.
    """
    pairs = zip(programs.forward[:-1], programs.backward, strict=False)
    return {
        k: "own" if backward and {*forward.outputs} & {*backward.inputs} else "all"
        for k, (forward, backward) in enumerate(pairs)
    }


def make_calls(
    graph: Graph,
    programs: Programs,
    policy: Policy,
    repeats: Repeats = MappingProxyType({}),
) -> Calls:
    """Makes the calls of one step under a policy.

    Args:
      graph: The whole program.
      programs: Its segments' programs.
      policy: The treatment of values that backward needs.
      repeats: Segments that run forward again; with `"recompute"` those of them that do
        so for all parts.
    """
    builder = _Builder(graph)
    last = len(programs.forward) - 1
    if policy == "recompute":
        repeats = {**dict.fromkeys(range(last), "own"), **repeats}
    for program in programs.forward:
        builder.call(program)
    builder.forget(
        programs.forward[k] for k, reach in repeats.items() if reach == "all"
    )
    for k in range(last, -1, -1):
        program = programs.backward[k]
        if program is None:
            continue
        if repeats.get(k) == "own":
            builder.repeat(programs.forward[k], program)
        builder.call(program)
    for program in programs.free:
        builder.call(program)
    calls = builder.finish()
    if policy in ("offload", "plan"):
        # Others may leave, and then lend nothing, so memory is planned without that.
        backward = {id(program) for program in programs.backward}
        lenders = frozenset(
            slot
            for call in calls.calls
            if id(call.program) in backward
            for slot in call.outputs
            if slot is not None
        )
        calls = replace(calls, lenders=lenders)
    return calls


class _Builder:
    def __init__(self, graph: Graph) -> None:
        self.results = graph.results
        self.targets: dict[Value, list[Piece]] = {}
        for piece, value in graph.gradients.items():
            self.targets.setdefault(value, []).append(piece)
        self.drafts: list[tuple[Program, list[Origin | Slot], list[Slot], bool]] = []
        self.slots: dict[Value, Slot] = {}
        self.repeated: dict[Value, Slot] = {}
        self.forgotten: dict[Value, Program] = {}
        self.num_slots = 0

    def call(self, program: Program) -> None:
        """Calls a program for the first time."""
        if program.outputs:
            self._remember(program)
            self.slots.update(self._add(program, is_repeat=False))
        self.repeated = {}

    def forget(self, programs: Iterable[Program]) -> None:
        """Lets what programs made be made again when it is read next."""
        kept = set(self.results)
        self.forgotten = {
            value: program
            for program in programs
            for value in program.outputs
            if value not in kept
        }

    def repeat(self, forward: Program, reader: Program) -> None:
        """Calls a program again for what its own backward part reads, if anything."""
        if set(forward.outputs) & set(reader.inputs):
            self._remember(forward)
            self.repeated = self._add(forward, is_repeat=True)

    def _remember(self, reader: Program) -> None:
        """Calls programs again that made what a program reads."""
        pending = [reader]
        while pending:
            program = pending[-1]
            maker = next(filter(None, map(self._forgotten, program.inputs)), None)
            if maker is not None:
                pending.append(maker)
                continue
            pending.pop()
            if program is not reader:
                own = [v for v in program.outputs if self.forgotten.pop(v, None)]
                slots = self._add(program, is_repeat=True)
                self.slots.update({value: slots[value] for value in own})

    def _forgotten(self, value: Value) -> Program | None:
        return None if value in self.repeated else self.forgotten.get(value)

    def _add(self, program: Program, *, is_repeat: bool) -> dict[Value, Slot]:
        inputs = [self._read(value) for value in program.inputs]
        outputs = [self._slot() for _ in program.outputs]
        self.drafts.append((program, inputs, outputs, is_repeat))
        return dict(zip(program.outputs, outputs, strict=True))

    def finish(self) -> Calls:
        results = tuple(self.slots[value] for value in self.results)
        last: dict[Slot, int] = {}
        for i, (_, inputs, _, _) in enumerate(self.drafts):
            last.update({ref: i for ref in inputs if isinstance(ref, Slot)})
        last.update(dict.fromkeys(results, len(self.drafts)))
        calls = []
        for i, (program, inputs, outputs, is_repeat) in enumerate(self.drafts):
            drops = {
                slot: None
                for slot in inputs
                if isinstance(slot, Slot) and last[slot] == i
            }
            calls.append(
                Call(
                    program,
                    tuple(inputs),
                    tuple(slot if slot in last else None for slot in outputs),
                    tuple(drops),
                    () if is_repeat else self._gradients(program),
                    is_repeat,
                )
            )
        return Calls(tuple(calls), results)

    def _gradients(self, program: Program) -> tuple[tuple[Piece, int], ...]:
        return tuple(
            (piece, i)
            for i, value in enumerate(program.outputs)
            for piece in self.targets.get(value, ())
        )

    def _read(self, value: Value) -> Origin | Slot:
        if value.origin is not None:
            return value.origin
        return self.repeated.get(value) or self.slots[value]

    def _slot(self) -> Slot:
        self.num_slots += 1
        return Slot(self.num_slots - 1)
