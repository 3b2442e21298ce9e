"""The calls of one step, in order, with the values that each reads, makes and drops.

Invariant: a slot is written once a step, and dropped after the last call that reads
it. To recompute, the same program is called again, so its values have the same bits.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from jaxinf.schedule.placement import Eviction
from jaxinf.streaming.program.graph import Origin, Piece
from jaxinf.streaming.program.programs import Program

Policy: TypeAlias = Literal["recompute", "keep", "offload", "plan"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


def may_leave(policy: Policy, num_parts: int) -> bool:
    """Whether values may be on a drive for a part of a step.

    Args:
      num_parts: Number of parts of a batch whose values wait between segments.
    """
    return policy == "offload" or num_parts > 1


class Slot(NamedTuple):
    """A place for a value, from the call that makes it to the last that reads it."""

    number: int


@dataclass(frozen=True)
class Call:
    """One call of a program.

    Attributes:
      program: The program.
      inputs: For each of its inputs, an input of the whole or a slot.
      outputs: For each of its outputs a slot; None if no call reads it.
      drops: Slots that no later call reads.
      gradients: Outputs that are complete gradients, by their position.
      is_repeat: Whether it only recomputes.
      part: The part of the batch that it is of, if there are several.
      held: Parts of params that it does not read, and their bytes: they stay for calls
        of another part.
    """

    program: Program
    inputs: tuple[Origin | Slot, ...]
    outputs: tuple[Slot | None, ...]
    drops: tuple[Slot, ...]
    gradients: tuple[tuple[Piece, int], ...]
    is_repeat: bool
    part: int = 0
    held: tuple[tuple[Piece, int], ...] = ()

    @property
    def params(self) -> tuple[tuple[Piece, int], ...]:
        """Parts of params that are in memory while it runs, and their bytes."""
        return (*self.program.params, *self.held)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Parts of params that are in memory while it runs."""
        return (*self.program.pieces, *(piece for piece, _ in self.held))

    @property
    def is_forward(self) -> bool:
        """Whether it runs a segment forward for the first time."""
        return not self.is_repeat and self.program.name.startswith("forward")


