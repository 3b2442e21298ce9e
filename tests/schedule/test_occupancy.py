"""Bytes by call, against a sum for each call."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxinf.schedule.occupancy import Stay, occupancy

NUM_CALLS = 6
CALLS = st.integers(0, NUM_CALLS)
STAYS = st.tuples(CALLS, CALLS, st.integers(-(1 << 40), 1 << 40)).map(
    lambda stay: Stay(min(stay[:2]), max(stay[:2]), stay[2])
)


@given(st.lists(STAYS))
def test_each_call_has_the_bytes_of_the_stays_around_it(stays):
    found = occupancy(NUM_CALLS, stays)
    assert found.dtype == np.int64
    assert found.tolist() == [
        sum(stay.num_bytes for stay in stays if stay.start <= call < stay.stop)
        for call in range(NUM_CALLS)
    ]


def test_no_call_has_no_bytes():
    assert occupancy(0, []).shape == (0,)
