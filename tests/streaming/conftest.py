"""Fixtures of streaming."""

import pytest

from jaxinf.streaming.plan import memory


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CPU a device with memory of its own."""
    monkeypatch.setattr(memory, "device_is_host", lambda device: False)
