"""The time of a step on a virtual clock, worked out by hand."""

import pytest

from jaxinf.schedule.placement import Absence
from jaxinf.schedule.simulator import Away, Host, Load, Loads, simulate


def away(written, gone, back, needed, write_s, read_s, out_s=0.0, **more):
    seconds = {"out": out_s, "write": write_s, "read": read_s, "back": 0.5}
    absence = Absence(written, gone, back, needed)
    return Away(absence, needed, seconds, 1, **more)


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
    assert simulate([1.0] * 8, [away(0, 2, 4, 5, write_s, 0.0)]) == expected


def test_a_call_waits_for_what_it_reads():
    # It may come back when call 2 has ended, at 3, which takes until 7; 5, 6, 7 follow.
    assert simulate([1.0] * 8, [away(0, 2, 4, 5, 1.0, 4.0)]) == 10.0


def test_drives_have_one_queue():
    both = [away(0, 3, 5, 6, 2.0, 0.0), away(1, 3, 5, 6, 2.0, 0.0)]
    # Written from 1 to 3 and from 3 to 5; five calls follow.
    assert simulate([1.0] * 8, both) == 10.0


def test_what_the_host_has_comes_back_from_there():
    slow = away(0, 2, 4, 5, 100.0, 100.0, is_on_drive=False)
    assert simulate([1.0] * 8, [slow], Host(0, [0] * 8)) == 8.0
    on_way = slow._replace(is_on_drive=True, way_bytes=1)
    # It is forwarded; call 7 starts when the drive does not read its memory any more.
    assert simulate([1.0] * 8, [on_way], Host(1, [1] * 8)) == 102.0


def load(first, read_s, end=None):
    return Load(first, first, first if end is None else end, read_s, 1)


RATES = {"read": 1.0, "back": 0.5}


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (2, 6.0),  # from 1 to 5, where call 3 starts
        (1, 7.0),  # from the end of call 0, at 2
    ],
)
def test_params_are_read_ahead_as_there_is_room(room, expected):
    loads = Loads([load(0, 1), load(3, 4)], room)
    assert simulate([1.0] * 4, loads=loads, rates=RATES) == expected


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (0, 7.0),  # read from 2, the end of call 0
        (3, 9.0),  # from 5, the end of call 3, to 8
    ],
)
def test_params_wait_for_their_update(end, expected):
    loads = Loads([load(0, 1, end), load(5, 3)], 1)
    assert simulate([1.0] * 6, loads=loads, rates=RATES) == expected


@pytest.mark.parametrize(
    ("device_bytes", "expected"),
    [
        (4, 11.0),  # copied from 6 to 10, when the first ones have been
        (2, 12.0),  # from 7, the end of call 0
    ],
)
def test_params_pass_the_host_on_their_way_to_a_device(device_bytes, expected):
    loads = Loads([load(0, 2), load(3, 2)], 2, device_bytes)
    assert simulate([1.0] * 4, loads=loads, rates=RATES) == expected


def test_params_and_values_move_at_the_same_time():
    loads = Loads([load(0, 1), load(5, 6)], 2)
    slow = away(0, 2, 4, 5, 5.0, 0.0)
    # Call 2 waits until 7 for the value; what call 5 reads is there then.
    assert simulate([1.0] * 8, [slow], loads=loads, rates=RATES) == 13.0
