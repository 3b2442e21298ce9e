"""The plan of a step: a list of calls, with the values that each takes and makes.

Invariant: a slot is written once a step, and freed after the last call that takes it.
To recompute, the same program is called again, so its values have the same bits.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

from jaxinf.streaming.plan.memory import Memory
from jaxinf.streaming.plan.reads import ParamReads
from jaxinf.streaming.plan.report import plan_text
from jaxinf.streaming.program.graph import Origin, Piece
from jaxinf.streaming.program.lifetimes import Stay, occupancy
from jaxinf.streaming.program.programs import Program
from jaxinf.streaming.program.trace import Traced
from jaxinf.transfer import page_ceil

Policy: TypeAlias = Literal["recompute", "keep", "offload", "plan"]

NUM_WRITING = 2
"""Calls from the one after which a value is written to the first that has its memory:
the value is computed, then written beside another call."""


class ValueSlot(NamedTuple):
    """A place for a value, from the call that makes it to the last that takes it."""

    number: int


class Life(NamedTuple):
    """The calls that make and take a value, in order, and its size and type."""

    made: int
    takers: list[int]
    num_bytes: int
    aval: Any


class Eviction(NamedTuple):
    """The calls between which a value leaves the device's memory and is back.

    Attributes:
      written: The call that makes it, after which it leaves.
      gone: The first call before which its memory must be free.
      back: The first call before which its memory is taken again.
      needed: The call that reads it next.
    """

    written: int
    gone: int
    back: int
    needed: int


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a program.

    Attributes:
      takes: For each of its inputs, an input of the whole or a slot.
      makes: For each of its outputs a slot; None if no call takes it.
      frees: Slots that no later call takes.
      pieces: Outputs that are gradients, perhaps of a part, by their position.
      gradients: Pieces that are of the whole batch, which are handed out.
      is_repeat: Whether it only recomputes.
      part: The part of the batch that it is of, if there are several.
    """

    program: Program
    takes: tuple[Origin | ValueSlot, ...]
    makes: tuple[ValueSlot | None, ...]
    frees: tuple[ValueSlot, ...] = ()
    pieces: tuple[tuple[Piece, int], ...]
    gradients: tuple[tuple[Piece, int], ...]
    is_repeat: bool
    part: int


@dataclass(frozen=True)
class Waiting:
    """Where values wait that have left the memory of programs.

    Attributes:
      on_drive: Values on drives, in the order in which they are needed; others wait on
        the host of a device with memory of its own.
      read_bytes: Memory of the host for those that drives have read.
      has_link: Whether the device has memory of its own.
      host_bytes: Memory of the host of such a device for all that is here.
      leaving_bytes: The part of it for values on their way to drives.
    """

    on_drive: tuple[ValueSlot, ...] = ()
    read_bytes: int = 0
    has_link: bool = False
    host_bytes: int = 0
    leaving_bytes: int = 0


