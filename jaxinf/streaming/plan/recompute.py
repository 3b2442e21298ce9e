"""Which segments ``policy="plan"`` recomputes, by the times of a few measured steps.

    values of a segment   recomputed: seconds of its forward call, a byte that it frees
                          on a drive: seconds that a byte takes there and back

Values leave as with ``"offload"``: what memory has no room for, the furthest next use
first. As long as drives move it beside the programs, that costs nothing. What they
cannot move in this time is recomputed instead, the cheapest bytes first, as far as that
takes less time than the drives (the rule of SSDTrain, arXiv 2408.10013, section III,
with measured times). Memory that a recomputed segment frees then keeps other values.

Invariant: the cuts stay, so bits do. The choice is made anew in each run.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import add
from statistics import median
from typing import NamedTuple

from jaxinf.streaming.plan.calls import Plan

NUM_MEASURED = 3
"""Steps that are measured before the choice."""

# Drives that make a step longer by less than this share are taken to keep up.
_LEAST_SHARE = 0.02


class StepTimes(NamedTuple):
    """Times of calls that ran one at a time, and of the device's waits before them."""

    call_s: Sequence[float]
    waited_s: Sequence[float]

    @property
    def step_s(self) -> float:
        return sum(self.call_s) + sum(self.waited_s)


def segments_to_recompute(plan: Plan, steps: Sequence[StepTimes]) -> frozenset[int]:
    """Returns the segments to recompute, in a plan that has recomputed none."""
    freed, forward_s = freed_bytes(plan), defaultdict[int, float](float)
    if not freed:  # perhaps nothing is backward
        return frozenset()
    best = min(steps, key=lambda step: step.step_s)
    directions = [call.program.direction for call in plan.calls]
    turn = directions.index("backward")
    byte_s = left_s = 0.0
    for half in (slice(turn), slice(turn, None)):  # drives write; then they read
        waited_s = sum(best.waited_s[half])
        if waited_s >= _LEAST_SHARE * best.step_s:  # then they are always busy
            half_s = sum(map(add, best.call_s[half], best.waited_s[half]))
            byte_s += half_s / plan.evicted_bytes
            left_s += waited_s
    for number, call in enumerate(plan.calls):
        if call.program.direction == "forward" and not call.is_repeat:
            call_s = median(step.call_s[number] for step in steps)
            forward_s[call.program.segment] += call_s
    chosen = set[int]()
    for segment in sorted(freed, key=lambda k: (forward_s[k] / freed[k], k)):
        saved_s = freed[segment] * byte_s
        if left_s <= 0 or forward_s[segment] >= saved_s:
            break
        chosen.add(segment)
        left_s -= saved_s
    return frozenset(chosen)


def freed_bytes(plan: Plan) -> Counter[int]:
    """Returns the bytes that recomputation of each segment would free meanwhile.

    They are those of values that, of all later programs, only its backward reads.
    """
    freed, last = Counter[int](), len(plan.cuts) - 2
    for life in plan.lives.values():
        program = plan.calls[life.made].program
        if program.direction == "forward" and program.segment < last:
            readers = (plan.calls[number].program for number in life.takers)
            backward = {x.segment for x in readers if x.direction == "backward"}
            if backward == {program.segment}:
                freed[program.segment] += life.num_bytes
    return freed
