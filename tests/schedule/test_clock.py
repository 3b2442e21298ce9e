"""The virtual clock: queues in order, dependencies, and brute force on random tasks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinf.schedule.clock import Clock, Span, Task, run


def test_a_server_takes_one_task_after_another():
    tasks = [Task("a", "drive", 2.0), Task("b", "drive", 1.0), Task("c", "cpu", 4.0)]
    assert run(tasks) == [Span(0.0, 2.0), Span(2.0, 3.0), Span(0.0, 4.0)]


def test_a_task_waits_for_all_before_it():
    tasks = [
        Task("a", "drive", 2.0),
        Task("b", "cpu", 3.0),
        Task("c", "drive", 1.0, (0, 1)),
        Task("d", "cpu", 1.0, (0,)),
    ]
    assert [span.begin_s for span in run(tasks)] == [0.0, 0.0, 3.0, 3.0]


def test_who_is_ready_first_is_served_first():
    """The third task stands before the fourth, but has to wait for longer."""
    tasks = [
        Task("a", "x", 5.0),
        Task("b", "y", 1.0),
        Task("c", "z", 1.0, (0,)),
        Task("d", "z", 9.0, (1,)),
    ]
    assert run(tasks)[2:] == [Span(10.0, 11.0), Span(1.0, 10.0)]


@pytest.mark.parametrize(
    "task",
    [Task("b", "x", -1.0), Task("b", "x", float("nan")), Task("b", "x", 1.0, (1,))],
)
def test_impossible_tasks_are_refused(task):
    with pytest.raises(
        ValueError, match=r"task 1 \(b\): expected a time of at least 0"
    ):
        run([Task("a", "x", 1.0), task])


def test_a_clock_does_not_go_back():
    clock: Clock[str] = Clock()
    clock.start("x", 1.0, "first")
    clock.now_s = 4.0
    assert clock.is_due(4.0)
    assert (clock.end(), clock.now_s) == ("first", 4.0)
    assert clock.start("x", 1.0, "second", ready_s=6.0) == 6.0
    assert not clock.is_due(6.5)


@st.composite
def workloads(draw):
    """Tasks of whole seconds, none of them 0, on three servers."""
    count = draw(st.integers(1, 8))
    tasks = []
    for number in range(count):
        after = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else ()
        server = draw(st.sampled_from("xyz"))
        tasks.append(Task(str(number), server, draw(st.integers(1, 5)), tuple(after)))
    return tasks


@given(workloads())
def test_servers_take_who_is_ready_and_never_idle(tasks):
    """These rules leave open only the order of those ready at the same time."""
    spans = run(tasks)
    ready_s = [max([spans[n].end_s for n in task.after], default=0.0) for task in tasks]
    for server in "xyz":
        own = [n for n, task in enumerate(tasks) if task.server == server]
        own.sort(key=lambda n: spans[n].begin_s)
        free_s = 0.0
        for number in own:
            assert spans[number].begin_s == max(ready_s[number], free_s)
            free_s = spans[number].end_s
            assert free_s == spans[number].begin_s + tasks[number].seconds
        assert [ready_s[n] for n in own] == sorted(ready_s[n] for n in own)
