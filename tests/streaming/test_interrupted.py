"""Steps that end early: Ctrl-C, SIGKILL, drives that fail, for each durability."""

import errno
import functools
import os
import signal
import threading
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import small_stores
from families import family
from raw_stores import memory_directory
from streamed_run import CHUNKS, NUM_STEPS, TX, finished, open_step, train
from streaming import states, until_it_waits
from zoo import ZOO

import jaxinf
from jaxinf.engine import ParamsReader
from jaxinf.engine.steps import StepEngine
from jaxinf.errors import StoreCorruptError
from jaxinf.streaming.update.store_sink import StoreSink

NAMES = ("tied_and_unused", "l2_penalty", "scan_twice_cast")
DURABILITIES = ("step", 3, "checkpoint")


def assert_same_states(found, expected):
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array, err_msg=str(key))


def train_to_the_end(step, program):
    """Trains until the last step is written."""
    train(step, program)
    assert finished(step) == NUM_STEPS


@functools.cache
def zoo(name, **options):
    """A program of the zoo, the same in all tests."""
    return ZOO[name](**options)


@pytest.fixture(scope="module")
def uninterrupted():
    """Losses, and the states after each step, of a program that runs once."""
    runs = {}

    def train_once(program, tx):
        losses, found = [], {}
        with (
            memory_directory() as path,
            small_stores.open_store(path / "s", **CHUNKS) as store,
        ):
            step = open_step(lambda *_, **options: store, "s", program, tx)
            for number in range(NUM_STEPS + 1):
                if number:
                    losses += train(step, program, number)
                found[number] = states(store)
            step.close()
        return losses, found

    def make(program, tx=TX):
        if (id(program), id(tx)) not in runs:
            runs[id(program), id(tx)] = program, tx, train_once(program, tx)
        return runs[id(program), id(tx)][-1]

    return make


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "durability"), [*zip(NAMES[1:], DURABILITIES[1:], strict=True)]
)
def test_steps_that_overwrite_others_have_the_same_bits(
    name, durability, open_store, uninterrupted
):
    program = zoo(name)
    losses, expected = uninterrupted(program)
    step = open_step(open_store, "store", program, durability=durability)
    assert train(step, program) == losses
    committed = {3: 3, "checkpoint": 0}[durability]
    assert step.store.step == committed
    step.store.wait()
    assert step.store.step == NUM_STEPS
    assert_same_states(states(step.store), expected[NUM_STEPS])


@pytest.mark.long
def test_frozen_leaves_are_read_from_the_committed_slot(open_store, uninterrupted):
    """Their chunks are never written, so they are not in the slot that steps write."""
    program = zoo("tied_and_unused")
    labels = jax.tree.map(lambda _: "train", program.params)
    labels["layers"] = jax.tree.map(lambda _: "frozen", program.params["layers"])
    tx = optax.multi_transform({"train": TX, "frozen": optax.set_to_zero()}, labels)
    losses, expected = uninterrupted(program, tx)
    step = open_step(open_store, "store", program, tx, "checkpoint")
    assert train(step, program) == losses
    step.store.wait()
    assert_same_states(states(step.store), expected[NUM_STEPS])


@pytest.mark.parametrize("nonfinite", ["error", "skip"])
def test_no_uncommitted_step_is_overwritten_for_gradients_that_are_not_finite(
    nonfinite, open_store, uninterrupted
):
    program = zoo("l2_penalty", depth=3)
    losses, expected = uninterrupted(program)
    step = open_step(
        open_store, "store", program, durability="checkpoint", nonfinite=nonfinite
    )
    found = train(step, program, 2)
    bad = jax.tree.map(lambda x: x * np.float32(np.nan), program.batch)
    if nonfinite == "error":
        with pytest.raises(jaxinf.NonFiniteGradientError, match="step 3: NaN or Inf"):
            step(bad)
    else:
        step(bad)
    assert found + train(step, program) == losses
    step.store.wait()
    assert_same_states(states(step.store), expected[NUM_STEPS])


# --- Ctrl-C ----------------------------------------------------------------------


