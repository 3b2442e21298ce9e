"""Plans the reads of params: which units are read for which calls, and what stays.

A read may serve the calls of a later one, and those of the next step if no update
changes the unit. The last read of a unit before its gradient is complete may serve its
update, too; the unit then stays until it is updated.

Invariant: the memory of params is what the plan leaves for them, on the host and on the
JAX device, at least the most of `fetched_bytes`; beyond it a unit is read again.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxinf.errors import BudgetError
from jaxinf.streaming.plan.memory import NUM_STAGED, Memory, StepNeeds
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
      stays: Whether the unit's first call of the next step finds it in memory.
    """

    unit: ParamUnit
    first: int
    last: int
    gradient: int | None = None
    stays: bool = False

    @property
    def end(self) -> int:
        """The number of the last call during which it must be in memory."""
        return self.last if self.gradient is None else max(self.last, self.gradient)


class ParamReads(NamedTuple):
    """The reads of a plan.

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
        held = {first[fetch.unit] for fetch in self.fetches if fetch.stays}
        return tuple(fetch for fetch in self.fetches if fetch not in held)

    def num_first(self, fetches: Sequence[Fetch]) -> int:
        """Number of reads that have room when a step begins, of those that it does."""
        held_bytes = sum(f.unit.page_bytes for f in {*self.fetches} - {*fetches})
        sizes = accumulate(fetch.unit.page_bytes for fetch in fetches)
        return bisect_right([*sizes], self.room_bytes - held_bytes)

    @property
    def largest_bytes(self) -> int:
        return max((fetch.unit.page_bytes for fetch in self.fetches), default=0)


def plan_reads(plan: "Plan", needs: StepNeeds, memory: Memory) -> ParamReads:
    """Plans the reads of a step; none if its params are in memory.

    Raises:
      BudgetError: The host has no room for params on their way to the device.
    """
    unit_of, is_staged = needs.unit_of, memory.staged > 0
    if unit_of is None:
        return ParamReads()
    fetches = fetches_of(use._replace(tensor=unit_of(use.tensor)) for use in plan.uses)
    spare = max(0, memory.programs - plan.peak_bytes)
    held = fetched_bytes(fetches, len(plan.calls))
    room = int(held.max(initial=0)) + spare
    fetches = keep_between(fetches, held, spare, needs.frozen)
    limit, largest = room - spare // 4, ParamReads(fetches).largest_bytes
    if is_staged:
        limit, held = memory.staged - NUM_STAGED * largest, np.zeros_like(held)
        if limit < 0:
            raise BudgetError(
                "memory_bytes",
                f"it leaves {format_bytes(memory.staged)} for params on their way to "
                f"the device, which take {NUM_STAGED} x {format_bytes(largest)}",
                -limit,
            )
    gradients = {
        unit: number
        for number, call in enumerate(plan.calls)
        for unit in (unit_of(piece) for piece, _ in call.gradients)
        if unit in needs.handed
    }
    fetches = hand_over(fetches, gradients, held, limit, is_staged=is_staged)
    if is_staged:
        return ParamReads(fetches, room, memory.staged - largest)
    used = min(room, sum(fetch.unit.page_bytes for fetch in fetches))
    return ParamReads(fetches, used, unused_bytes=room - used)


def staged_bytes(unit_of: UnitOf, plan: "Plan") -> int:
    """Returns the host's memory that params take on their way to the device."""
    sizes = (unit_of(use.tensor).page_bytes for use in plan.uses)
    return NUM_STAGED * max(sizes, default=PAGE_BYTES)


def fetches_of(uses: Iterable[Stay]) -> tuple[Fetch, ...]:
    """Returns the reads of one step, in order.

    A unit stays if the next call needs it, too; one needed later is read again.

    Args:
      uses: When units are needed, in order.
    """
    found = list[Fetch]()
    latest = dict[ParamUnit, int]()
    for first, stop, _, unit in uses:
        own = latest.get(unit)
        if own is None or found[own].last < first - 1:
            own = latest[unit] = len(found)
            found.append(Fetch(unit, first, first))
        found[own] = found[own]._replace(last=max(found[own].last, stop - 1))
    return tuple(found)


def fetched_bytes(fetches: Sequence[Fetch], num_calls: int) -> np.ndarray:
    """Returns the least memory for units during each call.

    Two calls are in flight; with less than the most of it a step would deadlock.
    """
    stays = (Stay(one.first, one.end + 2, one.unit.page_bytes) for one in fetches)
    return occupancy(num_calls + 2, stays)


def keep_between(
    fetches: Sequence[Fetch],
    held: np.ndarray,
    spare_bytes: int,
    frozen: Set[int] = frozenset(),
) -> tuple[Fetch, ...]:
    """Joins reads of the same unit, those that are nearest to each other first.

    Half of the memory is for reading ahead, unless nothing is left to be read.

    Args:
      held: Memory for units during each call, at least; updated.
      spare_bytes: Memory for units beyond the most of it.
      frozen: Leaves that no update changes, whose units may stay from step to step.
    """
    units = {one.unit for one in fetches}
    kept = {unit for unit in units if unit.leaf in frozen and not unit.needs_assembly}
    changing = sum(one.unit.page_bytes for one in fetches if one.unit not in kept)
    least, most = held.copy(), int(held.max(initial=0)) + spare_bytes
    for ahead_bytes in (min(spare_bytes // 2, changing), spare_bytes // 2):
        held[:] = least
        found = _joined(fetches, kept, held, most - ahead_bytes)
        if not kept & {one.unit for one in ParamReads(found).repeated}:
            break
    return found


def _joined(
    fetches: Sequence[Fetch], kept: Set[ParamUnit], held: np.ndarray, limit_bytes: int
) -> tuple[Fetch, ...]:
    reads: dict[ParamUnit, list[int]] = {}
    for number, fetch in enumerate(fetches):
        reads.setdefault(fetch.unit, []).append(number)
    # From a read's end to the next one's begin, perhaps in the next step.
    gaps = list[Stay]()
    for unit, own in reads.items():
        later = [*own[1:], *(own[:1] if unit in kept else ())]
        for one, other in zip(own, later, strict=False):
            begin = fetches[other].first + (other <= one) * len(held)
            end = fetches[one].end + 2
            gaps.append(Stay(end, max(end, begin), unit.page_bytes, (one, other)))
    gaps.sort(key=lambda gap: gap.stop - gap.start)
    joined, before = list(fetches), dict[int, int]()
    for gap in fill(held, gaps, limit_bytes):
        one, other = gap.tensor
        if other <= one:
            joined[one] = joined[one]._replace(stays=True)
        else:
            before[other] = one
    for other in sorted(before, reverse=True):
        one, read = before[other], joined[other]
        joined[one] = joined[one]._replace(last=read.last, stays=read.stays)
    return tuple(fetch for n, fetch in enumerate(joined) if n not in before)


def hand_over(
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
        one.unit: number
        for number, one in enumerate(fetches)
        if one.first <= gradients.get(one.unit, -1)
    }
    waits = []
    for unit, number in last.items():
        one = fetches[number]._replace(gradient=gradients[unit])
        start = one.first if is_staged else one.last + 2
        waits.append(Stay(start, one.end + 2, unit.page_bytes, (number, one)))
    waits.sort(key=lambda stay: stay.tensor[1].gradient - stay.tensor[1].last)
    chosen = dict(stay.tensor for stay in fill(held, waits, limit_bytes))
    return tuple(chosen.get(number, fetch) for number, fetch in enumerate(fetches))
