"""Fixtures of streaming."""

import pytest
from late_copies import LateCopies
from streaming_cases import CHUNKS, SGD, SMALL

import jaxinf
from jaxinf.streaming.plan import cut_to_fit, memory, offload


@pytest.fixture
def streamed(open_store):
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
def begun(streamed):
    """Opens a step, by default on a new store, with the params of its program."""

    def make(tx=SGD, program=SMALL, **options):
        step = streamed(program, tx, **options)
        step.load(program.params)
        return step

    return make


@pytest.fixture
def own_memory(monkeypatch):
    """Makes the CPU a device with memory of its own."""
    monkeypatch.setattr(memory, "device_is_host", lambda device: False)


@pytest.fixture
def late(own_memory, monkeypatch):
    """Makes it one whose copies end late."""
    del own_memory
    model = LateCopies(monkeypatch)
    yield model
    model.settle()


@pytest.fixture
def small_values_leave(monkeypatch):
    monkeypatch.setattr(offload, "SMALL_BYTES", 1)


@pytest.fixture
def everything_leaves(small_values_leave, monkeypatch):
    """Lets every value leave that can, although the budget has room."""
    del small_values_leave
    evict = offload.evict_values
    monkeypatch.setattr(cut_to_fit, "evict_values", lambda plan, _: evict(plan, 0))
