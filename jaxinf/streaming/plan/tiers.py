"""The host's memory for values that leave a device with memory of its own.

Invariant: what is refused is refused before anything is written; see
`schedule.placement` for what is chosen.
"""

from collections.abc import Callable, Iterable, Sequence

from jaxinf.errors import BudgetError
from jaxinf.io.pages import PAGE_BYTES, page_ceil
from jaxinf.schedule.placement import NUM_COPIES, Tiers, host_tier
from jaxinf.streaming.plan.calls import Calls
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.offload import fitted_lending

__all__ = ["beside_values", "check_leaving", "check_tiers", "plan_tiers"]


def plan_tiers(calls: Calls, host_bytes: int) -> Tiers:
    """Divides the host's memory for values of calls; see `host_tier`."""
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
    found = tiers.shortage
    if found is not None:
        raise BudgetError(
            "memory_bytes",
            f"it leaves {max(host_bytes, 0)} bytes of the host for values that leave "
            f"the device; expected {found.smallest_bytes}, for all of them or for "
            f"{2 * NUM_COPIES} x the largest, on its way to drives and back",
            found.missing_bytes,
            ", or raise device_memory_bytes",
        )


def beside_values(division: Division, tiers: Tiers | None) -> Division:
    """Returns the memory without that of the host for values."""
    if tiers is None or not tiers.host_bytes:
        return division
    return division.without(tiers.host_bytes, "keeping values")


def check_leaving(
    every: Iterable[Calls],
    budget_bytes: int,
    memory: Callable[[Calls], Sequence[int]],
    host_bytes: int,
) -> None:
    """Refuses a host without room for values that have to leave the device.

    Args:
      every: Calls without evictions; one of them has to fit.
      budget_bytes: Memory of the device.
      memory: Returns the memory during each call, such as `Calls.call_bytes`.
      host_bytes: The most memory of the host for values.

    Raises:
      BudgetError: As `check_tiers`.
    """
    found = None
    for calls in every:
        own = fitted_lending(calls, budget_bytes, memory)
        if max(memory(own), default=0) > budget_bytes:
            continue
        found = plan_tiers(own, host_bytes)
        if found.shortage is None:
            return
    if found is not None:
        check_tiers(found, host_bytes)
