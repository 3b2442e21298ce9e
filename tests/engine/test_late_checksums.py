"""CSDs that tell what they have read only when they have updated it."""

import numpy as np
import pytest
from test_integrity import LEAVES, flip

from jaxinf.csd import CsdSpec, HostCsd, UpdateOutcome
from jaxinf.csd.host import HostFleet
from jaxinf.engine.tasks import Task
from jaxinf.errors import StoreCorruptError
from jaxinf.io import crc32c


class LateCsd:
    """A host CSD whose checksums of what was read come with the update."""

    def __init__(self, host):
        self._host = host
        self._read = {}
        self.num_told = 0

    def __getattr__(self, name):
        return getattr(self._host, name)

    def read(self, buffer, extent, file):
        self._host.read(buffer, extent, file)
        self._read[id(buffer), extent] = True

    def checksum(self, buffer, extent):
        if self._read.get((id(buffer), extent)):
            return None
        return self._host.checksum(buffer, extent)

    def update(self, buffer, extents, *arguments, **options):
        told = {
            number: crc32c(self._host.view(buffer, extent))
            for number, extent in enumerate(extents)
        }
        for extent in extents:
            self._read.pop((id(buffer), extent), None)
        self.num_told += 1
        outcome = self._host.update(buffer, extents, *arguments, **options)
        return UpdateOutcome(outcome.is_finite, told)


@pytest.fixture
def drive_late(drive, monkeypatch):
    """Makes drivers on such CSDs, which take no params of the caller's."""

    def attach(self, directories, buffer_bytes):
        hosts = [HostCsd(d, self._pool, self._meters) for d in directories]
        return [LateCsd(host) for host in hosts]

    monkeypatch.setattr(HostFleet, "attach", attach)
    monkeypatch.setattr(CsdSpec, "takes_params", False)
    return drive


@pytest.mark.parametrize("num_csds", [0, 2])
@pytest.mark.parametrize("memory_bytes", [1 << 18, 1 << 24])
def test_steps_are_the_same(drive_late, num_csds, memory_bytes):
    driver = drive_late(num_csds=num_csds, memory_bytes=memory_bytes).init()
    driver.steps(3).check(3)
    assert sum(csd.num_told for csd in driver.session.csds)
    driver.close()
    drive_late().init().steps(2).check(5)


@pytest.mark.parametrize("state", ["params", "trace"])
@pytest.mark.parametrize("memory_bytes", [1 << 18, 1 << 24])
@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
def test_a_flipped_bit_is_found_by_the_update(drive_late, state, memory_bytes, ahead):
    options = {"leaves": LEAVES, "memory_bytes": memory_bytes, "num_workers": 2}
    driver = drive_late(**options).init().steps(2)
    driver.close()
    file = flip(driver, "w", state, byte=700_001)
    again = drive_late(driver.store.path, **options)
    again.session.bind(again.description)
    again.at = 2
    number = list(again.leaves).index("w")
    if ahead:
        again.store.steps.update(2, again.part(list(again.leaves).index("s")))
        handler, chunks = again.session.handler, again.session.chunks
        shape = again.part(number).gradient.shape
        layouts = again.session.layouts(number, (0, 0), shape)
        handler.prefetch(
            [
                Task(
                    layout,
                    lambda csd, buffer: None,
                    loads=tuple((n, chunks.source(layout, n)) for n in (0, 1)),
                )
                for layout in layouts
            ]
        )
    with pytest.raises(StoreCorruptError, match=f"leaf w, {state}, chunk 0") as error:
        again.update([number])
    assert str(file.resolve()) in str(error.value)
    with pytest.raises(StoreCorruptError):
        again.close()
    assert drive_late(driver.store.path, **options).store.step == 2


def test_what_the_host_reads_is_checked_by_the_host(drive_late):
    driver = drive_late(leaves=LEAVES).init().steps(2)
    params = {name: np.zeros(a.shape, a.dtype) for name, a in driver.initial.items()}
    driver.store.wait()
    held = driver.store.params(like=params)  # of what was read ahead for the next step
    wanted = driver.expected(2)["w"][0]
    np.testing.assert_array_equal(held["w"], wanted)
    driver.close()
    flip(driver, "w", "params", byte=12345)
    again = drive_late(driver.store.path, leaves=LEAVES)
    with pytest.raises(StoreCorruptError):
        again.init()
    with pytest.raises(StoreCorruptError):
        again.close()
