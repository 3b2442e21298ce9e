"""Several CSDs: a failing or hanging one is named, and ends only the step."""

import threading

import pytest

import jaxinf.csd.cards.card as card
from jaxinf.errors import CsdError

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


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_card_that_fails_or_hangs(driver, drive, monkeypatch, how):
    driver.store.wait()
    gate = threading.Event()
    if how == "fails":
        message = "card 1: kernel .* ended as error"
        for found in driver.opened.csds[1]._found.values():
            vars(found.kernel._kernel)["function"] = None  # a bus error, on a card
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
    reopened = drive(csd="emulated", leaves=LEAVES).init()
    assert reopened.at == 1
    reopened.steps(2).check(3)
