"""The monitor finds the CSD that the others wait for."""

import threading

import pytest

from jaxinf.transfer import drive_monitor, spans


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (drive_monitor, spans):
        monkeypatch.setattr(module, "time", clock)
    return clock


def rounds(clock, num_rounds, requests):
    """Makes each of the requests (CSD, bytes, seconds) in every round."""
    own = drive_monitor.DriveMonitor(["/a", "/b", "/c"])
    for _ in range(num_rounds):
        for csd, num_bytes, seconds in requests:
            with own.request(csd, "read", [num_bytes]):
                clock.now_s += seconds
        own.end_round()


SAME = [(0, 8 << 20, 0.1), (1, 8 << 20, 0.1)]


@pytest.mark.parametrize(
    ("third", "is_named"),
    [
        ((2, 8 << 20, 0.2), False),
        ((2, 8 << 20, 0.4), True),
        ((2, 4096, 0.012), False),  # the usual time of a request
        ((2, 4096, 0.09), False),  # too short for a judgement
        ((2, 4096, 0.5), True),
        ((2, 64 << 20, 0.8), False),
    ],
)
def test_a_slow_drive_is_named(clock, caplog, third, is_named):
    rounds(clock, 3, [*SAME, third])
    assert ("CSD root /c: in each of the last 3 steps" in caplog.text) == is_named
    assert "CSD root /a" not in caplog.text


def test_a_slow_drive_that_has_less_is_not_named(clock, caplog):
    rounds(clock, 4, [(0, 32 << 20, 0.4), (1, 32 << 20, 0.4), (2, 8 << 20, 0.4)])
    assert caplog.text == ""


def at_once(own, clock, csd, num_requests, seconds):
    """Makes requests that are under way together."""
    inside, leave = threading.Barrier(num_requests + 1), threading.Event()

    def request():
        with own.request(csd, "read", [2 << 20]):
            inside.wait()
            leave.wait()

    threads = [threading.Thread(target=request) for _ in range(num_requests)]
    for thread in threads:
        thread.start()
    inside.wait()
    clock.now_s += seconds / 2
    own.end_round()  # counts a drive that is busy
    clock.now_s += seconds / 2
    leave.set()
    for thread in threads:
        thread.join()


def test_requests_at_once_take_one_time(clock, caplog):
    own = drive_monitor.DriveMonitor(["/a", "/b"])
    for _ in range(5):
        at_once(own, clock, 0, 1, 0.2)
        clock.now_s += 5.0  # idle
        at_once(own, clock, 1, 4, 0.8)  # as fast for a byte
        own.end_round()
    assert caplog.text == ""


def test_two_slow_steps_say_nothing(clock, caplog):
    rounds(clock, 2, [*SAME, (2, 8 << 20, 0.5)])
    assert caplog.text == ""


def test_one_csd_has_nothing_to_be_compared_with(clock, caplog):
    rounds(clock, 5, [(0, 8 << 20, 5.0)])
    assert caplog.text == ""