@dataclass(frozen=True, repr=False, kw_only=True)
class Plan:
    """All calls of a step; as a string, a table of them.

    Attributes:
      traced: The loss function and its gradient.
      cuts: Starts of the segments in the forward order.
      policy: The treatment of values that backward needs.
      num_parts: Number of parts of a batch that each segment is called for in turn.
      results: Slots of the loss and of aux's leaves, of one part after another.
      uses: When parts of params are in memory, in order; without those that are there
        in any case.
      is_offloaded: Whether values may be on a drive for a part of a step.
      peak_bytes: The peak memory of a step, as far as it was measured.
      temp_bytes: Temporaries of the compiled programs by key, as far as they are known.
      output_bytes: On several devices, the bytes of each call's outputs in one memory;
        None for one device.
      evictions: Values that leave for a time.
      resident_bytes: Memory of params that stay between steps, in addition.
      waiting: Where these wait.
      memory: The memory, without that of values that wait on the host.
      reads: The reads of params; none if all are in memory.
    """

    traced: Traced
    cuts: tuple[int, ...]
    policy: Policy
    num_parts: int
    calls: tuple[Call, ...]
    results: tuple[ValueSlot, ...]
    uses: tuple[Stay, ...]
    is_offloaded: bool
    peak_bytes: int = 0
    temp_bytes: Mapping[str, int] = field(default_factory=dict)
    output_bytes: Sequence[Sequence[int]] | None = None
    evictions: Mapping[ValueSlot, Eviction] = field(default_factory=dict)
    waiting: Waiting = field(default_factory=Waiting)
    resident_bytes: int = 0
    memory: Memory = field(default_factory=Memory)
    reads: ParamReads = field(default_factory=ParamReads)

    def __str__(self) -> str:
        return plan_text(self)

    @cached_property
    def programs(self) -> Mapping[str, Program]:
        """One program for each key, in the order of their first call."""
        found: dict[str, Program] = {}
        for call in self.calls:
            found.setdefault(call.program.key, call.program)
        return found

    @cached_property
    def donated(self) -> Mapping[str, tuple[int, ...]]:
        """Returns inputs whose memory an output may reuse, by the program's key.

        No call takes such an input later, and no one else holds it.
        """
        kept = {call.makes[i] for call in self.calls for _, i in call.gradients}
        kept.update(self.evictions)  # no call frees a result
        found: dict[str, set[int]] = {}
        for call in self.calls:
            lent = {slot for slot in call.frees if self._can_lend(slot)} - kept
            own = {i for i, ref in enumerate(call.takes) if ref in lent}
            found[call.program.key] = found.get(call.program.key, own) & own
        return {key: _paired(self.programs[key], own) for key, own in found.items()}

    def _can_lend(self, slot: ValueSlot) -> bool:
        """Whether it never leaves; of several devices, no sharding is known yet."""
        if self.traced.mesh is not None:
            return False
        if not self.is_offloaded:
            return True
        life = self.lives[slot]
        staying = "sum" if self.num_parts > 1 else "backward"
        is_staying = self.calls[life.made].program.direction == staying
        return is_staying or life.takers[-1] - life.made <= NUM_WRITING

    @cached_property
    def fences(self) -> tuple[int | None, ...]:
        """Returns for each call its smallest output that is there when the call ends.

        The next call, which waits, does not reuse its memory. None if there is no such
        output.
        """
        found: list[int | None] = []
        for call, later in zip(self.calls, (*self.calls[1:], None), strict=True):
            donated = () if later is None else self.donated[later.program.key]
            reused = {later.takes[i] for i in donated} if later else ()
            stay = [i for i, slot in enumerate(call.makes) if slot not in reused]
            size = call.program.output_bytes.__getitem__
            found.append(min(stay, key=size, default=None))
        return tuple(found)

    @cached_property
    def lives(self) -> Mapping[ValueSlot, Life]:
        lives: dict[ValueSlot, Life] = {}
        for number, call in enumerate(self.calls):
            for slot in {ref for ref in call.takes if type(ref) is ValueSlot}:
                lives[slot].takers.append(number)
            sizes = self._made_bytes(number)
            made = zip(call.makes, call.program.outputs, sizes, strict=True)
            for slot, value, own in made:
                if slot is not None:
                    lives[slot] = Life(number, [], own, value.aval)
        return lives

    @property
    def store_bytes(self) -> int:
        """Memory for the optimizer's state: all that nothing else of a step takes."""
        return self.memory.state + self.reads.unused_bytes

    @property
    def away_bytes(self) -> int:
        """Bytes of values that are on drives for a part of a step, at most."""
        sizes = (self.lives[slot].num_bytes for slot in self.waiting.on_drive)
        return sum(map(page_ceil, sizes))

    @property
    def digest(self) -> str:
        """What processes that run its programs together must have in common."""
        read = self.reads.fetches
        fetches = [(x.unit.leaf, *x.unit.index, x.first, x.last, x.stays) for x in read]
        text = repr((self.traced.mesh, self.cuts, fetches))
        return hashlib.sha256(text.encode()).hexdigest()

    def without_graph(self) -> "Plan":
        """Returns a plan to run and to print, for when its programs are compiled.

        The graph of a deep model takes about 1 MiB a layer.
        """
        light = cache(Program.without_nodes)
        calls = tuple(replace(one, program=light(one.program)) for one in self.calls)
        return replace(self, calls=calls)

    # --- memory: loops over the calls --------------------------------------------

    def call_bytes(self) -> list[int]:
        """Returns the memory of slots, params, outputs and temporaries in each call.

        One call runs, and the next waits with its params and room for its outputs.
        """
        early = (Stay(max(0, one - 1), end, size) for one, end, size, _ in self.uses)
        params = occupancy(len(self.calls), early)
        found = (params + self.value_bytes()).tolist()
        reused = {
            key: sum(program.input_bytes[i] for i in self.donated[key])
            for key, program in self.programs.items()
        }
        for number, call in enumerate(self.calls):
            key = call.program.key
            new = sum(self._made_bytes(number)) - reused[key]
            found[number] += new + self.temp_bytes.get(key, 0)
            if number:
                found[number - 1] += new
        return found

    def value_bytes(self) -> list[int]:
        """Returns the bytes of values in memory while each call runs.

        The call after it waits, so what must be gone for that one is gone. The outputs
        of neither count.
        """
        num_calls, lives, results = len(self.calls), self.lives, {*self.results}
        stays = [
            Stay(made + 1, num_calls if slot in results else takers[-1] + 1, num_bytes)
            for slot, (made, takers, num_bytes, _) in lives.items()
        ]
        stays += [
            Stay(one.gone - 1, one.back - 1, -lives[slot].num_bytes)
            for slot, one in self.evictions.items()
        ]
        return occupancy(num_calls, stays).tolist()

    def _made_bytes(self, number: int) -> Sequence[int]:
        if self.output_bytes is not None:
            return self.output_bytes[number]
        return self.calls[number].program.output_bytes


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
