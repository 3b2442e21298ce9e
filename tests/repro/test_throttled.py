"""A throttled CSD, with a clock that advances only in a sleep."""

from pathlib import Path

import numpy as np
import optax
import pytest
from throttled import CsdRates, Server, ThrottledCsd, ThrottledFleet, throttled

from jaxinf.compress import SparseGradient
from jaxinf.csd import Extent, Rounding, ScalarInputs, Transfer, Update, open_csds
from jaxinf.program import trace_update
from jaxinf.transfer import ByteMeters

pytestmark = [pytest.mark.long, pytest.mark.optimized]

NUM_BYTES = 4000
EXTENT = Extent(np.dtype(np.float32), NUM_BYTES // 4, 0, 0)


class Clock:
    """Replaces the module `time`."""

    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("throttled.time", clock)
    return clock


class Inner:
    """A CSD that records its calls and takes no time."""

    def __init__(self, is_host):
        self.is_host = is_host
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments, **named):
            self.calls.append((name, arguments, named))
            return f"{name}'s"

        return call


def slowed(clock, *, is_host, **rates):
    inner = Inner(is_host)
    csd = ThrottledCsd(inner, CsdRates(**rates), Server(), 1)

    def seconds(action):
        began_s = clock.now_s
        action()
        return clock.now_s - began_s

    return csd, inner, seconds


def transfers(count):
    return [Transfer(None, EXTENT, Path("file"))] * count  # type: ignore[arg-type]


def update(csd, gradient=None):
    kernel = trace_update(optax.sgd(0.5), np.zeros(8, np.float32)).leaves[0].kernel
    array = np.zeros(NUM_BYTES // 4, np.float32)
    given = array if gradient is None else gradient
    rest = (given, ScalarInputs(), array, Rounding(0, 0))
    return csd.update(None, Update([EXTENT], kernel, *rest))


def test_a_server_takes_one_request_after_another(clock):
    server = Server()
    assert server.reserve(500, 1000.0) == clock.now_s + 0.5
    assert server.reserve(1500, 500.0) == clock.now_s + 3.5
    assert server.reserve(1 << 60, None) == clock.now_s
    clock.sleep(10)
    assert server.reserve(1000, 1000.0) == clock.now_s + 1


@pytest.mark.parametrize("is_host", [True, False])
def test_a_drive_is_one_server(clock, is_host):
    csd, inner, seconds = slowed(
        clock, is_host=is_host, drive_read=4000.0, drive_write=1000.0
    )
    assert seconds(lambda: csd.read(transfers(2))) == 2
    assert seconds(lambda: csd.write(transfers(1))) == 4
    assert [name for name, _, _ in inner.calls] == ["read", "write"]
    # A request of another thread comes first, in either direction.
    csd._drive.reserve(NUM_BYTES, 1000.0)
    assert seconds(lambda: csd.read(transfers(1))) == 5


def test_state_crosses_the_link_of_the_host_alone(clock):
    rates = {"link": 1000.0, "internal": 2000.0}
    csd, _, seconds = slowed(clock, is_host=True, **rates)
    assert seconds(lambda: csd.read(transfers(1))) == 4
    assert seconds(lambda: update(csd)) == 0
    csd, _, seconds = slowed(clock, is_host=False, **rates)
    assert seconds(lambda: csd.read(transfers(1))) == 2
    assert seconds(lambda: update(csd)) == 4 + 4  # the gradient, and the result


def test_a_cards_kernel_takes_in_state_and_gradient(clock):
    csd, inner, seconds = slowed(clock, is_host=False, kernel=1000.0)
    assert seconds(lambda: update(csd)) == 4 + 4
    assert update(csd) == "update's"
    assert [name for name, _, _ in inner.calls] == ["update"] * 2
    csd, _, seconds = slowed(clock, is_host=True, kernel=1000.0)
    assert seconds(lambda: update(csd)) == 0


def test_a_compressed_gradient_is_expanded_on_the_card(clock):
    indices = np.arange(25, dtype=np.int32)
    sparse = SparseGradient(indices, np.ones(25, np.float32), NUM_BYTES // 4)
    csd, _, seconds = slowed(clock, is_host=False, decompress=500.0, link=100.0)
    assert seconds(lambda: update(csd, sparse)) == 2 + 8 + 40
    csd, _, seconds = slowed(clock, is_host=False, kernel=1000.0)
    assert seconds(lambda: update(csd, sparse)) == 4 + 4


def test_csds_share_the_link_alone(clock, tmp_path):
    roots = [tmp_path / "one", tmp_path / "two"]
    for root in roots:
        root.mkdir()
    each = [CsdRates(1000, 1000, link=2000), CsdRates(500, 500, link=2000)]
    fleet = open_csds(
        throttled("host", each), roots, memory_bytes=1 << 20, meters=ByteMeters()
    )
    assert isinstance(fleet, ThrottledFleet)
    one, two = fleet.attach(roots, 1 << 16, 1 << 14)
    assert one.memory is two.memory  # the wrapped CSDs'
    assert one._link is two._link
    assert one._drive is not two._drive
    assert (one._rates, two._rates) == (each[0], each[1])
    fleet.close()
