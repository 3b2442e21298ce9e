"""Which values leave for a part of a step, and where they wait.

    programs' memory    `evicted`: the value that is needed last leaves first; each
                        comes back as early as there is room
    host                `on_host`, of a device with memory of its own: it keeps those
                        that are needed soonest, as far as there is room for others on
                        their way to drives and back
    drives              the rest

Invariant: a step's memory is as planned at every call, however fast the drive is: a
value's memory is free from one given call to another, and no choice raises the bytes of
a call above its capacity. What stays on the host never reaches a drive.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from jaxinf.errors import BudgetError
from jaxinf.streaming.plan.calls import (
    NUM_WRITING,
    Eviction,
    Plan,
    Policy,
    ValueSlot,
    Waiting,
)
from jaxinf.streaming.program.lifetimes import Stay, occupancy
from jaxinf.streaming.program.trace import Traced
from jaxinf.terminal import format_bytes
from jaxinf.transfer import page_ceil, page_floor

SMALL_BYTES = 64 << 10
"""Smaller values stay in memory."""

NUM_COPIES = 2
"""Times that a value is on the host on its way to a drive, or back: pinned for the
device, and pageable for the drive. JAX may read pinned memory in place, or copy it."""

# Of the memory beyond the least, so much at most is for what is on its way: a value may
# be copied while the one before it is written.
_WAY_SHARE = 4


def may_leave(traced: Traced, policy: Policy, num_parts: int) -> bool:
    """Whether values may be on a drive for a part of a step; never on several devices.

    Args:
      num_parts: Number of parts of a batch whose values wait between segments.
    """
    return traced.mesh is None and (policy in ("offload", "plan") or num_parts > 1)


# --- who leaves the memory of the programs -------------------------------------------


def least_bytes(plan: Plan) -> int:
    """The least peak memory of a step."""
    used = np.array(plan.call_bytes(), np.int64)
    if plan.is_offloaded:
        used -= occupancy(len(used), candidates(plan))
    return int(used.max(initial=0))


def evicted(
    plan: Plan,
    budget_bytes: int,
    memory: Callable[[Plan], Sequence[int]] = Plan.call_bytes,
) -> Plan:
    """Returns the plan with as few values on a drive as the budget needs.

    Of the values in memory the one that is needed last leaves. They come back in the
    order of their use, as early as there is room. If all leave, the rest may still
    exceed the budget.

    Args:
      memory: Returns the memory during each call. While a call runs, the one after it
        waits: what it needs is there.
    """
    plan = replace(plan, evictions={})
    used = np.array(memory(plan), np.int64)
    left = evict(used, candidates(plan), budget_bytes)
    evictions, back = dict[ValueSlot, Eviction](), 0
    for stay in sorted(left, key=lambda stay: stay.stop):
        # It is away for a call at least; none comes back before one used earlier.
        earliest, back = max(back, left[stay] + 1), stay.stop
        while back > earliest and used[back - 1] + stay.num_bytes <= budget_bytes:
            back -= 1
        used[back : stay.stop] += stay.num_bytes
        evictions[stay.tensor] = Eviction(
            written=plan.lives[stay.tensor].made,
            gone=left[stay] + 1,
            back=back + 1,
            needed=stay.stop + 1,
        )
    plan = replace(plan, evictions=evictions)
    peak_bytes, waiting = max(memory(plan), default=0), _on_drives(plan)
    return replace(plan, peak_bytes=peak_bytes, waiting=waiting)


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
        if num_bytes < SMALL_BYTES or not takers or slot in pinned:
            continue
        if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            continue
        gaps = pairwise([made, *takers])
        last, needed = max(gaps, key=lambda gap: gap[1] - gap[0])
        if needed - last > NUM_WRITING:
            found.append(Stay(last + NUM_WRITING - 1, needed - 1, num_bytes, slot))
    return found


def evict(
    occupied: np.ndarray, stays: Iterable[Stay], capacity: int
) -> dict[Stay, int]:
    """Ends stays where the bytes exceed the capacity.

    The value that is needed last leaves first (Belady's rule), of several the largest,
    of equal ones the one given first. If all leave, the rest may still exceed.

    Returns:
      For each of `stays` that ends early, the first call without its value.
    """
    left: dict[Stay, int] = {}
    by_use = sorted(stays, key=lambda stay: (stay.stop, stay.num_bytes), reverse=True)
    for call in np.flatnonzero(occupied > capacity).tolist():
        for stay in by_use:
            if occupied[call] <= capacity:
                break
            if stay.start <= call < stay.stop and stay not in left:
                occupied[call : stay.stop] -= stay.num_bytes
                left[stay] = call
    return left


# --- where they wait -----------------------------------------------------------------


def _on_drives(plan: Plan) -> Waiting:
    """Has all values that leave wait on drives, and come back where programs read."""
    lives = plan.lives
    back = (
        Stay(one.back, lives[slot].takers[-1] + 2, page_ceil(lives[slot].num_bytes))
        for slot, one in plan.evictions.items()
    )
    most = int(occupancy(len(plan.calls) + 1, back).max(initial=0))
    return Waiting(on_drive=tuple(plan.evictions), read_bytes=most)


def on_host(plan: Plan, host_bytes: int) -> Waiting:
    """Has values wait on the host of a device with memory of its own.

    While too many bytes wait, the value that is needed last goes to a drive, as soon as
    it is made.

    Raises:
      BudgetError: The host has no room for what is on its way.
    """
    stays = [
        Stay(one.written, one.needed, page_ceil(plan.lives[slot].num_bytes), slot)
        for slot, one in sorted(plan.evictions.items())
    ]
    held = occupancy(len(plan.calls), stays)
    everything = int(held.max(initial=0))
    if everything <= max(host_bytes, 0):
        return Waiting(has_link=True, host_bytes=everything)
    largest = max(stay.num_bytes for stay in stays)
    passing = 2 * NUM_COPIES * largest
    if host_bytes < passing:
        least = min(passing, everything)
        raise BudgetError(
            "memory_bytes",
            f"it leaves {format_bytes(max(host_bytes, 0))} of the host for values that "
            f"leave the device; expected {format_bytes(least)}, for all of them or for "
            f"{2 * NUM_COPIES} x the largest, on its way to drives and back",
            least - host_bytes,
            ", or raise device_memory_bytes",
        )
    more = min(largest, page_floor((host_bytes - passing) // _WAY_SHARE))
    leaving = NUM_COPIES * largest + more
    left = evict(held, stays, host_bytes - 2 * leaving)
    held = occupancy(len(plan.calls), (stay for stay in stays if stay not in left))
    # Of those that drives have read, one at a time is pinned for its copy back.
    read = host_bytes - leaving - (NUM_COPIES - 1) * largest - int(held.max(initial=0))
    return Waiting(
        on_drive=tuple(x.tensor for x in sorted(left, key=lambda stay: stay.stop)),
        read_bytes=min(sum(stay.num_bytes for stay in left), page_floor(read)),
        has_link=True,
        host_bytes=host_bytes,
        leaving_bytes=leaving,
    )
