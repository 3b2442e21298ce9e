"""Several CSDs: a failing or hanging one is named, and ends only the step."""

import threading
import time

import pytest

import jaxinf.csd.cards.card as card
from jaxinf.errors import CsdError, StoreIOError
from jaxinf.transfer import mover

LEAVES = {"w": ((9, 4096), "float32"), "v": ((3, 4096), "float32")}


@pytest.fixture
def driver(drive):
    """Three emulated cards, with a step committed."""
    return (
        drive(num_csds=3, csd="emulated", leaves=LEAVES, chunk_elements=4096)
        .init()
        .steps(1)
    )


def unit_of(driver, csd):
    """Returns the executor of a card's kernels."""
    return driver.opened.csds[csd]._card._device.unit


def check_ended(driver, drive, error, csd):
    """Checks that only the step is lost, and that the store opens at the one before."""
    root = driver.opened.directory.manifest.csds[csd]
    assert f"CSD {root}/jaxinf-" in str(error.value)
    with pytest.raises(CsdError) as again:
        driver.store.check()
    assert again.value is error.value
    with pytest.raises(CsdError):
        driver.finish()
    driver.close()
    assert all(csd.memory.used_bytes == 0 for csd in driver.opened.csds)
    reopened = drive(csd="emulated", leaves=LEAVES).init()
    assert reopened.at == 1
    reopened.steps(2).check(3)


@pytest.mark.parametrize("csd", [0, 2])
def test_a_card_that_fails(driver, drive, csd):
    driver.store.wait()
    for found in driver.opened.csds[csd]._found.values():
        kernel = found.kernel._kernel
        vars(kernel)["function"] = None  # a bus error, on a card
    with pytest.raises(
        CsdError, match=f"card {csd}: kernel .* ended as error"
    ) as error:
        driver.step()
    check_ended(driver, drive, error, csd)


def test_a_card_that_hangs(driver, drive, monkeypatch):
    driver.store.wait()
    monkeypatch.setattr(card, "RUN_TIMEOUT_S", 0.2)
    gate = threading.Event()
    blocked = unit_of(driver, 1).submit(gate.wait)
    with pytest.raises(CsdError, match=r"card 1: .* has not ended after") as error:
        driver.step()
    assert "xbutil reset --device 1" in str(error.value)
    gate.set()
    blocked.result()
    check_ended(driver, drive, error, 1)


def test_a_drive_that_fails(driver, drive):
    """Its files are gone: the message has their place."""
    driver.store.wait()
    root = driver.opened.directory.csd_directory(1)
    driver.opened.mover.end_step()
    hidden = root.with_name("hidden")
    root.rename(hidden)
    with pytest.raises(StoreIOError, match=r"csd1/jaxinf-") as error:
        driver.step()
    assert str(root) in str(error.value)
    with pytest.raises(StoreIOError):
        driver.close()
    hidden.rename(root)
    drive(csd="emulated", leaves=LEAVES).init().steps(1).check(2)


def test_a_request_that_does_not_come_back_is_named(driver, caplog, monkeypatch):
    monkeypatch.setattr(mover, "OVERDUE_S", 0.1)
    driver.store.wait()
    gate = threading.Event()
    blocked = unit_of(driver, 2).submit(gate.wait)
    step = threading.Thread(target=driver.step)
    step.start()
    while "has not come back" not in caplog.text:
        assert step.is_alive()
        time.sleep(0.01)
    gate.set()
    blocked.result()
    step.join()
    driver.check(2)
    root = driver.opened.directory.manifest.csds[2]
    assert f"CSD root {root}: an update has not come back for 0 s" in caplog.text
