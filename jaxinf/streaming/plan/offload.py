"""Chooses the values that are on a drive for a part of a step, by next use.

Invariant: a step's memory is as planned at every call, however fast the drive is: a
value's memory is free from one given call to another.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from jaxinf.streaming.plan.calls import Absence, Calls, Life, Slot

__all__ = [
    "SMALL_BYTES",
    "Candidate",
    "candidates",
    "fitted",
    "least_offloaded_bytes",
    "leaving",
]

SMALL_BYTES = 64 << 10
"""Smaller values stay in memory."""

# Calls from the one after which a value is written to the first that has its memory:
# the value is computed, then written beside another call.
_WRITING = 2


@dataclass(frozen=True, eq=False)
class Candidate:
    """A value that may leave between two calls that use it.

    Attributes:
      slot, life: The value.
      last, needed: Numbers of the two calls.
    """

    slot: Slot
    life: Life
    last: int
    needed: int

    @property
    def positions(self) -> slice:
        """Calls that run while the value may be absent."""
        return slice(self.last + _WRITING - 1, self.needed - 1)


def least_offloaded_bytes(
    calls: Calls, temp_bytes: Mapping[str, int] | None = None
) -> int:
    """The least peak memory of a step; arguments as for `Calls.peak_bytes`."""
    return int(_least(calls, temp_bytes, candidates(calls)).max(initial=0))


def fitted(
    calls: Calls, budget_bytes: int, memory: Callable[[Calls], Sequence[int]]
) -> Calls:
    """Returns the calls with as few absences as the budget needs.

    Of the values in memory the one that is needed last leaves (Belady's rule). Values
    come back in the order of their use, as early as the budget allows. The result
    exceeds a budget that is too small even if all leave.

    Args:
      calls: Calls without absences.
      budget_bytes: The most memory of a step.
      memory: Returns the memory during each call, such as `Calls.call_bytes`.
    """
    calls = calls.absent({})
    used = np.array(memory(calls), np.int64)
    left = _leave(used, candidates(calls), budget_bytes)
    return calls.absent(_return(used, left, budget_bytes))


def leaving(
    calls: Calls,
    chosen: Collection[Candidate],
    budget_bytes: int,
    memory: Callable[[Calls], Sequence[int]],
) -> Calls:
    """Returns the calls with given absences: each value leaves as soon as it can.

    Args:
      calls: Calls without absences.
      chosen: Values of `candidates`.
      budget_bytes, memory: As for `fitted`.
    """
    used = np.array(memory(calls), np.int64)
    left = {one: one.positions.start for one in chosen}
    for one in chosen:
        used[one.positions] -= one.life.num_bytes
    return calls.absent(_return(used, left, budget_bytes))


def _leave(
    used: np.ndarray, those: list[Candidate], budget_bytes: int
) -> dict[Candidate, int]:
    """The first position at which each chosen value is absent; updates `used`."""
    left: dict[Candidate, int] = {}
    for position in range(len(used)):
        if used[position] <= budget_bytes:
            continue
        ranked = sorted(
            (
                one
                for one in those
                if one not in left
                and one.positions.start <= position < one.positions.stop
            ),
            key=lambda one: (one.needed, one.life.num_bytes, -one.slot.number),
        )
        while ranked and used[position] > budget_bytes:
            one = ranked.pop()
            left[one] = position
            used[position : one.positions.stop] -= one.life.num_bytes
    return left


def _return(
    used: np.ndarray, left: Mapping[Candidate, int], budget_bytes: int
) -> dict[Slot, Absence]:
    """Lets values come back as early as there is room, in the order of their use."""
    absences: dict[Slot, Absence] = {}
    earliest = 0
    for one, start in sorted(left.items(), key=lambda item: item[0].needed):
        stop = one.positions.stop
        back = stop
        while back > max(start + 1, earliest):
            if used[back - 1] + one.life.num_bytes > budget_bytes:
                break
            back -= 1
        used[back:stop] += one.life.num_bytes
        earliest = max(earliest, back)
        absences[one.slot] = Absence(one.life.made, start + 1, back + 1, one.needed)
    return absences


def _least(
    calls: Calls, temp_bytes: Mapping[str, int] | None, those: list[Candidate]
) -> np.ndarray:
    used = np.array(calls.call_bytes(temp_bytes), np.int64)
    for one in those:
        used[one.positions] -= one.life.num_bytes
    return used


def candidates(calls: Calls) -> list[Candidate]:
    """Returns the values that may leave.

    They are neither small, nor results, nor handed to others.
    """
    pinned: set[object] = set(calls.results)
    for call in calls.calls:
        pinned.update(call.outputs[i] for _, i in call.gradients)
        pinned.update(call.inputs[i] for i in calls.donated[call.program.key])
    found = []
    for slot, life in calls.lives.items():
        if slot in pinned or life.num_bytes < SMALL_BYTES:
            continue
        if jnp.issubdtype(life.aval.dtype, jax.dtypes.extended):
            continue
        uses = [life.made, *life.reads]
        last, needed = max(
            pairwise(uses), key=lambda gap: gap[1] - gap[0], default=(0, 0)
        )
        if needed - last > _WRITING:
            found.append(Candidate(slot, life, last, needed))
    return found
