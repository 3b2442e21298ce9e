"""An error at each unit of a step: the first stops all, and all memory comes back."""

import threading

import pytest
from families import family
from inject import at_call, raising

LEAVES = {"w": ((24, 4096), "float32"), "b": ((129,), "float32")}
TIMEOUT_S = 60


class Injected(Exception):
    """The failure of one unit of work."""


def break_unit(driver, unit, number, patch):
    is_of_csds = unit in ("read", "update", "write")
    for owner in driver.opened.csds if is_of_csds else [driver.opened.directory]:
        at_call(owner, unit, number, raising(Injected()), patch=patch)


UNITS = ["read", "update", "write", "sync", "write_record", "flip"]


@pytest.mark.parametrize("number", family([1, 3], short=[1]))
@pytest.mark.parametrize("unit", UNITS)
def test_an_error_of_a_unit(drive, unit, number, monkeypatch):
    options = {"leaves": LEAVES, "chunk_elements": 4096, "num_workers": 4}
    before = set(threading.enumerate())
    driver = drive(memory_bytes=1 << 19, **options).init().steps(2)
    driver.store.wait()
    driver.opened._keep(frozenset())  # so that the next steps read
    driver.opened.mover.end_step()
    with monkeypatch.context() as context:
        break_unit(driver, unit, number, context)
        with pytest.raises(Injected) as caught:
            driver.steps(number).durable_step()
        with pytest.raises(Injected) as again:
            driver.step()
    assert again.value is caught.value is driver.engine.health.error
    with pytest.raises(Injected):
        driver.store.params(driver.initial)
    driver.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert all(csd.memory.used_bytes == 0 for csd in driver.opened.csds)
    reopened = drive(leaves=LEAVES).init()
    # The first commit of several may have succeeded; no later one has.
    assert 2 <= reopened.at < 2 + number
    reopened.check(reopened.at)
    reopened.steps(2).check(reopened.at)
