"""Simple rules for values that leave, which the planner has to beat.

Invariant: what a rule gives fits the budget, or is None.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxinf.schedule.occupancy import Stay, occupancy
from jaxinf.streaming.plan.calls import Calls
from jaxinf.streaming.plan.offload import candidates, fitted
from jaxinf.streaming.plan.simulator import Profile

__all__ = ["RULES"]

Memory = Callable[[Calls], Sequence[int]]


def _all_kept(calls: Calls, budget: int, memory: Memory, _: Profile) -> Calls:
    return calls


def _latest_used(calls: Calls, budget: int, memory: Memory, _: Profile) -> Calls:
    """As many as the budget needs, by Belady's rule."""
    return fitted(calls, budget, memory)


def _largest(calls: Calls, budget: int, memory: Memory, _: Profile) -> Calls:
    """Greedy: the values that free most bytes for most calls, until the rest fits."""
    used = np.array(memory(calls), np.int64)
    chosen: list[Stay] = []
    stays = sorted(candidates(calls), key=lambda s: s.num_bytes * (s.start - s.stop))
    for stay in stays:
        if (used - occupancy(len(used), chosen)).max(initial=0) <= budget:
            break
        chosen.append(stay)
    return fitted(calls, budget, memory, chosen)


def _adaptive(calls: Calls, budget: int, memory: Memory, profile: Profile) -> Calls:
    """SSDTrain's adaptive amount: values leave up to the bandwidth (FlashTrain code).

    Segments are walked in order. Everything stays from the first one on with
    (bytes before + 2 x its bytes) / (3 x forward - 2 x time before) > bandwidth.
    """
    stays = candidates(calls)
    forward = calls.calls[: calls.num_forward]
    seconds = [profile.seconds[call.program.key] for call in forward]
    left_s = 3 * sum(seconds)
    before_bytes = 0
    chosen: list[Stay] = []
    for number in range(len(forward)):
        own = [stay for stay in stays if calls.lives[stay.tensor].made == number]
        own_bytes = sum(calls.stored_bytes(one.tensor, one.stop + 1) for one in own)
        if before_bytes + 2 * own_bytes > profile.write * left_s:
            break
        chosen += own
        before_bytes += own_bytes
        left_s -= 2 * seconds[number]
    return fitted(calls, budget, memory, chosen)


RULES: Mapping[str, Callable[[Calls, int, Memory, Profile], Calls]] = {
    "keep": _all_kept,
    "offload": _latest_used,
    "greedy": _largest,
    "SSDTrain": _adaptive,
}
"""Rules by name. Each takes calls without evictions, the budget, the memory of calls,
and measured times, and returns calls that may exceed the budget."""
