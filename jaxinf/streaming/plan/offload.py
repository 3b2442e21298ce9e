"""Chooses the values that are away for a part of a step, and where they wait.

See `schedule.placement` for the rules.

Invariant: a step's memory is as planned at every call, however fast the drive is: a
value's memory is free from one given call to another.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from jaxinf.errors import BudgetError
from jaxinf.io import PAGE_BYTES, page_ceil
from jaxinf.schedule.placement import (
    NUM_COPIES,
    Stay,
    Tiers,
    evictions,
    host_tier,
    occupancy,
)
from jaxinf.streaming.plan.calls import Calls

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
    calls: Calls, budget_bytes: int, memory: Callable[[Calls], Sequence[int]]
) -> Calls:
    """Returns the calls with as few evictions as the budget needs.

    See `schedule.placement.evictions`.

    Args:
      memory: Returns the memory during each call, such as `Calls.call_bytes`.
    """
    calls = calls.evicting({})
    made = {slot: life.made for slot, life in calls.lives.items()}
    used = np.array(memory(calls), np.int64)
    return calls.evicting(evictions(used, candidates(calls), made, budget_bytes))


def fitted_lending(
    calls: Calls, budget_bytes: int, memory: Callable[[Calls], Sequence[int]]
) -> Calls:
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
    for slot, (made, reads, num_bytes, aval) in calls.lives.items():
        if num_bytes < SMALL_BYTES or not reads or reads[-1] - made <= _WRITING:
            continue
        if slot in pinned or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            continue
        gaps = pairwise([made, *reads])
        last, needed = max(gaps, key=lambda gap: gap[1] - gap[0])
        if needed - last > _WRITING:
            gap = last + _WRITING - 1, needed - 1
            found.append(Stay(*gap, num_bytes, slot))
    return found


def plan_tiers(calls: Calls, host_bytes: int) -> Tiers:
    """Divides the host's memory for values that leave a device with its own."""
    away = {
        slot: (one, page_ceil(calls.lives[slot].num_bytes))
        for slot, one in sorted(calls.evictions.items())
    }
    return host_tier(len(calls.calls), away, host_bytes, PAGE_BYTES)


def check_tiers(tiers: Tiers, host_bytes: int) -> None:
    """Refuses a host whose memory is too small for what is on its way.

    Raises:
      BudgetError: Names the bytes that are missing.
    """
    if tiers.least_bytes:
        raise BudgetError(
            "memory_bytes",
            f"it leaves {max(host_bytes, 0)} bytes of the host for values that leave "
            f"the device; expected {tiers.least_bytes}, for all of them or for "
            f"{2 * NUM_COPIES} x the largest, on its way to drives and back",
            tiers.least_bytes - host_bytes,
            ", or raise device_memory_bytes",
        )


def check_leaving(
    calls: Calls,
    budget_bytes: int,
    memory: Callable[[Calls], Sequence[int]],
    host_bytes: int,
) -> None:
    """Refuses a host without room for values that have to leave the device.

    Args:
      calls: Calls without evictions.
      memory: Returns the memory during each call, such as `Calls.call_bytes`.
      host_bytes: The most memory of the host for values.

    Raises:
      BudgetError: As `check_tiers`.
    """
    found = fitted_lending(calls, budget_bytes, memory)
    if max(memory(found), default=0) <= budget_bytes:
        check_tiers(plan_tiers(found, host_bytes), host_bytes)
