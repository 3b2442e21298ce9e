"""Puts the calls of one step in order, and says which run again.

    keep          F0 F1 F2 B2 B1 B0
    1 for its own F0 F1 F2 B2 F1 B1 B0      what others read of F1 is kept
    1 for all     F0 F1 F2 F1 B2 B1 B0      if B2 reads what F1 makes

Invariant: to compute a value again, the same program is called again with the same
inputs, so its bits are the same.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count
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
        self.targets: defaultdict[Value, list[Piece]] = defaultdict(list)
        for piece, value in graph.gradients.items():
            self.targets[value].append(piece)
        self.drafts: list[tuple[Program, list[Origin | Slot], list[Slot], bool]] = []
        self.slots: dict[Value, Slot] = {}
        self.repeated: dict[Value, Slot] = {}
        self.forgotten: dict[Value, Program] = {}
        self.numbers = count()

    def call(self, program: Program) -> None:
        """Calls a program for the first time."""
        if program.outputs:
            self._remember(program)
            self.slots.update(self._add(program, is_repeat=False))
        self.repeated = {}

    def forget(self, programs: Iterable[Program]) -> None:
        """Lets what programs made be made again when it is read next."""
        made = {value: program for program in programs for value in program.outputs}
        self.forgotten = {v: made[v] for v in made if v not in self.results}

    def repeat(self, forward: Program, reader: Program) -> None:
        """Calls a program again for what its own backward part reads, if anything."""
        if set(forward.outputs) & set(reader.inputs):
            self._remember(forward)
            self.repeated = self._add(forward, is_repeat=True)

    def _remember(self, reader: Program) -> None:
        """Calls programs again that made what a program reads."""
        pending = [reader]
        while pending:
            read = (v for v in pending[-1].inputs if v not in self.repeated)
            maker = next(filter(None, map(self.forgotten.get, read)), None)
            if maker is not None:
                pending.append(maker)
            elif (program := pending.pop()) is not reader:
                own = [v for v in program.outputs if self.forgotten.pop(v, None)]
                slots = self._add(program, is_repeat=True)
                self.slots.update({value: slots[value] for value in own})

    def _add(self, program: Program, *, is_repeat: bool) -> dict[Value, Slot]:
        inputs = [
            v.origin or self.repeated.get(v) or self.slots[v] for v in program.inputs
        ]
        outputs = [Slot(next(self.numbers)) for _ in program.outputs]
        self.drafts.append((program, inputs, outputs, is_repeat))
        return dict(zip(program.outputs, outputs, strict=True))

    def finish(self) -> Calls:
        results = tuple(self.slots[value] for value in self.results)
        last: dict[Origin | Slot, int] = {}
        for i, (_, inputs, _, _) in enumerate(self.drafts):
            last.update(dict.fromkeys(inputs, i))
        last.update(dict.fromkeys(results, len(self.drafts)))
        calls = []
        for i, (program, inputs, outputs, is_repeat) in enumerate(self.drafts):
            read = [ref for ref in dict.fromkeys(inputs) if isinstance(ref, Slot)]
            targets = (
                [] if is_repeat else map(self.targets.__getitem__, program.outputs)
            )
            calls.append(
                Call(
                    program,
                    tuple(inputs),
                    tuple(slot if slot in last else None for slot in outputs),
                    tuple(slot for slot in read if last[slot] == i),
                    tuple((piece, j) for j, own in enumerate(targets) for piece in own),
                    is_repeat,
                )
            )
        return Calls(tuple(calls), results)
