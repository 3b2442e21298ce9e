"""Chooses the values that are on a drive for a part of a step, by next use.

Invariant: a step's memory is as planned at every call, however fast the drive is: a
value's memory is free from one given call to another.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from jaxinf.schedule.occupancy import Stay, occupancy
from jaxinf.schedule.placement import evictions
from jaxinf.streaming.plan.calls import Calls

__all__ = [
    "SMALL_BYTES",
    "candidates",
    "fitted",
    "fitted_lending",
    "least_offloaded_bytes",
]

SMALL_BYTES = 64 << 10
"""Smaller values stay in memory."""

# Calls from the one after which a value is written to the first that has its memory:
# the value is computed, then written beside another call.
_WRITING = 2


def least_offloaded_bytes(
    calls: Calls, temp_bytes: Mapping[str, int] | None = None
) -> int:
    """The least peak memory of a step; arguments as for `Calls.peak_bytes`."""
    used = np.array(calls.call_bytes(temp_bytes), np.int64)
    used -= occupancy(len(used), candidates(calls))
    return int(used.max(initial=0))


def fitted(
    calls: Calls,
    budget_bytes: int,
    memory: Callable[[Calls], Sequence[int]],
    chosen: Collection[Stay] | None = None,
) -> Calls:
    """Returns the calls with as few evictions as the budget needs, or with given ones.

    See `schedule.placement.evictions`.

    Args:
      calls: Calls without evictions.
      budget_bytes: The most memory of a step.
      memory: Returns the memory during each call, such as `Calls.call_bytes`.
      chosen: Of `candidates`, those that leave, each as soon as it can; None for as
        few as the budget needs.
    """
    calls = calls.evicting({})
    made = {slot: life.made for slot, life in calls.lives.items()}
    used = np.array(memory(calls), np.int64)
    return calls.evicting(
        evictions(used, candidates(calls), made, budget_bytes, chosen)
    )


def fitted_lending(
    calls: Calls, budget_bytes: int, memory: Callable[[Calls], Sequence[int]]
) -> Calls:
    """Returns the calls as `fitted`, in which values that stay lend their memory."""
    lending = calls.lent()
    if max(memory(lending), default=0) <= budget_bytes:
        return lending
    return fitted(calls, budget_bytes, memory).lent()


def candidates(calls: Calls) -> list[Stay]:
    """Returns the stays of values, by slot, that these may give up.

    They are neither small, nor results, nor handed to others. While the last call of a
    stay runs, the one that reads the value waits.
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
            gap = last + _WRITING - 1, needed - 1
            found.append(Stay(*gap, life.num_bytes, slot))
    return found
