"""The virtual clock: queues in order, and a time that does not go back."""

from jaxinf.schedule.clock import Clock


def test_a_server_takes_one_task_after_another():
    clock: Clock[str] = Clock()
    begun_s = [clock.start("drive", s, name) for name, s in (("a", 2.0), ("b", 1.0))]
    begun_s.append(clock.start("cpu", 4.0, "c"))
    assert begun_s == [0.0, 2.0, 0.0]
    ended = [(clock.end(), clock.now_s) for _ in range(3)]
    assert ended == [("a", 2.0), ("b", 3.0), ("c", 4.0)]
    assert clock.busy_s == {"drive": 3.0, "cpu": 4.0}


def test_a_clock_does_not_go_back():
    clock: Clock[str] = Clock()
    clock.start("x", 1.0, "first")
    clock.now_s = 4.0
    assert clock.is_due(4.0)
    assert (clock.end(), clock.now_s) == ("first", 4.0)
    assert clock.start("x", 1.0, "second", ready_s=6.0) == 6.0
    assert not clock.is_due(6.5)
