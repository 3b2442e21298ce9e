"""Steps and arguments that are refused by name, with nothing lost."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from inject import at_each_call, raising
from streaming_cases import (
    CHUNKS,
    SGD,
    SMALL,
    assert_same_bits,
    no_room_for_gradients,
    run,
    spill_beyond,
)

import jaxinf
from jaxinf.engine import StateReader
from jaxinf.errors import ProcessError, StoreMismatchError, StreamError
from jaxinf.processes import Group
from jaxinf.streaming import compiled_step

CLIP = optax.clip_by_global_norm(0.1)
CLIPPED = optax.chain(CLIP, optax.adamw(1e-3))


def noisy(params, batch):
    def said(params):
        jax.debug.print("{}", batch)
        return jnp.sum(params["w"])

    return jax.lax.cond(batch[0] > 0, said, said, params)


def looping(params, batch):
    double = (lambda w: jnp.sum(w) < 9), (lambda w: 2 * w)
    return jnp.sum(jax.lax.while_loop(*double, params["w"]))


def vast_init(key):
    return {"small": jnp.zeros(8), "vast": jnp.sort(jax.random.normal(key, (1 << 23,)))}


def nothing(params, batch):
    return 0.0


ONES = {"w": np.ones(3, np.float32)}
VAST = {"w": jax.ShapeDtypeStruct((4 << 20,), jnp.float32)}
WORKS = r"takes at least .*iB, with w \(16.0 MiB\);.* memory_bytes=\"\d+MiB\" works"


def load(loss, params=ONES, **options):
    return lambda step: step(loss, **options).load(params, batch=ONES["w"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (load(nothing, {"n": np.arange(3)}), "leaf n: .* int64"),
        (load(nothing, {"f": "text"}), "leaf f: .*found str"),
        (load(nothing, {"c": np.ones(2, np.complex64)}), "leaf c: .*floating.*complex"),
        (load(lambda p, b: p["w"]), r"a floating-point sca.*\(3,\)"),
        (load(lambda p, b: jnp.sum(p["w"] > b)), "an array of int32"),
        (load(lambda p, b: (p["w"][0], b)), "pass has_aux=True"),
        (load(nothing, has_aux=True), r"a pair \(loss, aux\)"),
        (load(noisy), "side effects.*debug_print"),
        (load(looping), "Reverse-mode differentiation .*while_loop"),
        (load(lambda p, b: jnp.sum(jnp.sin(p["w"])), VAST), WORKS),
        (load(nothing, device_memory_bytes=0), "device_memory_bytes=0: .* at least 1"),
        (
            lambda s: s(nothing).init(vast_init, jax.random.key(0)),
            r"leaf vast takes .*iB to make.*step\.load",
        ),
        (lambda s: s(nothing).init(ONES), r"found a dict; .*load"),
        (lambda s: s(nothing).dry_run(1.0), "init or"),
        (lambda s: s(nothing).params(), "call step.init or step.lo"),
        (lambda s: s(nothing)(1.0), "call step.init or step.load"),
    ],
)
def test_bad_input_is_refused_before_a_store_is_made(call, message, open_store):
    store = open_store(**CHUNKS)

    def step(loss, **options):
        return jaxinf.stream(loss, SGD, store, memory_bytes=32 << 20, **options)

    with pytest.raises((StreamError, ValueError), match=message):
        call(step)
    assert not store.path.exists()


# --- steps that end early -------------------------------------------------------------


def test_params_are_read_as_they_were_given(begun):
    step = begun()
    assert_same_bits(step.params(), SMALL.params)
    step(SMALL.batch)
    with pytest.raises(StoreMismatchError):
        step.params(SMALL.params[:1])
    asked = jax.tree.map(lambda x: x.astype("bfloat16"), SMALL.params)
    assert_same_bits(step.params(asked), step.store.params(like=asked))
    step.close()
    more = replace(SMALL, params=[*SMALL.params, SMALL.params[0]])
    with pytest.raises(StoreMismatchError, match="none in the store"):
        begun(program=more)


def test_a_step_whose_params_cannot_be_read_is_run_again(begun, monkeypatch):
    step = begun()
    with monkeypatch.context() as patched:
        patched.setattr(StateReader, "read", raising(OSError("the drive is gone")))
        with pytest.raises(OSError, match="the drive is gone"):
            step(SMALL.batch)
    run(step, SMALL, 1)
    assert step.store.step == 1


def test_a_full_drive_refuses_the_step_while_gradients_are_spilled(begun, monkeypatch):
    spill_beyond(monkeypatch, 0)
    step = begun(CLIPPED)
    run(step, SMALL, 1)
    refused = pytest.raises(jaxinf.StoreSpaceError, match=r"file of gradients.*write")
    with no_room_for_gradients(), refused:
        step(SMALL.batch)
    assert step.store.step == 1
    run(step, SMALL, 1)


# --- where other processes have a say ------------------------------------------------


def test_room_is_given_back_if_another_process_has_none(begun, monkeypatch):
    spill_beyond(monkeypatch, 0)
    step = begun(CLIPPED)

    def num_files():
        paths = [one.resolve() for one in Path("/proc/self/fd").iterdir()]
        return sum(path.name.endswith(" (deleted)") for path in paths)

    before = num_files()

    def refuse(group, what, action):
        if what == "the room for a step":
            raise ProcessError("process 1 has none")

    with monkeypatch.context() as patched:
        at_each_call(patched, Group, "in_all", refuse, after=True)
        with pytest.raises(ProcessError, match="process 1 has none"):
            step(SMALL.batch)
    assert num_files() == before
    run(step, SMALL, 1)
    assert num_files() > before


def test_an_interrupt_while_updates_run_gives_the_step_up():
    errors, finished = [], SimpleNamespace(step=3)
    group = SimpleNamespace(is_alone=False, gather=lambda what, value: [value()])
    engine = SimpleNamespace(group=group, files=SimpleNamespace(finished=finished))

    def interrupted():
        with compiled_step.keeping_errors(group, errors):
            raise KeyboardInterrupt
        return []

    with pytest.raises(KeyboardInterrupt):
        compiled_step.agree(engine, errors, interrupted)


# --- where a step is called ---------------------------------------------------------


@pytest.mark.parametrize(
    "traced",
    [
        lambda step, batch: jax.jit(lambda batch: step(batch)[0])(batch),
        lambda step, batch: jax.grad(lambda x: x * step(batch)[0])(1.0),
    ],
)
def test_a_call_inside_a_traced_function_is_refused(traced, begun):
    step = begun(CLIP)
    with pytest.raises(StreamError, match=r"found a call inside .* JAX traces"):
        traced(step, SMALL.batch)
    assert step.store.step == 0


def test_a_step_under_way_in_another_thread_is_not_joined(begun, monkeypatch):
    begun_reading, ends, step = Event(), Event(), begun(optax.adam(1e-3))

    def wait(*_):
        begun_reading.set()
        ends.wait(60)

    at_each_call(monkeypatch, StateReader, "read", wait)
    with ThreadPoolExecutor(1) as other:
        under_way = other.submit(step, SMALL.batch)
        assert begun_reading.wait(60)
        for call in (step, step.compile):
            with pytest.raises(StreamError, match="found a step under way in another"):
                call(SMALL.batch)
        ends.set()
        under_way.result()
    step(SMALL.batch)
    step.store.wait()
    assert step.store.step == 2


# --- memory and places ----------------------------------------------------------------


def test_the_stores_own_budget_is_not_used(begun, open_store):
    """What is too little for an update beside JAX is enough to be opened with."""
    for _ in range(2):  # a new store, and one that is there
        store = open_store("small", memory_bytes=1 << 16, state="int8")
        step = begun(optax.adam(1e-3), store=store)
        step(SMALL.batch)
        step.close()
        store.close()
    store = open_store("small", memory_bytes=1 << 16)
    tx = jaxinf.smart_update(optax.adam(1e-3), store)
    with pytest.raises(ValueError, match="memory_bytes=65536: 4 workers need at least"):
        tx.init(SMALL.params)


def test_memory_is_half_of_what_is_free(monkeypatch, caplog, open_store):
    free = 100 << 20, "the box"
    monkeypatch.setattr("jaxinf.streaming.api.free_memory", lambda: free)
    step = jaxinf.stream_in_memory(lambda params, batch: params.sum(), SGD)
    assert step._options.memory_bytes == 50 << 20
    assert "50.0 MiB, half of the 100 MiB that the box leaves" in caplog.text
    # Several processes on one machine are told theirs.
    group = SimpleNamespace(count=4)
    monkeypatch.setattr("jaxinf.streaming.api.all_processes", lambda name: group)
    make = partial(jaxinf.stream, jnp.sum, SGD, open_store(**CHUNKS))
    with pytest.raises(ValueError, match=r'4 processes, .* memory_bytes="12MiB"'):
        make()
    assert make(memory_bytes=2 << 20)._options.memory_bytes == 2 << 20
