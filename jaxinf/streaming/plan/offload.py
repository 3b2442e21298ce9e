"""Which values leave for some calls of a step, and where they wait.

    programs' memory    `evict_values`: the value that is needed last leaves first; each
                        comes back as early as there is room
    host                `place_on_host`, of a device with memory of its own: it keeps
                        those that are needed soonest, as far as there is room for
                        others on their way to drives and back
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
    OffloadPlan,
    Plan,
    Policy,
    StepValue,
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

_EXTRA_SHARE = 4


def may_offload(traced: Traced, policy: Policy, num_parts: int) -> bool:
    """Whether values may be on a drive for some calls; never with several devices."""
    return traced.mesh is None and (policy in ("offload", "plan") or num_parts > 1)


def least_peak_bytes(plan: Plan) -> int:
    """Returns the peak memory of a step if all values leave that may."""
    used = np.array(plan.call_bytes(), np.int64)
    if plan.may_offload:
        used -= occupancy(len(used), evictable_stays(plan))
    return int(used.max(initial=0))


def evict_values(
    plan: Plan,
    budget_bytes: int,
    call_bytes: Callable[[Plan], Sequence[int]] = Plan.call_bytes,
) -> Plan:
    """Returns the plan with as few values on a drive as the budget needs.

    Of the values in memory the one that is needed last leaves. They come back in the
    order of their use, as early as there is room. If all leave, the rest may still
    exceed the budget.

    Args:
      call_bytes: Returns the memory during each call. While a call runs, the one after
        it waits, with what it needs in memory.
    """
    plan = replace(plan, evictions={})
    used = np.array(call_bytes(plan), np.int64)
    ended = end_stays(used, evictable_stays(plan), budget_bytes)
    evictions, back = dict[StepValue, Eviction](), 0
    for stay in sorted(ended, key=lambda stay: stay.stop):
        # It is away for a call at least; none comes back before one used earlier.
        earliest, back = max(back, ended[stay] + 1), stay.stop
        while back > earliest and used[back - 1] + stay.num_bytes <= budget_bytes:
            back -= 1
        used[back : stay.stop] += stay.num_bytes
        evictions[stay.tensor] = Eviction(
            leave_call=plan.lives[stay.tensor].made,
            free_call=ended[stay] + 1,
            return_call=back + 1,
            use_call=stay.stop + 1,
        )
    plan = replace(plan, evictions=evictions)
    peak_bytes, offload = max(call_bytes(plan), default=0), _place_on_drives(plan)
    return replace(plan, peak_bytes=peak_bytes, offload=offload)


def evictable_stays(plan: Plan) -> list[Stay]:
    """Returns the stays that values may give up: the longest between calls of each.

    Such values are neither small, nor results, nor handed to others. While the last
    call of a stay runs, the one that takes the value waits.
    """
    pinned: set[object] = set(plan.results)
    for call in plan.calls:
        pinned.update(call.makes[i] for _, i in call.gradients)
        pinned.update(call.takes[i] for i in plan.donated[call.program.key])
    stays = []
    for value, (made, takers, num_bytes, aval) in plan.lives.items():
        if num_bytes < SMALL_BYTES or not takers or value in pinned:
            continue
        if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            continue
        gaps = pairwise([made, *takers])
        last, use = max(gaps, key=lambda gap: gap[1] - gap[0])
        if use - last > NUM_WRITING:
            stays.append(Stay(last + NUM_WRITING - 1, use - 1, num_bytes, value))
    return stays


def end_stays(
    occupied: np.ndarray, stays: Iterable[Stay], capacity: int
) -> dict[Stay, int]:
    """Ends stays where the bytes exceed the capacity.

    The value that is needed last leaves first (Belady's rule), of several the largest,
    of equal ones the one given first. If all leave, the rest may still exceed.

    Returns:
      For each of `stays` that ends early, the first call without its value.
    """
    ended: dict[Stay, int] = {}
    by_use = sorted(stays, key=lambda stay: (stay.stop, stay.num_bytes), reverse=True)
    for call in np.flatnonzero(occupied > capacity).tolist():
        for stay in by_use:
            if occupied[call] <= capacity:
                break
            if stay.start <= call < stay.stop and stay not in ended:
                occupied[call : stay.stop] -= stay.num_bytes
                ended[stay] = call
    return ended


def _place_on_drives(plan: Plan) -> OffloadPlan:
    """Places all values that leave on drives; they come back where programs read."""
    lives = plan.lives
    stays = (
        Stay(out.return_call, lives[v].takers[-1] + 2, page_ceil(lives[v].num_bytes))
        for v, out in plan.evictions.items()
    )
    most_bytes = int(occupancy(len(plan.calls) + 1, stays).max(initial=0))
    return OffloadPlan(on_drive=tuple(plan.evictions), read_bytes=most_bytes)


def place_on_host(plan: Plan, host_bytes: int) -> OffloadPlan:
    """Places values that leave a device with memory of its own on the host, or drives.

    While too many bytes wait on the host, the value that is needed last goes to a
    drive, as soon as it is made. If not all can wait there, the host is divided:

    leaving    2 copies of the largest value, and of what is left a quarter, at most
               another copy, so that a value is copied while another is written
    coming     as much, and what waiting values never take
    waiting    the rest
    """
    stays = [
        Stay(out.leave_call, out.use_call, page_ceil(plan.lives[v].num_bytes), v)
        for v, out in sorted(plan.evictions.items())
    ]
    waiting = occupancy(len(plan.calls), stays)
    peak_bytes = int(waiting.max(initial=0))
    if peak_bytes <= max(host_bytes, 0):
        return OffloadPlan(has_link=True, host_bytes=peak_bytes)
    largest_bytes = max(stay.num_bytes for stay in stays)
    copies_bytes = NUM_COPIES * largest_bytes
    left_bytes = host_bytes - 2 * copies_bytes
    if left_bytes < 0:
        least_bytes = min(2 * copies_bytes, peak_bytes)
        raise BudgetError(
            "memory_bytes",
            f"it leaves {format_bytes(max(host_bytes, 0))} of the host for values that "
            f"leave the device; expected {format_bytes(least_bytes)}, for all of them "
            f"or for {2 * NUM_COPIES} x the largest, on its way to drives and back",
            least_bytes - host_bytes,
            ", or raise device_memory_bytes",
        )
    extra_bytes = min(largest_bytes, page_floor(left_bytes // _EXTRA_SHARE))
    leaving_bytes = copies_bytes + extra_bytes
    ended = end_stays(waiting, stays, host_bytes - 2 * leaving_bytes)
    waiting = occupancy(len(plan.calls), (stay for stay in stays if stay not in ended))
    coming_bytes = host_bytes - leaving_bytes - int(waiting.max(initial=0))
    # Of those that drives have read, one at a time is pinned for its copy back.
    read_bytes = page_floor(coming_bytes - (NUM_COPIES - 1) * largest_bytes)
    return OffloadPlan(
        on_drive=tuple(x.tensor for x in sorted(ended, key=lambda stay: stay.stop)),
        read_bytes=min(sum(stay.num_bytes for stay in ended), read_bytes),
        has_link=True,
        host_bytes=host_bytes,
        leaving_bytes=leaving_bytes,
    )
