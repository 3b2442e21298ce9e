"""The time of a step with its updates, worked out by hand."""

import dataclasses

import pytest

from jaxinf.schedule.placement import Eviction
from jaxinf.schedule.simulator import Trip, Trips
from jaxinf.schedule.steps import HOST, PROCESSOR, StepWork, Update

# Read in a second, computed in a half, written in two.
UPDATE = Update(2, 0.5, 10, 20, 30)
WORK = StepWork(
    call_s=[1.0, 1.0],
    updates=[UPDATE],
    rates=[10.0, 10.0],
    memory_bytes=100,
    commit_s=0.25,
    joins=True,
)


def step_s(**changes):
    return dataclasses.replace(WORK, **changes).simulated().step_s


def test_calls_alone_run_in_turn():
    found = StepWork(call_s=[1.0, 2.0], num_parts=2).simulated()
    assert found.step_s == pytest.approx(6.0)
    assert found.busy_s == pytest.approx({PROCESSOR: 6.0})


def test_a_step_that_reads_what_was_written_waits_for_the_commit():
    found = WORK.simulated()
    # State is there when the calls have ended, at 2; then 0.5, 2 and the commit.
    assert found.step_s == pytest.approx(4.75)
    assert found.busy_s == pytest.approx({PROCESSOR: 2.5, "drives": 3.0})


@pytest.mark.parametrize(
    ("call_s", "expected"),
    [
        (1.0, 3.75),  # of the drive: written, committed, and read for the next update
        (5.0, 10.5),  # of the calls and the update, beside which the drive is ready
    ],
)
def test_others_run_beside_it(call_s, expected):
    assert step_s(call_s=[call_s] * 2, joins=False) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        # It waits for the processor, where call 1 is next, and ends at 2.5.
        (PROCESSOR, 4.75),
        # Beside call 1, from 1 to 1.5; written at 3.5.
        (HOST, 3.75),
    ],
)
def test_an_update_begins_with_its_gradient(kernels, expected):
    updates = [UPDATE._replace(made=0)]
    assert step_s(updates=updates, kernels=kernels) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("memory_bytes", "expected"),
    [
        (60, 6.75),  # both are read during the calls, and written from 2.5 to 6.5
        # The second is read from 4.5 to 5.5, when the first is written.
        (30, 8.25),
        (10, 8.25),  # one has room in any case
    ],
)
def test_state_is_read_ahead_as_there_is_memory(memory_bytes, expected):
    found = step_s(updates=[UPDATE, UPDATE], memory_bytes=memory_bytes)
    assert found == pytest.approx(expected)


def test_drives_work_at_the_same_time():
    updates = [UPDATE, UPDATE._replace(drive=1)]
    # Written from 2.5 to 4.5, and from 3 to 5.
    assert step_s(updates=updates) == pytest.approx(5.25)


def test_params_and_state_share_the_drives():
    loads = Trips(
        [Trip(0, 0, 40, 40, 1)], {"read": 10.0}, read_bytes=1, drives=["drives"]
    )
    # Call 0 waits until 4, and the update until 14: state comes after the params.
    updates = [UPDATE._replace(read_bytes=100)]
    assert step_s(moved=[loads], updates=updates) == pytest.approx(14 + 0.5 + 2.25)
    apart = loads._replace(drives=["files"])
    assert step_s(moved=[apart], updates=updates) == pytest.approx(10 + 0.5 + 2.25)
    # State is on one of two drives, and params on both.
    both = loads._replace(drives=["drives", "drives 1"])
    found = dataclasses.replace(WORK, moved=[both], updates=updates).simulated()
    assert found.step_s == pytest.approx(14 + 0.5 + 2.25)
    assert found.busy_s["drives 1"] == pytest.approx(4)


def test_what_waits_for_the_last_gradient_moves_in_the_last_part():
    last = Trips(
        [Trip(2, 2, 0, 30, eviction=Eviction(0, 2, 2, 2))],
        {"write": 10.0, "read": 10.0},
        drives=["files"],
    )
    # Written from 3, when call 0 of the second part has ended, to 6; read until 9.
    found = step_s(last=[last], num_parts=2)
    assert found == pytest.approx(9 + 0.5 + 2 + 0.25)


def test_nothing_to_update_is_no_commit():
    assert step_s(updates=[]) == pytest.approx(2.0)


@pytest.mark.parametrize(("in_turn", "expected"), [((), 3.0), (("read",), 5.0)])
def test_drives_have_other_parts_of_each_tensor(in_turn, expected):
    # All of the first is on one drive, and of the second most on the other.
    trips = [
        Trip(0, 0, 20, 20, 1, drive_bytes=[20, 0]),
        Trip(1, 1, 40, 40, 1, drive_bytes=[10, 30]),
    ]
    loads = Trips(
        trips, {"read": 20.0}, read_bytes=2, drives=["a", "b"], in_turn=in_turn
    )
    found = StepWork(call_s=[0.0, 0.0], moved=[loads]).simulated()
    assert found.step_s == pytest.approx(expected)
    assert found.busy_s == pytest.approx({"a": 3.0, "b": 3.0, PROCESSOR: 0.0})
