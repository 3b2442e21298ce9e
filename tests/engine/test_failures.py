"""Failures of drives and callers: reported once and unchanged; nothing is committed."""

import threading

import pytest
from families import family
from inject import at_call, raising
from raw_stores import chunk_file

from jaxinf.csd.cards import card
from jaxinf.engine import bind_optimizer
from jaxinf.errors import CsdError, StaleStateError, StoreIOError


def cut_chunk(driver, slot, leaf=1, state="params"):
    """Makes a chunk file shorter than it should be."""
    file = chunk_file(driver.files.directory, slot, leaf, state)
    with open(file, "r+b") as stream:
        stream.truncate(100)


def test_each_method_raises_the_failure_which_close_does_not(drive):
    drive(num_csds=2).init().steps(2).close()
    driver = drive().init()
    cut_chunk(driver, "a")
    with pytest.raises(StoreIOError, match=r"params\.embed/c/0/0") as first:
        driver.update()
    store = driver.store
    for method in (
        lambda: store.step,
        lambda: store.payload,
        lambda: store.params(driver.initial),
        lambda: store.read("params", "bias"),
        lambda: store.snapshot().__enter__(),
        lambda: store.annotate(99, None),
        store.check,
        store.wait,
        driver.finish,
    ):
        with pytest.raises(StoreIOError) as caught:
            method()
        assert caught.value is first.value
    driver.close()
    assert driver.files.commit.step == 2
    assert (driver.store.path / "current").resolve().name == "a"


def test_a_failure_in_the_background_is_raised_by_close(drive):
    """The commit fails after its step has returned."""
    driver = drive().init().steps(1)
    driver.store.wait()
    lock = driver.files.directory.flip_lock
    lock.unlink()
    lock.mkdir()
    driver.step()
    with pytest.raises(StoreIOError, match=r"publish.lock: .*: Is a directory"):
        driver.close()
    driver.close()  # it is known by now
    with pytest.raises(StoreIOError, match="expected a regular file"):
        drive()
    lock.rmdir()
    assert drive().store.step == 1


def test_what_arrives_late_of_a_step_that_failed(drive):
    """A late callback comes after the failure, or when the store is open again."""
    drive().init().steps(3).close()
    driver = drive().init()
    driver.update([0])
    late = driver.part(1)
    cut_chunk(driver, "b", leaf=3)
    with pytest.raises(StoreIOError, match=r"params\.half/c/0/0") as caught:
        driver.update([3])
    with pytest.raises(StoreIOError) as again:
        driver.engine.steps.update(3, late)
    assert again.value is caught.value
    driver.close()
    for action in (lambda: driver.engine.steps.update(3, late), driver.finish):
        with pytest.raises(StoreIOError) as again:
            action()
        assert again.value is caught.value
    reopened = drive(driver.store.path)
    assert reopened.store.step == 3
    reopened.at = 3
    bind_optimizer(reopened.engine, reopened.description)
    with pytest.raises(StaleStateError, match="of step 2, the store is at step 3"):
        reopened.engine.steps.update(2, late)
    assert reopened.engine.steps._step is None


WIDE = {"w": ((9, 4096), "float32"), "v": ((3, 4096), "float32")}


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_card_that_fails_or_hangs(drive, monkeypatch, how):
    options = {"csd": "emulated", "leaves": WIDE, "chunk_elements": 4096}
    driver = drive(num_csds=3, **options).init().steps(1)
    driver.store.wait()
    gate = threading.Event()
    if how == "fails":
        message = "card 1: kernel .* ended as error"
        for kernel in driver.files.csds[1]._card._kernels.values():
            vars(kernel)["function"] = None  # a bus error, on a card
    else:
        message = r"card 1: .* has not ended after(.|\n)*xbutil reset --device 1"
        monkeypatch.setattr(card, "RUN_TIMEOUT_S", 0.2)
        blocked = driver.files.csds[1]._card._device.unit.submit(gate.wait)
    with pytest.raises(CsdError, match=message) as error:
        driver.step()
    gate.set()
    if how == "hangs":
        blocked.result()
    root = driver.files.directory.manifest.csds[1]
    assert f"CSD {root}/jaxinf-" in str(error.value)
    for call in (driver.store.check, driver.finish):
        with pytest.raises(CsdError) as again:
            call()
        assert again.value is error.value
    driver.close()
    assert all(csd.memory.used_bytes == 0 for csd in driver.files.csds)
    reopened = drive(csd="emulated", leaves=WIDE).init()
    assert reopened.at == 1
    reopened.steps(2).check(3)


LEAVES = {"w": ((24, 4096), "float32"), "b": ((129,), "float32")}
TIMEOUT_S = 60


class Injected(Exception):
    """The failure of one unit of work."""


UNITS = ["read", "update", "write", "sync", "write_record", "flip"]


@pytest.mark.parametrize("number", family([1, 3], short=[1]))
@pytest.mark.parametrize("unit", UNITS)
def test_an_error_of_a_unit(drive, unit, number, monkeypatch):
    options = {"leaves": LEAVES, "chunk_elements": 4096, "num_workers": 4}
    before = set(threading.enumerate())
    driver = drive(memory_bytes=1 << 19, **options).init().steps(2)
    driver.store.wait()
    driver.files.cache_only(frozenset())  # so that the next steps read
    driver.files.mover.drop_prefetched()
    is_of_csds = unit in ("read", "update", "write")
    with monkeypatch.context() as patch:
        for owner in driver.files.csds if is_of_csds else [driver.files.directory]:
            at_call(owner, unit, number, raising(Injected()), patch=patch)
        with pytest.raises(Injected) as caught:
            driver.steps(number).durable_step()
        with pytest.raises(Injected) as again:
            driver.step()
    assert again.value is caught.value is driver.engine.health.error
    with pytest.raises(Injected):
        driver.store.params(driver.initial)
    driver.close()
    for thread in set(threading.enumerate()) - before:
        is_card = thread.name.startswith("card-")  # an emulated one stays
        thread.join(0 if is_card else TIMEOUT_S)
        assert is_card or not thread.is_alive()
    assert all(csd.memory.used_bytes == 0 for csd in driver.files.csds)
    reopened = drive(leaves=LEAVES).init()
    # The first commit of several may have succeeded; no later one has.
    assert 2 <= reopened.at < 2 + number
    reopened.check(reopened.at)
    reopened.steps(2).check(reopened.at)