@pytest.fixture(autouse=True)
def pythons_handler():
    """Sets Python's handler of SIGINT, which a process in the background lacks."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_at(monkeypatch, owner, method, count, signals=1):
    """Sends Ctrl-C when a method is called for the count-th time from now on."""
    original, calls = getattr(owner, method), []

    def interrupting(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == count:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGINT)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, interrupting)


@pytest.mark.parametrize(
    "durability", family(["step", "checkpoint"], short=["checkpoint"])
)
@pytest.mark.parametrize(
    ("owner", "method", "count"),
    [(ParamsReader, "read", 1), (StoreSink, "put", 2), (StepEngine, "update", 1)],
)
def test_ctrl_c_ends_a_step_and_training_goes_on(
    owner, method, count, durability, open_store, uninterrupted, monkeypatch
):
    program = zoo("tied_and_unused")
    losses, expected = uninterrupted(program)
    step = open_step(open_store, "store", program, durability=durability)
    found = train(step, program, 2)
    with monkeypatch.context() as patch:
        interrupt_at(patch, owner, method, count)
        with pytest.raises(KeyboardInterrupt):
            train(step, program, 3)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # A second pass over a step that is not committed is never left half-way.
    is_ended = finished(step) == 3
    if owner is StepEngine and durability == "checkpoint":
        assert is_ended
    found += train(step, program)
    assert found == [x for i, x in enumerate(losses) if i != 2 or not is_ended]
    step.store.wait()
    assert_same_states(states(step.store), expected[NUM_STEPS])


def test_a_second_ctrl_c_is_raised_at_once(open_store, uninterrupted, monkeypatch):
    """The step that it gives up waits for a drive; it ends before the next one."""
    program = zoo("tied_and_unused")
    losses, expected = uninterrupted(program)
    step = open_step(open_store, "store", program)
    found = train(step, program, 1)
    main, read = threading.main_thread(), ParamsReader.read
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
        monkeypatch.setattr(ParamsReader, "read", read)
        return read(self, *args)

    monkeypatch.setattr(ParamsReader, "read", unanswered)
    signal.signal(signal.SIGINT, handle)
    with pytest.raises(KeyboardInterrupt):
        train(step, program, 2)
    answers.set()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    step.compile(program.batch)  # the step that was given up ends
    assert is_late == [False]
    assert finished(step) == 1
    assert found + train(step, program) == losses
    step.store.wait()
    assert_same_states(states(step.store), expected[NUM_STEPS])


def test_handlers_of_the_programs_own_are_called_at_once(open_store, monkeypatch):
    program, seen = zoo("l2_penalty", depth=2), []
    handled = threading.Event()
    step = open_step(open_store, "store", program)
    train(step, program, 1)
    monkeypatch.setattr(
        StoreSink,
        "finish",
        lambda self, *args, finish=StoreSink.finish: (
            os.kill(os.getpid(), signal.SIGINT),
            handled.wait(60),
            seen.append("finish"),
            finish(self, *args),
        )[-1],
    )
    before = signal.signal(
        signal.SIGINT, lambda *_: (seen.append("handler"), handled.set())
    )
    try:
        train(step, program, 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["handler", "finish"]
    assert step.store.step == 2


# --- SIGKILL ---------------------------------------------------------------------

PROGRAM = Path(__file__).parents[1] / "programs" / "streamed_run.py"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "durability"), [*zip(NAMES, DURABILITIES, strict=True)]
)
def test_killed_between_hand_outs_the_committed_step_is_whole(
    name, durability, open_store, uninterrupted, run_python, place
):
    """Steps since the commit are lost and nothing else; what follows has the bits."""
    program = zoo(name)
    committed = {"step": NUM_STEPS - 1, 3: 3, "checkpoint": 0}[durability]
    _, expected = uninterrupted(program)
    words = [place / "store", name, durability, "update"]
    killed = run_python(PROGRAM, *words, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with jaxinf.open_store(place / "store") as store:
        assert store.step == committed
        assert_same_states(states(store), expected[committed])
    resumed = open_step(open_store, "store", program, durability=durability)
    train(resumed, program)
    resumed.close()
    with jaxinf.open_store(place / "store") as store:
        assert store.step == NUM_STEPS
        assert_same_states(states(store), expected[NUM_STEPS])


@pytest.mark.long
def test_killed_in_init_it_begins_anew(open_store, uninterrupted, run_python, place):
    program = zoo("tied_and_unused")
    losses, expected = uninterrupted(program)
    words = [place / "store", "tied_and_unused", "step", "init"]
    killed = run_python(PROGRAM, *words, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    step = open_step(open_store, "store", program)
    assert not step.store.step
    assert train(step, program) == losses
    step.store.wait()
    assert_same_states(states(step.store), expected[NUM_STEPS])


# --- drives ----------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("durability", ["step", "checkpoint"])
def test_a_write_that_fails_stops_the_store_at_its_committed_step(
    durability, open_store, uninterrupted, monkeypatch
):
    program = zoo("tied_and_unused")
    _, expected = uninterrupted(program)
    step = open_step(open_store, "store", program, durability=durability)
    train(step, program, 2)
    step.store.wait()
    train(step, program, 3)
    step.store._engine.join()
    committed = step.store._engine.commit.step
    assert committed == {"step": 3, "checkpoint": 2}[durability]

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        for csd in step.store._engine.opened.csds:
            patch.setattr(csd, "write", fail)
        with pytest.raises(OSError, match="Input/output error") as failed:
            train_to_the_end(step, program)
        with pytest.raises(OSError, match="Input/output error"):
            step(program.batch)
    lost = "1 finished steps since the commit of step 2 are lost"
    notes = getattr(failed.value, "__notes__", [])
    assert any(lost in note for note in notes) == (durability == "checkpoint")
    step.close()
    again = open_step(open_store, "store", program, durability=durability)
    assert again.store.step == committed
    if committed == 2:
        assert_same_states(states(again.store), expected[2])
    train(again, program)
    again.store.wait()
    assert_same_states(states(again.store), expected[NUM_STEPS])


@pytest.mark.long
def test_damaged_params_are_named_and_not_trained_on(open_store):
    program = zoo("tied_and_unused")
    step = open_step(open_store, "store", program)
    train(step, program, 1)
    step.close()
    store = open_store("store", **CHUNKS)
    (chunk, *_) = sorted((store.path / "current").glob("params.table/c/*/*"))
    with open(chunk, "r+b") as file:
        file.seek(40)
        file.write(b"\x7f\x7f")
    store.close()
    again = open_step(open_store, "store", program)
    with pytest.raises(StoreCorruptError, match="table"):
        train(again, program, 2)
    with pytest.raises(StoreCorruptError, match="table"):
        again.store.check()


# --- Ctrl-C at each line ---------------------------------------------------------

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


def test_a_step_in_the_last_handler_of_a_process_ends(run_python):
    code = """
import atexit
atexit.register(lambda: print(thread.run(lambda check: 3)))
from jaxinf.streaming.ctrl_c import StepThread
thread = StepThread()
"""
    assert run_python(code).stdout == "3\n"
