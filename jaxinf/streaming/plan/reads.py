"""Plans the reads of params: which units are read for which calls, and what stays.

A read may serve the calls of a later one, and those of the next step if no update
changes the unit. The last read of a unit before its gradient is complete may serve its
update, too; the unit then stays until it is updated.

Invariant: the memory of params is what the plan leaves for them, on the host and on the
JAX device, at least the most of `unit_bytes_by_call`; beyond it a unit is read again.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxinf.errors import BudgetError
from jaxinf.streaming.plan.memory import NUM_STAGED, StepMemory, StepNeeds
from jaxinf.streaming.program.lifetimes import Stay, fill, occupancy
from jaxinf.streaming.program.units import ParamUnit, UnitOf
from jaxinf.terminal import format_bytes
from jaxinf.transfer import PAGE_BYTES

if TYPE_CHECKING:  # which has the reads
    from jaxinf.streaming.plan.calls import Plan


class Fetch(NamedTuple):
    """One read of a unit, and the calls that it serves.

    Attributes:
      first, last: Numbers of the first and the last call that use it.
      gradient: Number of the call that completes its gradient, if the update takes the
        params from this read; None if it reads them again.
      spans_steps: Whether the next step's first call for the unit finds it in memory.
    """

    unit: ParamUnit
    first: int
    last: int
    gradient: int | None = None
    spans_steps: bool = False

    @property
    def end(self) -> int:
        """The number of the last call during which it must be in memory."""
        return self.last if self.gradient is None else max(self.last, self.gradient)


class ReadPlan(NamedTuple):
    """The reads of params by the steps of a plan.

    Attributes:
      fetches: The reads of the first step, in order.
      room_bytes: Memory on the device for their units.
      host_bytes: Memory on the host of a device with memory of its own; else None.
      unused_bytes: Memory that the plan leaves for units, and no read needs.
    """

    fetches: tuple[Fetch, ...] = ()
    room_bytes: int = 0
    host_bytes: int | None = None
    unused_bytes: int = 0

    @property
    def repeated(self) -> tuple[Fetch, ...]:
        """The reads of each step after the first."""
        first = {fetch.unit: fetch for fetch in reversed(self.fetches)}
        held = {first[fetch.unit] for fetch in self.fetches if fetch.spans_steps}
        return tuple(fetch for fetch in self.fetches if fetch not in held)

    def num_first(self, fetches: Sequence[Fetch]) -> int:
        """Returns how many of a step's reads have room when it begins."""
        held_bytes = sum(f.unit.page_bytes for f in {*self.fetches} - {*fetches})
        sizes = accumulate(fetch.unit.page_bytes for fetch in fetches)
        return bisect_right([*sizes], self.room_bytes - held_bytes)

    @property
    def largest_bytes(self) -> int:
        return max((fetch.unit.page_bytes for fetch in self.fetches), default=0)


def plan_reads(plan: "Plan", needs: StepNeeds, memory: StepMemory) -> ReadPlan:
    """Plans the reads of a step; none if its params are in memory."""
    unit_of, is_staged = needs.unit_of, memory.staged_bytes > 0
    if unit_of is None:
        return ReadPlan()
    stays = (stay._replace(tensor=unit_of(stay.tensor)) for stay in plan.param_stays)
    fetches = plan_fetches(stays)
    spare_bytes = max(0, memory.program_bytes - plan.peak_bytes)
    held = unit_bytes_by_call(fetches, len(plan.calls))
    room_bytes = int(held.max(initial=0)) + spare_bytes
    fetches = join_fetches(fetches, held, spare_bytes, needs.frozen)
    limit_bytes = room_bytes - spare_bytes // 4
    largest_bytes = ReadPlan(fetches).largest_bytes
    if is_staged:
        limit_bytes = memory.staged_bytes - NUM_STAGED * largest_bytes
        held = np.zeros_like(held)
        if limit_bytes < 0:
            raise BudgetError(
                "memory_bytes",
                f"it leaves {format_bytes(memory.staged_bytes)} for params on their "
                f"way to the device, which take {NUM_STAGED} x "
                f"{format_bytes(largest_bytes)}",
                -limit_bytes,
            )
    gradients = {
        unit: number
        for number, call in enumerate(plan.calls)
        for unit in (unit_of(piece) for piece, _ in call.gradients)
        if unit in needs.reusable
    }
    fetches = serve_updates(fetches, gradients, held, limit_bytes, is_staged=is_staged)
    if is_staged:
        return ReadPlan(fetches, room_bytes, memory.staged_bytes - largest_bytes)
    used_bytes = min(room_bytes, sum(fetch.unit.page_bytes for fetch in fetches))
    return ReadPlan(fetches, used_bytes, unused_bytes=room_bytes - used_bytes)


def staged_bytes(unit_of: UnitOf, plan: "Plan") -> int:
    """Returns the host's memory that params take on their way to the device."""
    sizes = (unit_of(stay.tensor).page_bytes for stay in plan.param_stays)
    return NUM_STAGED * max(sizes, default=PAGE_BYTES)


