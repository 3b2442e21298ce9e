"""Fixtures of streaming."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from late_copies import LateCopies
from streaming import CHUNKS

import jaxinf
from jaxinf.streaming.plan import cut_to_fit, leaving, memory


@pytest.fixture
def streamed(open_store: Callable[..., jaxinf.Store]) -> Callable[..., Any]:
    """Opens streamed steps on stores of small chunks."""

    def make(program, tx, name="store", store=None, memory_bytes=256 << 20, **options):
        return jaxinf.stream(
            program.loss,
            tx,
            store or open_store(name, **CHUNKS),
            memory_bytes=memory_bytes,
            has_aux=program.has_aux,
            **options,
        )

    return make


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CPU a device with memory of its own."""
    monkeypatch.setattr(memory, "device_is_host", lambda device: False)


@pytest.fixture
def late(own_memory: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateCopies]:
    """Makes it one whose copies end late."""
    del own_memory
    model = LateCopies(monkeypatch)
    yield model
    model.settle()


@pytest.fixture
def small_values_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "SMALL_BYTES", 1)


@pytest.fixture
def everything_leaves(
    small_values_leave: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lets every value leave that can, although the budget has room."""
    del small_values_leave
    evicted = leaving.evicted
    monkeypatch.setattr(cut_to_fit, "evicted", lambda plan, _: evicted(plan, 0))
