"""File systems to mount, and drivers of stores whose state passes through memory."""

from functools import partial

import pytest
from mounts import (
    mount_ext4,  # noqa: F401
    mount_tmpfs,  # noqa: F401
)


@pytest.fixture
def drive(drive):
    return partial(drive, memory_bytes=1 << 20)
