"""The monitor finds the CSD that the others wait for."""

import pytest

from jaxinf.engine.pipeline import drive_monitor


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(drive_monitor, "time", clock)
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


def test_two_slow_steps_say_nothing(clock, caplog):
    rounds(clock, 2, [*SAME, (2, 8 << 20, 0.5)])
    assert caplog.text == ""


def test_one_csd_has_nothing_to_be_compared_with(clock, caplog):
    rounds(clock, 5, [(0, 8 << 20, 5.0)])
    assert caplog.text == ""
