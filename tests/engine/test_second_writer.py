"""A second writer beside a first: only one commits, whichever file was removed."""

import pytest

from jaxinf.errors import StoreLockedError


@pytest.mark.parametrize("durability", ["step", 2])
def test_a_run_whose_lock_was_removed_commits_nothing_more(
    drive, monkeypatch, durability
):
    """The second writer goes on, and its commits stay."""
    first = drive(durability=durability).init().steps(2)
    first.store.wait()
    (first.store.path / "lock").unlink()
    # As in another process, which knows nothing of the stores that are open here.
    monkeypatch.setattr("jaxinf.engine.open_stores._open", {})
    second = drive(first.store.path).init().steps(1)
    second.check(3)
    with pytest.raises(StoreLockedError, match="found it removed or replaced"):
        first.steps(4).store.wait()
    first.store.close()  # the failure is known
    second.check(3)
    second.steps(2).check(5)


def test_a_run_whose_lock_was_removed_stops_alone_too(drive):
    driver = drive().init().steps(1)
    driver.store.wait()
    (driver.store.path / "lock").unlink()
    with pytest.raises(StoreLockedError, match="nothing needs that file removed"):
        driver.steps(2).store.wait()
    driver.store.close()
    drive(driver.store.path).init().steps(1).check(2)
