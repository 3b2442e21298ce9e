"""The mover over drives in memory: what stays, what is written when, and who waits.

Random programs on it that must end are in `test_deadlock.py`.
"""

import contextlib
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass

import pytest

from jaxinf.errors import StoreClosedError
from jaxinf.transfer import (
    ByteCounts,
    ByteMeters,
    Compute,
    Failure,
    Limits,
    Load,
    Mover,
    Queues,
    Task,
    Write,
)
from jaxinf.transfer.spans import PhaseTotals

PAGE, LONG = 4096, 4 << 20
"""Bytes of a state; a long one is worth a request of its own."""
NUM_STATES = 3
TIMEOUT_S = 60


@dataclass(frozen=True)
class Layout:
    """States of one length, on the only drive."""

    key: int
    state_bytes: int = PAGE
    drive: int = 0

    @property
    def sizes(self):
        return (self.state_bytes,) * NUM_STATES

    @property
    def num_bytes(self):
        return NUM_STATES * self.state_bytes


def task(layout, loads=(0, 1, 2), stores=(0, 1, 2), compute=lambda *_: None):
    return Task(layout, compute, tuple((state, "a") for state in loads), stores)


class Buffer:
    """A part of a rig's memory."""

    def __init__(self, rig, num_bytes):
        self.rig, self.num_bytes = rig, num_bytes
        rig.used_bytes += num_bytes

    def release(self):
        self.rig.used_bytes -= self.num_bytes


class Rig:
    """A mover that counts what it moves, by key and state; a gate holds that back."""

    def __init__(self, limits=(2, 2), memory_bytes=1 << 40):
        self.memory_bytes, self.used_bytes = memory_bytes, 0
        self.loads, self.writes, self.is_verified = Counter(), Counter(), True
        self.gate, self.at_gate = threading.Event(), threading.Event()
        self.gate.set()
        self.failure = Failure()
        queues = Queues([(0, True)], self.acquire, Limits(*limits))
        self.mover = Mover("a test", queues, self.perform, self.failure)

    def acquire(self, wanted):
        num_bytes = wanted.layout.num_bytes
        if self.used_bytes + num_bytes > self.memory_bytes:
            return None
        return Buffer(self, num_bytes)

    def perform(self, unit):
        if isinstance(unit, Compute):
            unit.resident.task.compute(None, unit.resident.buffer, ())
            return ()
        self.at_gate.set()
        assert self.gate.wait(TIMEOUT_S)
        for resident, states in unit.items:
            for state in states:
                number = state[0] if isinstance(unit, Load) else state
                moved = self.loads if isinstance(unit, Load) else self.writes
                moved[resident.task.layout.key, number] += 1
        if isinstance(unit, Write):
            return ()
        return [() if self.is_verified else states for _, states in unit.items]

    def loaded(self, key):
        return [self.loads[key, state] for state in range(NUM_STATES)]

    def step(self, *tasks, given_up=()):
        self.mover.run(tasks)
        self.mover.drain()
        self.mover.drop_prefetched(given_up)

    def prefetched(self, *layouts):
        """Returns when all states of these subgroups are loaded."""
        self.mover.prefetch([task(layout) for layout in layouts])
        until(lambda: all(self.loaded(layout.key) == [1] * 3 for layout in layouts))

    def close(self):
        self.gate.set()
        self.mover.close()
        assert self.used_bytes == 0


def until(is_true):
    until_s = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < until_s
        time.sleep(0.001)


@pytest.fixture
def make():
    """Makes rigs; all memory must come back."""
    rigs = []

    def make_one(*arguments, **options):
        rigs.append(Rig(*arguments, **options))
        return rigs[-1]

    yield make_one
    for rig in rigs:
        rig.close()


# --- what stays, and what is written ------------------------------------------------


@pytest.mark.parametrize(
    ("stores", "gives_up", "stays", "written"),
    [
        ((), False, True, [0, 1, 2]),  # a task that moves nothing
        ((), True, True, [0, 1, 2]),
        ((1,), True, True, [0, 2]),  # what a step that is given up has changed
        ((0,), False, False, [0, 1, 2]),
    ],
)
def test_what_no_commit_has_written_is_written_after_another_task(
    make, stores, gives_up, stays, written
):
    rig, layout = make(), Layout(0)
    rig.mover.cache_only(frozenset([0]))
    rig.mover.defer_writes(True)
    rig.step(task(layout))
    assert not rig.writes
    if not stays:
        rig.mover.cache_only(frozenset())
    rig.step(task(layout, loads=(), stores=stores), given_up=[0] * gives_up)
    assert rig.mover.flush()
    assert rig.writes == Counter((0, state) for state in written)
    assert bool(rig.used_bytes) == stays


def test_what_was_read_ahead_and_not_used_is_read_again(make):
    """A task verifies what it uses; the rest has no known checksum."""
    rig, layout = make(), Layout(0)
    rig.is_verified = False
    rig.mover.cache_only(frozenset([0]))
    rig.prefetched(layout)
    rig.step(task(layout, loads=(2,), stores=(2,)))
    rig.step(task(layout, loads=(0, 2), stores=(2,)))
    assert rig.loaded(0) == [2, 1, 1]


