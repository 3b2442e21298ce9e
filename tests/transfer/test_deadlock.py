"""Random programs of tasks on the mover and the pool, in memory for the largest task.

Every program ends, with all its tasks done or with the first error, no thread is left,
all memory comes back, and no more units are under way than the limits allow. The
threads are the mover's own and several submitters; the drives pause for random times.
"""

import contextlib
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxinf.transfer import (
    BufferPool,
    Compute,
    Failure,
    Limits,
    Load,
    Mover,
    Queues,
    Task,
    Write,
)

PAGE = 4096
TIMEOUT_S = 60
NUM_DRIVES = 2


class Injected(Exception):
    """The failure of a unit of work."""


@dataclass(frozen=True)
class Layout:
    """A subgroup with some states, each of whole pages."""

    key: int
    drive: int
    sizes: tuple[int, ...]

    @property
    def num_bytes(self):
        return sum(self.sizes)


@dataclass(frozen=True)
class Step:
    """Tasks of several submitters at once: subgroups, and the states that change."""

    calls: tuple[tuple[tuple[int, int], ...], ...]
    prefetches: tuple[int, ...]
    staying: frozenset[int]
    defers_writes: bool
    flushes: bool


@dataclass(frozen=True)
class Program:
    layouts: tuple[Layout, ...]
    steps: tuple[Step, ...]
    limits: tuple[int, int, int]  # moving, computing, remote
    spare_pages: int
    fails_at: int | None  # of the units
    seed: int


@st.composite
def programs(draw):
    sizes = st.lists(st.sampled_from([1, 1, 2, 7, 300]), min_size=1, max_size=3)
    lengths = draw(st.lists(sizes, min_size=1, max_size=7))
    layouts = tuple(
        Layout(n, draw(st.integers(0, NUM_DRIVES - 1)), tuple(PAGE * k for k in own))
        for n, own in enumerate(lengths)
    )
    numbers = st.integers(0, len(layouts) - 1)

    @st.composite
    def step(draw):
        order = draw(st.permutations(range(len(layouts))))
        used = order[: draw(st.integers(0, len(order)))]
        stores = [draw(st.integers(0, len(layouts[n].sizes))) for n in used]
        tasks, num_calls = list(zip(used, stores, strict=True)), draw(st.integers(1, 3))
        return Step(
            tuple(tuple(tasks[n::num_calls]) for n in range(num_calls)),
            tuple(draw(st.lists(numbers, unique=True, max_size=len(layouts)))),
            draw(st.frozensets(numbers, max_size=2)),
            draw(st.booleans()),
            draw(st.booleans()),
        )

    return Program(
        layouts,
        tuple(draw(st.lists(step(), min_size=1, max_size=3))),
        draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2))),
        draw(st.sampled_from([0, 0, 1, 400])),
        draw(st.none() | st.integers(0, 30)),
        draw(st.integers(0, 1 << 16)),
    )


class Drives:
    """Contents by key and state; moves them by units, with pauses and a failure."""

    def __init__(self, program):
        staying = {n for step in program.steps for n in step.staying}
        pages = sum(program.layouts[n].num_bytes for n in staying) // PAGE
        largest = max(layout.num_bytes for layout in program.layouts)
        self.pool = BufferPool(largest + (pages + program.spare_pages) * PAGE)
        self.content = {(p.key, n): 0 for p in program.layouts for n in range(9)}
        self.error = Injected()
        self._num_left = program.fails_at
        self._under_way, self._limits = Counter(), program.limits
        self._random, self._guard = random.Random(program.seed), threading.Lock()

    def acquire(self, task):
        return self.pool.try_acquire(task.layout.num_bytes)

    @contextlib.contextmanager
    def counted(self, unit):
        """Counts a unit as under way, of which there are limits."""
        kind = isinstance(unit, Compute) and 1 + unit.resident.task.is_remote
        with self._guard:
            self._under_way[kind] += 1
            assert self._under_way[kind] <= self._limits[kind]
        try:
            yield
        finally:
            with self._guard:
                self._under_way[kind] -= 1

    def perform(self, unit):
        with self.counted(unit):
            return self._perform(unit)

    def _perform(self, unit):
        with self._guard:
            pause_s = self._random.choice([0, 0, 1e-5, 3e-4])
            if self._num_left is not None:
                self._num_left -= 1
                if self._num_left < 0:
                    raise self.error
        time.sleep(pause_s)
        match unit:
            case Load(_, items):
                for resident, states in items:
                    for state, _ in states:
                        found = self.content[resident.task.layout.key, state]
                        view(resident.task, resident.buffer, state)[:] = found
                return [()] * len(items)
            case Compute(resident):
                resident.task.compute(None, resident.buffer, ())
            case Write(_, items):
                for resident, states in items:
                    for state in states:
                        own = view(resident.task, resident.buffer, state)
                        assert (own == own[0]).all()
                        self.content[resident.task.layout.key, state] = int(own[0])
        return ()


