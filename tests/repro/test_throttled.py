"""A throttled CSD, with a clock that advances only in a sleep."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optax
import pytest
from throttled import CsdRates, Server, ThrottledCsd

from jaxinf.compress import SparseGradient
from jaxinf.csd import Extent, Rounding, ScalarInputs, Transfer, Update
from jaxinf.program import trace_update

pytestmark = [pytest.mark.long, pytest.mark.optimized]

NUM_BYTES = 4000
EXTENT = Extent(np.dtype(np.float32), NUM_BYTES // 4, 0, 0)
ONE = Transfer(None, EXTENT, Path("file"))  # type: ignore[arg-type]
SPARSE = SparseGradient(
    np.arange(25, dtype=np.int32), np.ones(25, np.float32), NUM_BYTES // 4
)


@pytest.fixture
def clock(monkeypatch):
    """Replaces the module `time`."""

    def sleep(seconds):
        clock.now_s += seconds

    clock = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s, sleep=sleep)
    monkeypatch.setattr("throttled.time", clock)
    return clock


def update(csd, gradient=None):
    kernel = trace_update(optax.sgd(0.5), np.zeros(8, np.float32)).leaves[0].kernel
    array = np.zeros(NUM_BYTES // 4, np.float32)
    given = array if gradient is None else gradient
    rest = (given, ScalarInputs(), array, Rounding(0, 0))
    return csd.update(None, Update([EXTENT], kernel, *rest))


def read(csd):
    csd.read([ONE])


def send(csd):
    update(csd, SPARSE)


@pytest.mark.parametrize(
    ("is_host", "rates", "action", "expected_s"),
    [
        (True, {"drive_read": 4000.0, "drive_write": 1000.0}, read, 1),
        (False, {"drive_write": 1000.0}, lambda csd: csd.write([ONE]), 4),
        # State crosses the link of the host alone; a card's, its gradient and result.
        (True, {"link": 1000.0, "internal": 2000.0}, read, 4),
        (True, {"link": 1000.0, "internal": 2000.0}, update, 0),
        (False, {"link": 1000.0, "internal": 2000.0}, read, 2),
        (False, {"link": 1000.0, "internal": 2000.0}, update, 4 + 4),
        # A card's kernel takes in state and gradient; it expands what was compressed.
        (False, {"kernel": 1000.0}, update, 4 + 4),
        (False, {"kernel": 1000.0}, send, 4 + 4),
        (True, {"kernel": 1000.0}, update, 0),
        (False, {"decompress": 500.0, "link": 100.0}, send, 2 + 8 + 40),
    ],
)
def test_what_takes_time(clock, is_host, rates, action, expected_s):
    calls = []
    moved = {name: lambda *_: calls.append(1) for name in ("read", "write", "update")}
    inner = SimpleNamespace(is_host=is_host, **moved)
    csd = ThrottledCsd(inner, CsdRates(**rates), Server(), 1)
    began_s = clock.now_s
    action(csd)
    assert clock.now_s - began_s == expected_s
    assert calls == [1]


def test_a_server_takes_one_request_after_another(clock):
    server = Server()
    assert server.reserve(500, 1000.0) == clock.now_s + 0.5
    assert server.reserve(1500, 500.0) == clock.now_s + 3.5
    assert server.reserve(1 << 60, None) == clock.now_s
    clock.sleep(10)
    assert server.reserve(1000, 1000.0) == clock.now_s + 1
