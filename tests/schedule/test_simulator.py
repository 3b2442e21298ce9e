"""The time of a step on a virtual clock, worked out by hand."""

import math

import pytest

from jaxinf.schedule.placement import Eviction
from jaxinf.schedule.simulator import Trip, Trips, simulate


def away(written, gone, back, needed, **more):
    eviction = Eviction(written, gone, back, needed)
    return Trip(needed, needed, 1, 1, 1, eviction=eviction, **more)


def values(*trips, write_s, read_s, **memory):
    """Trips of a byte each, which takes 0.5 s from the host to the device."""
    rates = {"write": 1 / write_s, "read": 1 / read_s if read_s else math.inf}
    return Trips(trips, rates | {"out": math.inf, "back": 2.0}, **memory)


def test_calls_alone_run_in_turn():
    assert simulate([1.0, 2.0, 3.0]) == 6.0


@pytest.mark.parametrize(
    ("write_s", "expected"),
    [
        (1.0, 8.0),  # beside call 1
        # Call 2 waits until 1 + 5; it and the rest take 6 s.
        (5.0, 12.0),
    ],
)
def test_a_call_waits_for_what_must_be_gone(write_s, expected):
    assert (
        simulate([1.0] * 8, values(away(0, 2, 4, 5), write_s=write_s, read_s=0))
        == expected
    )


def test_a_call_waits_for_what_it_reads():
    # It may come back when call 2 has ended, at 3, which takes until 7; 5, 6, 7 follow.
    slow = values(away(0, 2, 4, 5), write_s=1, read_s=4)
    assert simulate([1.0] * 8, slow) == 10.0


def test_drives_have_one_queue():
    both = values(away(0, 3, 5, 6), away(1, 3, 5, 6), write_s=2, read_s=0)
    # Written from 1 to 3 and from 3 to 5; five calls follow.
    assert simulate([1.0] * 8, both) == 10.0


def test_what_the_host_has_comes_back_from_there():
    held = away(0, 2, 4, 5, is_on_drive=False)
    slow = values(held, write_s=100, read_s=100, has_link=True, room=[0] * 8)
    assert simulate([1.0] * 8, slow) == 8.0
    on_way = held._replace(is_on_drive=True, way_bytes=1)
    slow = slow._replace(trips=[on_way], way_bytes=1, room=[1] * 8)
    # It is forwarded; call 7 starts when the drive does not read its memory any more.
    assert simulate([1.0] * 8, slow) == 102.0


def test_what_waits_for_the_end_is_read_after_the_last_call():
    both = values(away(0, 4, 4, 4), away(3, 4, 4, 4), write_s=1, read_s=2)
    # The later one is written when call 3 has ended, at 4; then both are read.
    assert simulate([1.0] * 4, both) == 9.0


def load(first, read_s, end=-1):
    return Trip(first, first, read_s, read_s, 1, held=end)


def loads(*trips, read_bytes, **memory):
    rates = {"read": 1.0, "back": 0.5}
    return Trips(trips, rates, read_bytes=read_bytes, **memory)


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (2, 6.0),  # from 1 to 5, where call 3 starts
        (1, 7.0),  # from the end of call 0, at 2
    ],
)
def test_params_are_read_ahead_as_there_is_room(room, expected):
    ahead = loads(load(0, 1), load(3, 4), read_bytes=room)
    assert simulate([1.0] * 4, ahead) == expected


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (0, 7.0),  # read from 2, the end of call 0
        (3, 9.0),  # from 5, the end of call 3, to 8
    ],
)
def test_params_wait_for_their_update(end, expected):
    ahead = loads(load(0, 1, end), load(5, 3), read_bytes=1)
    assert simulate([1.0] * 6, ahead) == expected


@pytest.mark.parametrize(
    ("device_bytes", "expected"),
    [
        (4, 11.0),  # copied from 6 to 10, when the first ones have been
        (2, 12.0),  # from 7, the end of call 0
    ],
)
def test_params_pass_the_host_on_their_way_to_a_device(device_bytes, expected):
    passing = loads(load(0, 2), load(3, 2), read_bytes=2, has_link=True)
    passing = passing._replace(device_bytes=device_bytes)
    assert simulate([1.0] * 4, passing) == expected


def test_params_and_values_move_at_the_same_time():
    ahead = loads(load(0, 1), load(5, 6), read_bytes=2)
    slow = values(away(0, 2, 4, 5), write_s=5, read_s=0)
    # Call 2 waits until 7 for the value; what call 5 reads is there then.
    assert simulate([1.0] * 8, slow, ahead) == 13.0
