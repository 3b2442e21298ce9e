"""Steps and arguments that are refused by name, with nothing lost."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Event
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from streaming import (
    CHUNKS,
    assert_same_bits,
    no_room_for_gradients,
    run,
    spill_beyond,
)
from zoo import ZOO

import jaxinf
from jaxinf.engine import ParamsReader
from jaxinf.errors import (
    StoreIOError,
    StoreMismatchError,
    StreamError,
)

CLIP = optax.clip_by_global_norm(0.1)
CLIPPED = optax.chain(CLIP, optax.adamw(1e-3))


def test_a_leaf_too_large_to_be_made_is_named(open_store):
    step = jaxinf.stream(
        lambda p, b: jnp.sum(p["small"]),
        optax.sgd(0.1),
        open_store(**CHUNKS),
        memory_bytes=2 << 20,
    )

    def init(key):
        return {
            "small": jnp.zeros(8),
            "vast": jnp.sort(jax.random.normal(key, (1 << 20,))),
        }

    with pytest.raises(StreamError, match=r"leaf vast takes \d+ bytes .*step\.load"):
        step.init(init, jax.random.key(0))
    assert not step.store.exists


def test_a_gradient_that_is_not_finite_refuses_the_step(streamed):
    program = ZOO["l2_penalty"](depth=3)
    step = streamed(program, optax.sgd(0.1))
    step.load(program.params)
    run(step, program, 1)
    bad = jax.tree.map(
        lambda x: x.at[0].set(jnp.nan), jax.tree.map(jnp.asarray, program.batch)
    )
    before = step.store.params(like=program.params)
    with pytest.raises(jaxinf.NonFiniteGradientError, match=r"step 2: NaN or Inf"):
        step(bad)
    assert_same_bits(step.store.params(like=program.params), before)
    assert step.store.step == 1


def test_params_are_read_as_they_were_given(streamed):
    program = ZOO["l2_penalty"](depth=2)
    step = streamed(program, optax.sgd(0.1))
    for early in (step.params, lambda: step(program.batch)):
        with pytest.raises(StreamError, match=r"call step.init or step.load first"):
            early()
    with pytest.raises(StreamError, match=r"found a list; .*step.load"):
        step.init(program.params)
    step.load(program.params)
    assert_same_bits(step.params(), program.params)
    step(program.batch)
    with pytest.raises(StoreMismatchError):
        step.params(program.params[:1])
    asked = jax.tree.map(lambda x: x.astype("bfloat16"), program.params)
    assert_same_bits(step.params(asked), step.store.params(like=asked))
    step.close()
    with pytest.raises(StoreMismatchError, match="not in the store"):
        streamed(program, optax.sgd(0.1)).load([*program.params, program.params[0]])


def test_a_step_whose_params_cannot_be_read_is_run_again(streamed, monkeypatch):
    program = ZOO["l2_penalty"](depth=3)
    step = streamed(program, optax.sgd(0.1))
    step.load(program.params, batch=program.batch)

    def fail(*args):
        raise OSError("the drive is gone")

    with monkeypatch.context() as patched:
        patched.setattr(ParamsReader, "read", fail)
        with pytest.raises(OSError, match="the drive is gone"):
            step(program.batch)
    run(step, program, 1)
    assert step.store.step == 1


def noisy(params, batch):
    def said(params):
        jax.debug.print("{}", batch)
        return jnp.sum(params["w"])

    return jax.lax.cond(batch[0] > 0, said, said, params)


def looping(params, batch):
    return jnp.sum(
        jax.lax.while_loop(lambda w: jnp.sum(w) < 9, lambda w: 2 * w, params["w"])
    )


VAST = {"w": jax.ShapeDtypeStruct((4 << 20,), jnp.float32)}


@pytest.mark.parametrize(
    ("loss", "params", "error", "message"),
    [
        (lambda p, b: 0.0, {"n": np.arange(3)}, StreamError, "leaf n: .* int64"),
        (lambda p, b: 0.0, {"f": "text"}, StreamError, "leaf f: .*found str"),
        (
            lambda p, b: 0.0,
            {"c": np.ones(2, np.complex64)},
            StreamError,
            "leaf c: expected floating-point .* complex64",
        ),
        (lambda p, b: p["w"], None, StreamError, r"a floating-point scalar, .*\(3,\)"),
        (lambda p, b: jnp.sum(p["w"] > b), None, StreamError, "an array of int32"),
        (lambda p, b: (p["w"][0], b), None, StreamError, "pass has_aux=True"),
        (noisy, None, StreamError, "side effects.*debug_print"),
        (looping, None, ValueError, "Reverse-mode differentiation .*while_loop"),
        (
            lambda p, b: jnp.sum(jnp.sin(p["w"])),
            VAST,
            StreamError,
            r"takes \d+, with w \(16777216 bytes\);.* memory_bytes=\"\d+MiB\" works",
        ),
    ],
)
def test_bad_input_is_refused_before_a_store_is_made(
    loss, params, error, message, open_store
):
    step = jaxinf.stream(
        loss, optax.sgd(0.1), open_store(**CHUNKS), memory_bytes=32 << 20
    )
    given = {"w": np.ones(3, np.float32)} if params is None else params
    with pytest.raises(error, match=message):
        step.load(given, batch=np.ones(3, np.float32))
    assert not step.store.exists
    assert not step.store.path.exists()


def test_a_loss_without_the_aux_that_is_asked_for_is_refused(streamed):
    program = ZOO["l2_penalty"](depth=2)
    step = streamed(replace(program, has_aux=True), optax.sgd(0.1))
    with pytest.raises(StreamError, match=r"a pair \(loss, aux\)"):
        step.load(program.params, batch=program.batch)


def test_a_full_drive_refuses_the_step_while_gradients_are_spilled(
    streamed, monkeypatch
):
    program = ZOO["tied_and_unused"]()
    spill_beyond(monkeypatch, 0)
    step = streamed(program, CLIPPED)
    step.load(program.params)
    run(step, program, 1)

    refused = pytest.raises(jaxinf.StoreSpaceError, match=r"file of gradients.*write")
    with no_room_for_gradients(), refused:
        step(program.batch)
    assert step.store.step == 1
    run(step, program, 1)
    assert step.store.step == 2


# --- where a step is called ---------------------------------------------------------


@pytest.mark.parametrize(
    "traced",
    [
        lambda step, batch: jax.jit(lambda batch: step(batch)[0])(batch),
        lambda step, batch: jax.grad(lambda x: x * step(batch)[0])(1.0),
        lambda step, batch: jax.jit(step.function(lambda p, b: b))(batch),
    ],
)
def test_a_call_inside_a_traced_function_is_refused(traced, streamed):
    program = ZOO["l2_penalty"](depth=2)
    step = streamed(program, CLIP)
    step.load(program.params)
    with pytest.raises(StreamError, match=r"found a call inside .* JAX traces"):
        traced(step, program.batch)
    assert step.store.step == 0


def test_a_step_under_way_in_another_thread_is_not_joined(streamed, monkeypatch):
    program, begun, ends = ZOO["l2_penalty"](depth=2), Event(), Event()
    step = streamed(program, optax.adam(1e-3))
    step.load(program.params)
    read = ParamsReader.read

    def waiting(self, *args):
        begun.set()
        ends.wait(60)
        return read(self, *args)

    monkeypatch.setattr(ParamsReader, "read", waiting)
    with ThreadPoolExecutor(1) as other:
        under_way = other.submit(step, program.batch)
        assert begun.wait(60)
        calls = step, step.function(program.loss), lambda batch: step.compile(batch)
        for call in calls:
            with pytest.raises(StreamError, match="found a step under way in another"):
                call(program.batch)
        ends.set()
        under_way.result()
    step(program.batch)
    step.store.wait()
    assert step.store.step == 2


def test_the_stores_own_budget_is_not_used(streamed, open_store):
    """What is too little for an update beside JAX is enough to be opened with."""
    program = ZOO["l2_penalty"](depth=2)
    for _ in range(2):  # a new store, and one that is there
        store = open_store("small", memory_bytes=1 << 16, state="int8")
        step = streamed(program, optax.adam(1e-3), store=store)
        step.load(program.params)
        step(program.batch)
        step.close()
        store.close()
    store = open_store("small", memory_bytes=1 << 16)
    tx = jaxinf.smart_update(optax.adam(1e-3), store)
    with pytest.raises(ValueError, match="memory_bytes=65536: 4 workers need at least"):
        tx.init(program.params)


def test_a_store_that_is_renamed_while_it_is_open_is_named(streamed):
    program = ZOO["l2_penalty"](depth=2)
    step = streamed(program, CLIPPED)
    step.load(program.params)
    run(step, program, 1)
    step.store.wait()
    path = step.store.path
    path.rename(path.with_name("renamed"))
    with pytest.raises(StoreIOError, match=rf"^{path}/.* or undo a rename"):
        step(program.batch)
    with suppress(StoreIOError):  # one that read data has stopped the store
        step.store.check()


def test_memory_is_half_of_what_is_free(monkeypatch, caplog):
    free = 100 << 20, "the box"
    monkeypatch.setattr("jaxinf.streaming.api.free_memory", lambda: free)
    step = jaxinf.stream_in_memory(lambda params, batch: params.sum(), optax.sgd(0.1))
    assert step._options.memory_bytes == 50 << 20
    assert "50.0 MiB, half of the 100 MiB that the box leaves" in caplog.text


def test_several_processes_are_given_their_memory(monkeypatch, open_store):
    free = 100 << 20, "the box"
    monkeypatch.setattr("jaxinf.streaming.api.free_memory", lambda: free)
    group = SimpleNamespace(count=4)
    monkeypatch.setattr("jaxinf.streaming.api.all_processes", lambda name: group)
    make = partial(jaxinf.stream, jnp.sum, optax.sgd(0.1), open_store(**CHUNKS))
    with pytest.raises(ValueError, match=r'4 processes, .* memory_bytes="12MiB"'):
        make()
    assert make(memory_bytes=2 << 20)._options.memory_bytes == 2 << 20
