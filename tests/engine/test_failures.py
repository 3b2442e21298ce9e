"""Failures of drives and callers: reported once and unchanged; nothing is committed."""

import threading

import pytest
from raw_stores import chunk_file

from jaxinf.csd.cards import card
from jaxinf.errors import (
    CsdError,
    StaleStateError,
    StoreIOError,
)


def cut_chunk(driver, slot, leaf=1, state="params"):
    """Makes a chunk file shorter than it should be."""
    file = chunk_file(driver.opened.directory, slot, leaf, state)
    with open(file, "r+b") as stream:
        stream.truncate(100)


def methods(driver):
    """Returns all methods of a store that must raise its failure."""
    store = driver.store
    return [
        lambda: store.step,
        lambda: store.skipped_steps,
        lambda: store.payload,
        lambda: driver.engine.directory,
        lambda: store.params(driver.initial),
        lambda: store.read("params", "bias"),
        lambda: store.snapshot().__enter__(),
        lambda: store.annotate(99, None),
        store.check,
        store.wait,
        lambda: driver.engine.opened.update(driver.at, driver.part(0)),
        lambda: driver.engine.opened.finish(driver.at, [], 0),
    ]


def check_all_raise(driver):
    """Each method raises the store's failure, which is known afterwards."""
    error = driver.engine.health.error
    for method in methods(driver):
        with pytest.raises(type(error)) as caught:
            method()
        assert caught.value is error
    driver.close()


def test_a_damaged_chunk_that_is_read(drive):
    drive(num_csds=2).init().steps(2).close()
    driver = drive().init()
    cut_chunk(driver, "a")
    with pytest.raises(StoreIOError, match=r"params\.embed/c/0/0"):
        driver.update()
    check_all_raise(driver)
    driver.close()
    assert driver.opened.commit.step == 2
    assert (driver.store.path / "current").resolve().name == "a"


def fail_in_the_background(driver):
    """Makes the commit fail after its step has returned."""
    lock = driver.opened.directory.publish_lock
    lock.unlink()
    lock.mkdir()
    driver.step()


def test_a_failure_in_the_background_is_raised_by_close(drive):
    driver = drive().init().steps(1)
    driver.store.wait()
    fail_in_the_background(driver)
    with pytest.raises(StoreIOError, match=r"publish.lock: .*: Is a directory"):
        driver.close()
    driver.close()  # it is known by now
    with pytest.raises(StoreIOError, match="expected a regular file"):
        drive()
    driver.opened.directory.publish_lock.rmdir()
    assert drive().store.step == 1


def use_and_fail(driver):
    with driver.store:
        driver.engine.health.fail(StoreIOError("the drive's"))
        raise KeyError("mine")


def test_an_error_of_the_body_is_not_hidden_by_close(drive):
    driver = drive().init().steps(2)
    with pytest.raises(KeyError, match="mine"):
        use_and_fail(driver)
    assert driver.engine.health.is_closed


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
        driver.engine.opened.update(3, late)
    assert again.value is caught.value
    driver.close()
    for action in (lambda: driver.engine.opened.update(3, late), driver.finish):
        with pytest.raises(StoreIOError) as again:
            action()
        assert again.value is caught.value
    reopened = drive(driver.store.path)
    assert reopened.store.step == 3
    reopened.at = 3
    reopened.engine.bind(reopened.description)
    with pytest.raises(StaleStateError, match="of step 2, the store is at step 3"):
        reopened.engine.opened.update(2, late)
    assert reopened.engine.opened._step is None


# --- cards ----------------------------------------------------------------------------

WIDE = {"w": ((9, 4096), "float32"), "v": ((3, 4096), "float32")}


@pytest.fixture
def cards(drive):
    """Three emulated cards, with a step committed."""
    return (
        drive(num_csds=3, csd="emulated", leaves=WIDE, chunk_elements=4096)
        .init()
        .steps(1)
    )


def unit_of(driver, csd):
    """Returns the executor of a card's kernels."""
    return driver.opened.csds[csd]._card._device.unit


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_card_that_fails_or_hangs(cards, drive, monkeypatch, how):
    driver = cards
    driver.store.wait()
    gate = threading.Event()
    if how == "fails":
        message = "card 1: kernel .* ended as error"
        for _, kernel in driver.opened.csds[1]._found.values():
            vars(kernel._kernel)["function"] = None  # a bus error, on a card
    else:
        message = r"card 1: .* has not ended after(.|\n)*xbutil reset --device 1"
        monkeypatch.setattr(card, "RUN_TIMEOUT_S", 0.2)
        blocked = unit_of(driver, 1).submit(gate.wait)
    with pytest.raises(CsdError, match=message) as error:
        driver.step()
    gate.set()
    if how == "hangs":
        blocked.result()
    root = driver.opened.directory.manifest.csds[1]
    assert f"CSD {root}/jaxinf-" in str(error.value)
    for call in (driver.store.check, driver.finish):
        with pytest.raises(CsdError) as again:
            call()
        assert again.value is error.value
    driver.close()
    assert all(csd.memory.used_bytes == 0 for csd in driver.opened.csds)
    reopened = drive(csd="emulated", leaves=WIDE).init()
    assert reopened.at == 1
    reopened.steps(2).check(3)
