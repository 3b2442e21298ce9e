"""Places for stores, in memory if there is such a file system, and their drivers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mounts import (
    can_mount_ext4,  # noqa: F401
    can_mount_tmpfs,  # noqa: F401
    mount_ext4,  # noqa: F401
    mount_tmpfs,  # noqa: F401
)
from store_driver import Driver


@pytest.fixture
def drive() -> Iterator[Callable[..., Driver]]:
    """Makes drivers of stores at a path, as `Driver`; closes them at the end."""
    drivers: list[Driver] = []

    def make(path: Path, **options) -> Driver:
        drivers.append(Driver(path, **{"memory_bytes": 1 << 20, **options}))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.engine.close()
