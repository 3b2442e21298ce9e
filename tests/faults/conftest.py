"""File systems to mount, and drivers of stores whose state passes through memory."""

from collections.abc import Callable
from functools import partial

import pytest
from mounts import (
    mount_ext4,  # noqa: F401
    mount_tmpfs,  # noqa: F401
)
from store_driver import Driver


@pytest.fixture
def drive(drive: Callable[..., Driver]) -> Callable[..., Driver]:
    return partial(drive, memory_bytes=1 << 20)
