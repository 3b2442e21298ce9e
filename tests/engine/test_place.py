"""Making a store checks the free space once, in every way."""

import pytest
from copies import copied

from jaxinf.errors import StaleStateError
from jaxinf.store import StoreDirectory, check_free_space, save_checkpoint


@pytest.fixture
def asked(monkeypatch):
    """Counts the checks of free space."""
    calls = []

    def counted(needs, *texts, original=check_free_space):
        calls.append(needs)
        original(needs, *texts)

    for module in ("creation", "copying"):
        monkeypatch.setattr(f"jaxinf.store.{module}.check_free_space", counted)
    return calls


def test_room_is_asked_for_once(drive, place, asked):
    drive().init().steps(1).close()
    assert len(asked) == 1
    copied(place / "store", place / "converted", state="bf16")
    assert len(asked) == 2
    held = StoreDirectory.open(place / "store")
    save_checkpoint(held, "kept")
    copied(place / "store/checkpoints/kept", place / "imported")
    assert len(asked) == 3


def test_the_unfinished_store_cannot_be_updated(drive):
    driver = drive()
    assert driver.engine.bind(driver.description, may_create=True)
    with pytest.raises(StaleStateError, match=r"call tx\.init\(params\) on it first"):
        driver.engine.bind(driver.description)
    assert driver.engine.commit is None
    assert driver.engine.has_files