@dataclass(frozen=True)
class Calls:
    """All calls of one step.

    Attributes:
      results: Slots of the loss and of aux's leaves.
      evictions: Values that are on a drive for a time.
      lenders: Values whose memory outputs may reuse; None for all at their last use
        that are never on a drive.
      resident: Parts of params that are in memory in any case, and do not count.
      output_bytes: On several devices, the bytes of each call's outputs in one memory;
        None for one device.
    """

    calls: tuple[Call, ...]
    results: tuple[Slot, ...]
    evictions: Mapping[Slot, Eviction] = field(default_factory=dict)
    lenders: frozenset[Slot] | None = None
    resident: frozenset[Piece] = frozenset()
    output_bytes: Sequence[Sequence[int]] | None = None

    @cached_property
    def programs(self) -> Mapping[str, Program]:
        """One program for each key, in the order of their first call."""
        found: dict[str, Program] = {}
        for call in self.calls:
            found.setdefault(call.program.key, call.program)
        return found

    @cached_property
    def temp_bytes(self) -> Mapping[str, int]:
        """Temporaries of the programs by key, as estimated before compilation."""
        return {key: program.temp_bytes for key, program in self.programs.items()}

    @cached_property
    def donated(self) -> Mapping[str, tuple[int, ...]]:
        """Returns inputs whose memory an output may reuse, by the program's key.

        No call reads such an input later, and no one else holds it.
        """
        handed = {
            call.outputs[i] for call in self.calls for _, i in call.gradients
        } | set(self.results)
        found: dict[str, set[int]] = {}
        for call in self.calls:
            lent = {
                slot
                for slot in call.drops
                if slot not in handed
                and (self.lenders is None or slot in self.lenders)
                and slot not in self.evictions
            }
            own = {i for i, ref in enumerate(call.inputs) if lent and ref in lent}
            key = call.program.key
            found[key] = found.get(key, own) & own
        return {key: _paired(self.programs[key], own) for key, own in found.items()}

    def lent(self) -> "Calls":
        """Returns the calls in which all values lend their memory, but absent ones.

        That takes less memory, and time: new memory has to be cleared.
        """
        return self._varied(lenders=None)

    def evicting(self, evictions: Mapping[Slot, Eviction]) -> "Calls":
        return self._varied(evictions=evictions)

    def _varied(self, **changes: Any) -> "Calls":
        """Returns the calls with changes that the values' lives do not depend on."""
        calls = replace(self, **changes)
        calls.__dict__["lives"] = self.lives
        return calls

    @cached_property
    def fences(self) -> tuple[int | None, ...]:
        """Returns for each call its smallest output that is there when the call ends.

        The next call, which waits, does not reuse its memory. None if there is no such
        output.
        """
        reused = {
            call.inputs[i]: number
            for number, call in enumerate(self.calls)
            for i in self.donated[call.program.key]
        }
        found = []
        for number, call in enumerate(self.calls):
            sizes = call.program.output_bytes
            own = [
                i
                for i, slot in enumerate(call.outputs)
                if slot is None or reused.get(slot) != number + 1
            ]
            found.append(min(own, key=sizes.__getitem__, default=None))
        return tuple(found)

    def peak_bytes(self, temp_bytes: Mapping[str, int] | None = None) -> int:
        """Returns the peak memory of slots, params, outputs and temporaries.

        One call runs, and the next waits with its params and room for its outputs.

        Args:
          temp_bytes: Temporaries of compiled programs by key; by default estimates.
        """
        return max(self.call_bytes(temp_bytes), default=0)

    def call_bytes(self, temp_bytes: Mapping[str, int] | None = None) -> list[int]:
        """Returns the memory of each call while it runs; arguments as `peak_bytes`."""
        temps = self.temp_bytes if temp_bytes is None else temp_bytes
        found, before, programs = self.held_bytes(), set[Piece](), self.programs
        reused = {
            key: sum(programs[key].input_bytes[i] for i in own)
            for key, own in self.donated.items()
        }
        for number, call in enumerate(self.calls):
            key, made = call.program.key, self._made_bytes[number]
            read = [one for one in call.params if one[0] not in self.resident]
            new = sum(made) - reused[key]
            found[number] += new + sum(size for _, size in read) + temps[key]
            if number:
                more = sum(size for piece, size in read if piece not in before)
                found[number - 1] += new + more
            before = {piece for piece, _ in read}
        return found

    def held_bytes(self) -> list[int]:
        """Returns the bytes of values in memory while each call runs.

        The call after it waits, so what must be gone for that one is gone. The outputs
        of neither count.
        """
        num_calls, lives, results = len(self.calls), self.lives, {*self.results}
        change = [0] * (num_calls + 1)
        for slot, (made, reads, num_bytes, _) in lives.items():
            change[made + 1] += num_bytes
            change[num_calls if slot in results else reads[-1] + 1] -= num_bytes
        for slot, one in self.evictions.items():
            change[one.gone - 1] -= lives[slot].num_bytes
            change[one.back - 1] += lives[slot].num_bytes
        return [*accumulate(change[:-1])]

    @cached_property
    def lives(self) -> Mapping[Slot, "Life"]:
        lives: dict[Slot, Life] = {}
        for i, call in enumerate(self.calls):
            for slot in {ref for ref in call.inputs if type(ref) is Slot}:
                lives[slot].reads.append(i)
            for slot, value, own in zip(
                call.outputs, call.program.outputs, self._made_bytes[i], strict=True
            ):
                if slot is not None:
                    lives[slot] = Life(i, [], own, value.aval)
        return lives

    def fetched_bytes(self, call: Call, before: Call | None = None) -> int:
        """Bytes of params that a call reads and that the one before it does not."""
        held = self.resident.union(() if before is None else before.pieces)
        return sum(size for piece, size in call.params if piece not in held)

    @cached_property
    def _made_bytes(self) -> Sequence[Sequence[int]]:
        if self.output_bytes is not None:
            return self.output_bytes
        return [call.program.output_bytes for call in self.calls]


class Life(NamedTuple):
    """The calls that make and read a value, in order, and its size and type."""

    made: int
    reads: list[int]
    num_bytes: int
    aval: Any


def _paired(program: Program, inputs: set[int]) -> tuple[int, ...]:
    """Selects one input of the same type for each output, if there is one."""
    types = Counter((v.shape, v.dtype) for v in program.outputs)
    chosen = []
    for i in sorted(inputs):
        value = program.inputs[i]
        if types[value.shape, value.dtype]:
            types[value.shape, value.dtype] -= 1
            chosen.append(i)
    return tuple(chosen)