def plan_fetches(stays: Iterable[Stay]) -> tuple[Fetch, ...]:
    """Returns the reads of a step, in order, for the stays of units.

    A unit stays if the next call needs it, too; one needed later is read again.
    """
    fetches = list[Fetch]()
    latest = dict[ParamUnit, int]()
    for first, stop, _, unit in stays:
        number = latest.get(unit)
        if number is None or fetches[number].last < first - 1:
            number = latest[unit] = len(fetches)
            fetches.append(Fetch(unit, first, first))
        last = max(fetches[number].last, stop - 1)
        fetches[number] = fetches[number]._replace(last=last)
    return tuple(fetches)


def unit_bytes_by_call(fetches: Sequence[Fetch], num_calls: int) -> np.ndarray:
    """Returns the least memory for units during each call.

    Two calls are in flight; with less than the most of it a step would deadlock.
    """
    stays = (Stay(x.first, x.end + 2, x.unit.page_bytes) for x in fetches)
    return occupancy(num_calls + 2, stays)


def join_fetches(
    fetches: Sequence[Fetch],
    held: np.ndarray,
    spare_bytes: int,
    frozen: Set[int] = frozenset(),
) -> tuple[Fetch, ...]:
    """Joins reads of the same unit, those that are nearest to each other first.

    Half of the spare memory is for reading ahead, unless nothing is left to be read.

    Args:
      held: Memory for units during each call, at least; updated.
      spare_bytes: Memory for units beyond the most of it.
      frozen: Leaves that no update changes, whose units may stay from step to step.
    """
    units = {fetch.unit for fetch in fetches}
    lasting = {x for x in units if x.leaf in frozen and not x.needs_assembly}
    changing = sum(x.unit.page_bytes for x in fetches if x.unit not in lasting)
    least, most_bytes = held.copy(), int(held.max(initial=0)) + spare_bytes
    for ahead_bytes in (min(spare_bytes // 2, changing), spare_bytes // 2):
        held[:] = least
        joined = _join_across(fetches, lasting, held, most_bytes - ahead_bytes)
        if not lasting & {fetch.unit for fetch in ReadPlan(joined).repeated}:
            break
    return joined


def _join_across(
    fetches: Sequence[Fetch],
    lasting: Set[ParamUnit],
    held: np.ndarray,
    limit_bytes: int,
) -> tuple[Fetch, ...]:
    """Joins reads across the gaps between them; those of lasting units across steps."""
    reads: dict[ParamUnit, list[int]] = {}
    for number, fetch in enumerate(fetches):
        reads.setdefault(fetch.unit, []).append(number)
    # From a read's end to the next one's begin, perhaps in the next step.
    gaps = list[Stay]()
    for unit, numbers in reads.items():
        later = [*numbers[1:], *(numbers[:1] if unit in lasting else ())]
        for n, after in zip(numbers, later, strict=False):
            begin = fetches[after].first + (after <= n) * len(held)
            end = fetches[n].end + 2
            gaps.append(Stay(end, max(end, begin), unit.page_bytes, (n, after)))
    gaps.sort(key=lambda gap: gap.stop - gap.start)
    joined, before = list(fetches), dict[int, int]()
    for gap in fill(held, gaps, limit_bytes):
        n, after = gap.tensor
        if after <= n:
            joined[n] = joined[n]._replace(spans_steps=True)
        else:
            before[after] = n
    for after in sorted(before, reverse=True):
        n, read = before[after], joined[after]
        joined[n] = joined[n]._replace(last=read.last, spans_steps=read.spans_steps)
    return tuple(fetch for n, fetch in enumerate(joined) if n not in before)


def serve_updates(
    fetches: Sequence[Fetch],
    gradients: Mapping[ParamUnit, int],
    held: np.ndarray,
    limit_bytes: int,
    *,
    is_staged: bool = False,
) -> tuple[Fetch, ...]:
    """Chooses the reads that serve an update, those that wait least first.

    Args:
      gradients: The call that completes the gradient of each unit whose update can take
        its params from a read.
      held: Memory for units during each call, at least; updated.
      limit_bytes: Memory for units; at least the most of `held`.
      is_staged: Whether units only pass through this memory on their way to the device.

    Returns:
      The reads; those that serve an update have a `gradient`.
    """
    last = {
        fetch.unit: number
        for number, fetch in enumerate(fetches)
        if fetch.first <= gradients.get(fetch.unit, -1)
    }
    waits = []
    for unit, number in last.items():
        fetch = fetches[number]._replace(gradient=gradients[unit])
        start = fetch.first if is_staged else fetch.last + 2
        waits.append(Stay(start, fetch.end + 2, unit.page_bytes, (number, fetch)))
    waits.sort(key=lambda stay: stay.tensor[1].gradient - stay.tensor[1].last)
    handed = dict(stay.tensor for stay in fill(held, waits, limit_bytes))
    return tuple(handed.get(number, fetch) for number, fetch in enumerate(fetches))
