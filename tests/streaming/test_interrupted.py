"""Steps that end early: Ctrl-C, SIGKILL, drives that fail, for each durability."""

import functools
import os
import signal
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
import small_stores
import streamed_run
from inject import at_call, at_each_call, interrupt
from raw_stores import memory_directory
from streamed_run import CHUNKS, NUM_STEPS, TX, finished, open_step, train
from streaming_cases import assert_same_states, states, until_it_waits
from zoo import ZOO

import jaxinf
from jaxinf.engine import StateReader
from jaxinf.engine.step_runner import StepRunner
from jaxinf.errors import StoreCorruptError
from jaxinf.processes import run_uninterrupted
from jaxinf.streaming.update.apply_gradients import StoreSink

NAMES = ("tied_and_unused", "l2_penalty", "scan_twice_cast")
DURABILITIES = ("step", 3, "checkpoint")


@functools.cache
def zoo(name):
    return ZOO[name]()


@functools.cache
def uninterrupted(name):
    """Losses, and the states after each step, of a run of a program."""
    losses, found, program = [], {}, zoo(name)
    with (
        memory_directory() as path,
        small_stores.open_store(path / "s", **CHUNKS) as store,
    ):
        step = open_step(lambda *_, **options: store, "s", program, TX)
        for number in range(NUM_STEPS + 1):
            if number:
                losses += train(step, program, number)
            found[number] = states(store)
        step.close()
    return losses, found


@pytest.fixture
def opened(open_store):
    def make(name="tied_and_unused", durability="step", **options):
        options["durability"] = durability
        return open_step(open_store, "store", zoo(name), TX, **options)

    return make


def train_on(step, name="tied_and_unused"):
    """Trains to the end, which must be that of a whole run; returns the losses."""
    losses = train(step, zoo(name))
    step.store.wait()
    assert step.store.step == NUM_STEPS
    _, expected = uninterrupted(name)
    assert_same_states(states(step.store), expected[NUM_STEPS])
    return losses


@pytest.mark.parametrize("nonfinite", ["error", "skip"])
def test_no_uncommitted_step_is_overwritten_for_gradients_that_are_not_finite(
    nonfinite, opened
):
    name = "l2_penalty"
    step = opened(name, "checkpoint", nonfinite=nonfinite)
    found = train(step, zoo(name), 2)
    bad = jax.tree.map(lambda x: x * np.float32(np.nan), zoo(name).batch)
    if nonfinite == "error":
        with pytest.raises(jaxinf.NonFiniteGradientError, match="step 3: NaN or Inf"):
            step(bad)
    else:
        step(bad)
    assert found + train_on(step, name) == uninterrupted(name)[0]
    assert step.skipped_steps == step.store.skipped_steps == (nonfinite == "skip")


# --- Ctrl-C ----------------------------------------------------------------------


@pytest.mark.usefixtures("pythons_handler")
@pytest.mark.parametrize(
    ("owner", "method", "count"),
    [(StateReader, "read", 1), (StoreSink, "put", 2), (StepRunner, "update", 1)],
)
def test_ctrl_c_ends_a_step_and_training_goes_on(
    owner, method, count, opened, monkeypatch
):
    program = zoo("tied_and_unused")
    step = opened(durability="checkpoint")
    found = train(step, program, 2)
    with monkeypatch.context() as patch:
        at_call(owner, method, count, interrupt, patch=patch)
        with pytest.raises(KeyboardInterrupt) as caught:
            train(step, program, 3)
    assert "step 0 is committed" in caught.value.__notes__[0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # A second pass over a step that is not committed is never left half-way.
    is_ended = finished(step) == 3
    assert is_ended or owner != StepRunner
    found += train_on(step)
    losses, _ = uninterrupted("tied_and_unused")
    assert found == [x for i, x in enumerate(losses) if i != 2 or not is_ended]


@pytest.mark.usefixtures("pythons_handler")
def test_a_second_ctrl_c_is_raised_at_once(opened, monkeypatch):
    """The step that it gives up waits for a drive; it ends before the next one."""
    program, step = zoo("tied_and_unused"), opened()
    found = train(step, program, 1)
    main, read = threading.main_thread(), StateReader.read
    handled, answers, is_late = threading.Semaphore(0), threading.Event(), []

    def handle(*_):
        handled.release()
        raise KeyboardInterrupt

    def unanswered(self, *args):
        for _ in range(2):
            until_it_waits(main)
            signal.pthread_kill(main.ident, signal.SIGINT)
            handled.acquire(timeout=60)
        is_late.append(not answers.wait(60))
        monkeypatch.setattr(StateReader, "read", read)
        return read(self, *args)

    monkeypatch.setattr(StateReader, "read", unanswered)
    signal.signal(signal.SIGINT, handle)
    with pytest.raises(KeyboardInterrupt):
        train(step, program, 2)
    run_uninterrupted(list)  # callbacks do not wait for it
    answers.set()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    step.compile(program.batch)  # the step that was given up ends
    assert is_late == [False]
    assert finished(step) == 1
    assert found + train_on(step) == uninterrupted("tied_and_unused")[0]


@pytest.mark.usefixtures("pythons_handler")
def test_handlers_of_the_programs_own_are_called_at_once(opened, monkeypatch):
    seen, handled, step = [], threading.Event(), opened()
    train(step, zoo("tied_and_unused"), 1)

    def interrupted(*_):
        interrupt()
        handled.wait(60)
        seen.append("finish")

    at_each_call(monkeypatch, StoreSink, "finish", interrupted)
    signal.signal(signal.SIGINT, lambda *_: (seen.append("handler"), handled.set()))
    train(step, zoo("tied_and_unused"), 2)
    assert seen == ["handler", "finish"]
    assert step.store.step == 2


# All lines take hours: JAXINF_INTERRUPTS=1 pytest -m long -k any_line …
EVERY = int(os.environ.get("JAXINF_INTERRUPTS", "100"))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("policy", "parts"), [("recompute", 4), ("keep", 1), ("offload", 1)]
)
def test_after_ctrl_c_at_any_line_the_next_step_runs(policy, parts, place, run_python):
    program = Path(__file__).parents[1] / "programs" / "interrupting.py"
    run_python(program, place, policy, parts, EVERY)


# --- SIGKILL, failures ---------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "durability"), [*zip(NAMES, DURABILITIES, strict=True)]
)
def test_killed_between_hand_outs_the_committed_step_is_whole(
    name, durability, opened, run_python, place
):
    """Steps since the commit are lost and nothing else; what follows has the bits."""
    committed = {"step": NUM_STEPS - 1, 3: 3, "checkpoint": 0}[durability]
    words = [place / "store", name, durability]
    killed = run_python(Path(streamed_run.__file__), *words, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with jaxinf.open_store(place / "store") as store:
        assert store.step == committed
        assert_same_states(states(store), uninterrupted(name)[1][committed])
    train_on(opened(name, durability), name)


@pytest.mark.long
def test_damaged_params_are_named_and_not_trained_on(opened):
    step = opened()
    train(step, zoo("tied_and_unused"), 1)
    step.close()
    (chunk, *_) = sorted((step.store.path / "current").glob("params.table/c/*/*"))
    with open(chunk, "r+b") as file:
        file.seek(40)
        file.write(b"\x7f\x7f")
    again = opened()
    with pytest.raises(StoreCorruptError, match="table"):
        train(again, zoo("tied_and_unused"), 2)
    with pytest.raises(StoreCorruptError, match="table"):
        again.store.check()