def view(task, buffer, state):
    start = sum(task.layout.sizes[:state])
    return buffer.array[start : start + task.layout.sizes[state]].view(np.uint32)


def add_one(task):
    def compute(csd, buffer, tells):
        for state in task.stores:
            view(task, buffer, state)[:] += 1

    task.compute = compute
    return task


def run(program, drives, mover, wanted):
    """Runs the steps; `wanted` counts how often each state was changed."""
    for step in program.steps:
        # What stays must leave room for the largest task, so it goes first.
        mover.cache_only(frozenset())
        mover.flush()
        mover.drop_prefetched()
        mover.cache_only(step.staying)
        mover.defer_writes(step.defers_writes)

        def task(number, num_stores):
            layout = program.layouts[number]
            loads = tuple((n, None) for n in range(len(layout.sizes)))
            stores, is_remote = tuple(range(num_stores)), number % 3 == 1
            kind = {"stores": stores, "is_remote": is_remote}
            return add_one(Task(layout, loads=loads, **kind))

        mover.prefetch([task(number, 0) for number in step.prefetches])
        time.sleep(0.001)  # some begin, and hold the memory
        errors = []

        def submit(call, task=task, errors=errors):
            try:
                mover.run([task(*one) for one in call])
            except BaseException as caught:
                errors.append(caught)

        threads = [threading.Thread(target=submit, args=(call,)) for call in step.calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(one is drives.error for one in errors)
        mover.drain()
        for number, num_stores in (one for call in step.calls for one in call):
            for state in range(num_stores):
                wanted[number, state] = wanted.get((number, state), 0) + 1
        if step.flushes:
            mover.flush()
        assert drives.pool.used_bytes <= drives.pool.capacity_bytes
    mover.flush()


def check(program):
    before, drives, failure = threading.active_count(), Drives(program), Failure()
    queues = Queues([(0, True)] * NUM_DRIVES, drives.acquire, Limits(*program.limits))
    mover = Mover("a test", queues, drives.perform, failure)
    wanted, raised = {}, []

    def main():
        try:
            run(program, drives, mover, wanted)
        except BaseException as error:
            raised.append(error)
        mover.close()

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "a deadlock"
    assert raised == ([] if failure.error is None else [failure.error])
    assert failure.error in (None, drives.error)
    assert threading.active_count() == before
    assert drives.pool.used_bytes == 0
    if failure.error is None:
        found = {key: value for key, value in drives.content.items() if value}
        assert found == wanted


NO_CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large)
CROWD = Program(
    tuple(Layout(n, n % 2, (PAGE,) * 3) for n in range(6)),
    (Step((((0, 3), (1, 3)), ((2, 3), (3, 3)), ((4, 3), (5, 3))), (5, 4, 3),
          frozenset({1}), True, False),) * 3,
    (1, 1, 1), 0, None, 0,
)  # fmt: skip
UNUSED = Program(
    CROWD.layouts, (Step((((0, 3),),), (5,), frozenset(), False, False),) * 2,
    (1, 1, 1), 0, None, 0,
)  # fmt: skip


@given(program=programs())
@example(program=CROWD)
@example(program=UNUSED)
@settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=NO_CHECKS
)
def test_random_programs_end(program):
    check(program)


@pytest.mark.long
@given(program=programs())
@settings(max_examples=500, deadline=None, suppress_health_check=NO_CHECKS)
def test_many_random_programs_end(program):
    check(program)