def test_held_prefetches_begin_later_and_submitted_tasks_do_not_wait(make):
    rig = make()
    rig.mover.hold_prefetches(True)
    rig.mover.prefetch([task(Layout(0)), task(Layout(1))])
    rig.mover.run([task(Layout(1))])
    assert (rig.loaded(0), rig.loaded(1)) == ([0] * 3, [1] * 3)
    rig.mover.hold_prefetches(False)
    until(lambda: rig.loaded(0) == [1] * 3)


def test_a_prefetch_gets_no_memory_that_a_submitted_task_waits_for(make):
    rig = make(memory_bytes=2 * Layout(0, LONG).num_bytes - 1)
    rig.gate.clear()
    runs = in_thread(lambda: rig.mover.run([task(Layout(n, LONG)) for n in (0, 1)]))
    assert rig.at_gate.wait(TIMEOUT_S)
    rig.mover.prefetch([task(Layout(2))])
    time.sleep(0.05)
    assert rig.used_bytes == Layout(0, LONG).num_bytes
    rig.gate.set()
    assert runs() is None


# --- who waits ------------------------------------------------------------------------


def in_thread(action):
    """Runs an action in a thread; a call returns its result, or the error it raised."""
    box = []

    def run():
        try:
            box.append(action())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
        return box[0]

    return result


def wait_until_closing(mover):
    with contextlib.suppress(StoreClosedError):
        while True:
            mover.run([])


class Slow:
    """A computation that says when it has begun, and ends when it may."""

    def __init__(self):
        self.inside, self.may_end = threading.Event(), threading.Event()
        self.has_ended = False

    def __call__(self, csd, buffer, tells):
        self.inside.set()
        assert self.may_end.wait(TIMEOUT_S)
        self.has_ended = True


def test_no_compute_runs_after_run_has_raised(make):
    """The tasks' arrays belong to XLA, which frees them."""
    rig, slow, returned = make(), Slow(), threading.Event()

    def failing(csd, buffer, tells):
        assert slow.inside.wait(TIMEOUT_S)
        raise KeyError("failing")

    def run():
        tasks = [task(Layout(0), compute=slow), task(Layout(1), compute=failing)]
        try:
            rig.mover.run(tasks)
        finally:
            assert slow.has_ended
            returned.set()

    runs = in_thread(run)
    until(lambda: rig.failure.error is not None)
    assert not returned.wait(0.05)
    slow.may_end.set()
    assert isinstance(runs(), KeyError)


def test_closing_wakes_who_waits(make):
    rig = make((1, 1))
    rig.gate.clear()
    runs = in_thread(lambda: rig.mover.run([task(Layout(n)) for n in range(10)]))
    assert rig.at_gate.wait(TIMEOUT_S)
    drains, closing = in_thread(rig.mover.drain), in_thread(rig.mover.close)
    wait_until_closing(rig.mover)
    rig.gate.set()
    assert closing() is None
    assert isinstance(runs(), StoreClosedError)
    assert isinstance(drains(), StoreClosedError)
    rig.mover.close()
    with pytest.raises(StoreClosedError, match="the store is closed; open it again"):
        rig.mover.run([task(Layout(0))])


def test_closing_waits_for_the_submitter(make):
    rig, slow = make((3, 3)), Slow()
    rig.prefetched(Layout(0))
    runs = in_thread(lambda: rig.mover.run([task(Layout(0), compute=slow)]))
    assert slow.inside.wait(TIMEOUT_S)
    closing = in_thread(rig.mover.close)
    wait_until_closing(rig.mover)
    time.sleep(0.05)
    assert rig.used_bytes > 0
    slow.may_end.set()
    assert runs() is closing() is None


@pytest.mark.usefixtures("pythons_handler")
@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "computes"])
def test_no_compute_runs_after_an_interrupt(make, ahead):
    """Ctrl-C ends the wait of the main thread, or what it computes."""
    rig, ended, both = make(), threading.Event(), threading.Barrier(2)
    layouts = [Layout(0), Layout(1)] if ahead else [Layout(0)]
    if ahead:
        rig.prefetched(*layouts)

    def compute(csd, buffer, tells):
        if ahead:
            both.wait(TIMEOUT_S)
        if not ahead:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        elif threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.2)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        rig.mover.run([task(layout, compute=compute) for layout in layouts])
    assert ended.is_set()
    assert isinstance(rig.failure.error, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        rig.mover.drain()


def test_a_drive_that_two_threads_use_is_busy_once():
    phase_totals, both, meters = PhaseTotals(), threading.Barrier(2), ByteMeters()
    before = meters.snapshot()

    def read():
        with phase_totals.span("read", drive="/a"):
            both.wait()
            time.sleep(0.05)
        for _ in range(500):
            meters.add(drive_read_bytes=1)

    began_s = time.perf_counter()
    threads = [threading.Thread(target=read) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    wall_s = time.perf_counter() - began_s
    busy = phase_totals.take_busy()
    assert 0.05 <= busy.drives["/a"] <= wall_s
    assert 0.05 <= busy.phases["read"] <= wall_s
    assert phase_totals.take_busy().drives == {}
    assert meters.snapshot() - before == ByteCounts(drive_read_bytes=1000)
