"""The plan of a step: a list of calls, with the values that each takes and makes.

Invariant: one call of a step makes a value, and the last that takes it frees it.
To recompute, the same program is called again, so its values have the same bits.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

from jaxinf.streaming.plan.memory import StepMemory
from jaxinf.streaming.plan.reads import ReadPlan
from jaxinf.streaming.plan.report import describe_plan
from jaxinf.streaming.program.graph import Origin, Piece
from jaxinf.streaming.program.lifetimes import Stay, occupancy
from jaxinf.streaming.program.programs import Program
from jaxinf.streaming.program.trace import Traced
from jaxinf.transfer import page_ceil

Policy: TypeAlias = Literal["recompute", "keep", "offload", "plan"]

NUM_WRITING = 2
"""Calls from the one after which a value is written to the first that has its memory:
the value is computed, then written beside another call."""


class StepValue(NamedTuple):
    """A value of one part of a batch: made by one call, and taken by later ones."""

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
      leave_call: The call that makes it, after which it leaves.
      free_call: The first call before which its memory must be free.
      return_call: The first call before which its memory is taken again.
      use_call: The call that reads it next.
    """

    leave_call: int
    free_call: int
    return_call: int
    use_call: int


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a program.

    Attributes:
      takes: For each of its inputs, an input of the whole function or a value.
      makes: For each of its outputs a value; None if no call takes it.
      frees: Values that no later call takes.
      pieces: Outputs that are gradients, perhaps of one part, by their position.
      gradients: Those of the whole batch, which are handed out.
      is_repeat: Whether it only recomputes.
    """

    program: Program
    takes: tuple[Origin | StepValue, ...]
    makes: tuple[StepValue | None, ...]
    frees: tuple[StepValue, ...] = ()
    pieces: tuple[tuple[Piece, int], ...]
    gradients: tuple[tuple[Piece, int], ...]
    is_repeat: bool
    part: int


@dataclass(frozen=True)
class OffloadPlan:
    """Where values wait that have left the memory of programs.

    Attributes:
      on_drive: Values on drives, in the order in which they are needed; others wait on
        the host of a device with memory of its own.
      read_bytes: Host memory for values that drives have read.
      has_link: Whether the device has memory of its own.
      host_bytes: Host memory, with such a device, for all that is here.
      leaving_bytes: The part of it for values on their way to drives.
    """

    on_drive: tuple[StepValue, ...] = ()
    read_bytes: int = 0
    has_link: bool = False
    host_bytes: int = 0
    leaving_bytes: int = 0


@dataclass(frozen=True, repr=False, kw_only=True)
class Plan:
    """All calls of a step; as a string, a table of them.

    Attributes:
      cuts: Starts of the segments in the forward order.
      num_parts: Number of parts of a batch that each segment is called for in turn.
      results: The loss and aux's leaves, of one part after another.
      param_stays: When pieces of params are in memory, in order; none of those that
        are always there.
      may_offload: Whether values may be on a drive for some calls of a step.
      peak_bytes: The peak memory of a step, as far as it was measured.
      temp_bytes: Temporaries of the compiled programs by key, as far as they are known.
      output_bytes: On several devices, the bytes of each call's outputs in one memory;
        None for one device.
      evictions: Values that leave for a time.
      offload: Where these wait.
      resident_bytes: Memory of params that stay between steps, in addition.
      memory: The memory, without that of values that wait on the host.
      reads: The reads of params; none if all are in memory.
    """

    traced: Traced
    cuts: tuple[int, ...]
    policy: Policy
    num_parts: int
    calls: tuple[Call, ...]
    results: tuple[StepValue, ...]
    param_stays: tuple[Stay, ...]
    may_offload: bool
    peak_bytes: int = 0
    temp_bytes: Mapping[str, int] = field(default_factory=dict)
    output_bytes: Sequence[Sequence[int]] | None = None
    evictions: Mapping[StepValue, Eviction] = field(default_factory=dict)
    offload: OffloadPlan = field(default_factory=OffloadPlan)
    resident_bytes: int = 0
    memory: StepMemory = field(default_factory=StepMemory)
    reads: ReadPlan = field(default_factory=ReadPlan)

    def __str__(self) -> str:
        return describe_plan(self)

    @cached_property
    def programs(self) -> Mapping[str, Program]:
        """One program for each key, in the order of their first call."""
        programs: dict[str, Program] = {}
        for call in self.calls:
            programs.setdefault(call.program.key, call.program)
        return programs

    @cached_property
    def donated(self) -> Mapping[str, tuple[int, ...]]:
        """Inputs whose memory an output may reuse, by the program's key.

        No call takes such an input later, and no one else holds it.
        """
        pinned = {call.makes[i] for call in self.calls for _, i in call.gradients}
        pinned.update(self.evictions)  # no call frees a result
        donated: dict[str, set[int]] = {}
        for call in self.calls:
            key = call.program.key
            lent = {value for value in call.frees if self._can_lend(value)} - pinned
            inputs = {i for i, ref in enumerate(call.takes) if ref in lent}
            donated[key] = donated.get(key, inputs) & inputs
        programs = self.programs
        return {key: _paired_inputs(programs[key], x) for key, x in donated.items()}

    def _can_lend(self, value: StepValue) -> bool:
        """Whether it never leaves; of several devices, no sharding is known yet."""
        if self.traced.mesh is not None:
            return False
        if not self.may_offload:
            return True
        life = self.lives[value]
        staying = "sum" if self.num_parts > 1 else "backward"
        is_staying = self.calls[life.made].program.direction == staying
        return is_staying or life.takers[-1] - life.made <= NUM_WRITING

    @cached_property
    def fences(self) -> tuple[int | None, ...]:
        """For each call its smallest output whose memory the next call does not reuse.

        It can be waited for while that call runs. None if there is no such output.
        """
        fences: list[int | None] = []
        for call, later in zip(self.calls, (*self.calls[1:], None), strict=True):
            donated = () if later is None else self.donated[later.program.key]
            reused = {later.takes[i] for i in donated} if later else ()
            lasting = [i for i, value in enumerate(call.makes) if value not in reused]
            size = call.program.output_bytes.__getitem__
            fences.append(min(lasting, key=size, default=None))
        return tuple(fences)

    @cached_property
    def lives(self) -> Mapping[StepValue, Life]:
        lives: dict[StepValue, Life] = {}
        for number, call in enumerate(self.calls):
            for value in {ref for ref in call.takes if type(ref) is StepValue}:
                lives[value].takers.append(number)
            sizes = self._output_bytes(number)
            made = zip(call.makes, call.program.outputs, sizes, strict=True)
            for value, output, num_bytes in made:
                if value is not None:
                    lives[value] = Life(number, [], num_bytes, output.aval)
        return lives

    @property
    def store_bytes(self) -> int:
        """Memory for the optimizer's state: all that nothing else of a step takes."""
        return self.memory.state_bytes + self.reads.unused_bytes

    @property
    def drive_bytes(self) -> int:
        """Bytes on drives, at most, of values that are there for some calls."""
        sizes = (self.lives[value].num_bytes for value in self.offload.on_drive)
        return sum(map(page_ceil, sizes))

    @property
    def evicted_bytes(self) -> int:
        return sum(self.lives[value].num_bytes for value in self.evictions)

    @property
    def digest(self) -> str:
        """What processes that run its programs together must have in common."""
        fetches = [
            (x.unit.leaf, *x.unit.index, x.first, x.last, x.spans_steps)
            for x in self.reads.fetches
        ]
        text = repr((self.traced.mesh, self.cuts, fetches))
        return hashlib.sha256(text.encode()).hexdigest()

    def without_graph(self) -> "Plan":
        """Returns a plan to run and to print, for when its programs are compiled.

        The graph of a deep model takes about 1 MiB a layer.
        """
        light = cache(Program.without_nodes)
        calls = tuple(replace(call, program=light(call.program)) for call in self.calls)
        return replace(self, calls=calls)

    def call_bytes(self) -> list[int]:
        """Returns the memory of values, params, outputs and temporaries in each call.

        One call runs, and the next waits with its params and room for its outputs.
        """
        stays = self.param_stays
        early = (stay._replace(start=max(0, stay.start - 1)) for stay in stays)
        params = occupancy(len(self.calls), early)
        totals = (params + self.value_bytes()).tolist()
        reused = {
            key: sum(program.input_bytes[i] for i in self.donated[key])
            for key, program in self.programs.items()
        }
        for number, call in enumerate(self.calls):
            key = call.program.key
            new_bytes = sum(self._output_bytes(number)) - reused[key]
            totals[number] += new_bytes + self.temp_bytes.get(key, 0)
            if number:
                totals[number - 1] += new_bytes
        return totals

    def value_bytes(self) -> list[int]:
        """Returns the bytes of values in memory while each call runs.

        The call after it waits, and has the memory that it needs. The outputs of both
        are not counted.
        """
        num_calls, lives, results = len(self.calls), self.lives, {*self.results}
        stays = [
            Stay(made + 1, num_calls if value in results else takers[-1] + 1, num_bytes)
            for value, (made, takers, num_bytes, _) in lives.items()
        ]
        stays += [
            Stay(out.free_call - 1, out.return_call - 1, -lives[value].num_bytes)
            for value, out in self.evictions.items()
        ]
        return occupancy(num_calls, stays).tolist()

    def _output_bytes(self, number: int) -> Sequence[int]:
        if self.output_bytes is not None:
            return self.output_bytes[number]
        return self.calls[number].program.output_bytes


def _paired_inputs(program: Program, inputs: set[int]) -> tuple[int, ...]:
    """Selects one input of the same type for each output, if there is one."""
    types = Counter((v.shape, v.dtype) for v in program.outputs)
    paired = []
    for i in sorted(inputs):
        value = program.inputs[i]
        if types[value.shape, value.dtype]:
            types[value.shape, value.dtype] -= 1
            paired.append(i)
    return tuple(paired)
