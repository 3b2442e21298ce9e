"""What stays, leaves and comes back, against every choice in small problems."""

import math
from itertools import combinations, product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxinf.streaming.plan.leaving import evict, prefetch
from jaxinf.streaming.program.lifetimes import Stay, fill, occupancy

NUM_CALLS = 7


@st.composite
def stays_of(draw, num_bytes, least_calls=1):
    calls = st.integers(0, NUM_CALLS)
    found = []
    for tensor in range(draw(st.integers(0, 6))):
        start, stop = sorted(draw(st.tuples(calls, calls)))
        if stop - start >= least_calls:
            found.append(Stay(start, stop, draw(num_bytes), tensor))
    return found


SMALL = st.integers(1, 5)
PINNED = st.lists(st.integers(0, 5), min_size=NUM_CALLS, max_size=NUM_CALLS).map(
    lambda pinned: np.array(pinned, np.int64)
)
CAPACITY = st.integers(0, 12)


def after(occupied, stays):
    return occupied + occupancy(len(occupied), stays)


def without(occupied, stays):
    return occupied - occupancy(len(occupied), stays)


def fewest_bytes(occupied, stays, capacity):
    """The fewest bytes that have to leave; infinite if all are not enough."""
    fitting = [
        sum(stay.num_bytes for stay in chosen)
        for count in range(len(stays) + 1)
        for chosen in combinations(stays, count)
        if without(occupied, chosen).max() <= capacity
    ]
    return min(fitting, default=math.inf)


@given(PINNED, stays_of(SMALL, least_calls=0), CAPACITY)
def test_what_is_added_fits_and_nothing_else_would(pinned, stays, capacity):
    occupied = pinned.copy()
    added = fill(occupied, stays, capacity)
    assert occupied.tolist() == after(pinned, added).tolist()
    assert added == [stay for stay in stays if stay in added]
    for number, stay in enumerate(stays):
        before = [one for one in stays[:number] if one in added]
        during = after(pinned, before)[stay.start : stay.stop]
        assert (stay in added) == (max(during, default=0) + stay.num_bytes <= capacity)


@given(PINNED, stays_of(SMALL), CAPACITY)
def test_calls_fit_or_everything_has_left(pinned, stays, capacity):
    occupied = after(pinned, stays)
    left = evict(occupied, stays, capacity)
    gone = [stay._replace(start=call) for stay, call in left.items()]
    assert occupied.tolist() == without(after(pinned, stays), gone).tolist()
    for call, num_bytes in enumerate(occupied):
        here = {stay for stay in stays if stay.start <= call < stay.stop}
        assert num_bytes <= capacity or here <= {s for s in left if left[s] <= call}
    assert all(stay.start <= call < stay.stop for stay, call in left.items())


@given(PINNED, stays_of(st.just(2)), CAPACITY)
def test_as_few_as_possible_leave_if_they_are_equal(pinned, stays, capacity):
    occupied = after(pinned, stays)
    fewest = fewest_bytes(occupied, stays, capacity)
    left = evict(occupied, stays, capacity)
    assert fewest in (2 * len(left), math.inf)


def test_the_tensor_needed_last_leaves_then_the_largest_then_the_first():
    stays = [
        Stay(0, 3, 2, "soon"),
        Stay(0, 5, 1, "small"),
        Stay(0, 5, 2, "first"),
        Stay(0, 5, 2, "second"),
    ]
    for capacity, expected in ((5, "first"), (3, "second"), (2, "small"), (1, "soon")):
        left = evict(occupancy(5, stays), stays, capacity)
        assert [stay.tensor for stay in left][-1] == expected


@given(PINNED, stays_of(SMALL), CAPACITY, st.randoms())
def test_tensors_come_back_as_early_as_there_is_room(away, stays, capacity, random):
    """In the order of use, the first call of each is the earliest of all choices."""
    left = {stay: random.randrange(stay.start, stay.stop) for stay in stays}
    occupied = away.copy()
    returned = prefetch(occupied, left, capacity)
    here = [stay._replace(start=back) for stay, back in returned.items()]
    assert occupied.tolist() == after(away, here).tolist()
    assert (occupied <= np.maximum(away, capacity)).all()
    in_order = sorted(left, key=lambda stay: stay.stop)
    assert list(returned) == in_order

    def fits(calls):
        stays = [s._replace(start=c) for s, c in zip(in_order, calls, strict=True)]
        found = after(away, stays)
        is_raised = found > away
        return sorted(calls) == list(calls) and (found[is_raised] <= capacity).all()

    choices = [range(left[stay] + 1, stay.stop + 1) for stay in in_order]
    assert tuple(returned.values()) == next(filter(fits, product(*choices)))
