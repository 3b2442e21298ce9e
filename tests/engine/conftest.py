"""Stores in memory, and drivers of them that are closed at the end of a test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_driver import Driver


@pytest.fixture
def drive(place: Path) -> Iterator[Callable[..., Driver]]:
    """Makes drivers of stores; see `Driver`."""
    drivers: list[Driver] = []

    def make(name: str | Path = "store", num_csds: int = 0, **options) -> Driver:
        roots = [place / f"csd{i}" for i in range(num_csds)]
        for root in roots:
            root.mkdir(exist_ok=True)
        if roots:
            options["csds"] = roots
        drivers.append(Driver(place / name, **options))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.engine.close()
