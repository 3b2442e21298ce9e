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
from jaxinf.streaming.plan.calls import Plan

SMALL_BYTES = 64 << 10
"""Smaller values stay in memory."""

# Calls from the one after which a value is written to the first that has its memory:
# the value is computed, then written beside another call.
_WRITING = 2


def least_bytes(plan: Plan, temp_bytes: Mapping[str, int] | None = None) -> int:
    """The least peak memory of a step; arguments as for `Plan.call_bytes`."""
    used = np.array(plan.call_bytes(temp_bytes), np.int64)
    if plan.is_offloaded:
        used -= occupancy(len(used), candidates(plan))
    return int(used.max(initial=0))


def fitted(
    plan: Plan, budget_bytes: int, memory: Callable[[Plan], Sequence[int]]
) -> Plan:
    """Returns the plan with as few evictions as the budget needs.

    See `schedule.placement.evictions`.

    Args:
      memory: Returns the memory during each call, such as `Plan.call_bytes`.
    """
    plan = plan.varied(evictions={})
    made = {slot: life.made for slot, life in plan.lives.items()}
    used = np.array(memory(plan), np.int64)
    found = evictions(used, candidates(plan), made, budget_bytes)
    return plan.varied(evictions=found)


def evicted(plan: Plan, budget_bytes: int, temp_bytes: Mapping[str, int]) -> Plan:
    """Returns the plan with as few values on a drive as the budget allows.

    All values that stay lend their memory. That takes less memory, and time: new memory
    has to be cleared.

    Args:
      budget_bytes: Memory for a step's programs; at least `least_bytes`.
      temp_bytes: Temporaries of the compiled programs by key.
    """
    found = plan.varied(lenders=None)
    if found.most_bytes(temp_bytes) > budget_bytes:
        found = fitted(plan, budget_bytes, lambda one: one.call_bytes(temp_bytes))
        found = found.varied(lenders=None)
    return found.varied(peak_bytes=found.most_bytes(temp_bytes))


def candidates(plan: Plan) -> list[Stay]:
    """Returns the stays of values, by slot, that these may give up.

    They are neither small, nor results, nor handed to others. While the last call of a
    stay runs, the one that takes the value waits.
    """
    pinned: set[object] = set(plan.results)
    for call in plan.calls:
        pinned.update(call.makes[i] for _, i in call.gradients)
        pinned.update(call.takes[i] for i in plan.donated[call.program.key])
    found = []
    for slot, (made, takers, num_bytes, aval) in plan.lives.items():
        if num_bytes < SMALL_BYTES or not takers or takers[-1] - made <= _WRITING:
            continue
        if slot in pinned or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            continue
        gaps = pairwise([made, *takers])
        last, needed = max(gaps, key=lambda gap: gap[1] - gap[0])
        if needed - last > _WRITING:
            gap = last + _WRITING - 1, needed - 1
            found.append(Stay(*gap, num_bytes, slot))
    return found


def plan_tiers(plan: Plan, host_bytes: int) -> Tiers:
    """Divides the host's memory for values that leave a device with its own."""
    away = {
        slot: (one, page_ceil(plan.lives[slot].num_bytes))
        for slot, one in sorted(plan.evictions.items())
    }
    return host_tier(len(plan.calls), away, host_bytes, PAGE_BYTES)


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
    plan: Plan, budget_bytes: int, temp_bytes: Mapping[str, int], host_bytes: int
) -> None:
    """Refuses a host without room for values that have to leave the device.

    Args:
      plan: A plan without evictions.
      temp_bytes: As for `Plan.call_bytes`.
      host_bytes: The most memory of the host for values.

    Raises:
      BudgetError: As `check_tiers`.
    """
    found = evicted(plan, budget_bytes, temp_bytes)
    if found.peak_bytes <= budget_bytes:
        check_tiers(plan_tiers(found, host_bytes), host_bytes)
