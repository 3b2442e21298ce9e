"""The mover's next unit, against a simple model without threads and files."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinf.csd import Extent
from jaxinf.engine import SubgroupLayout
from jaxinf.layout import Subgroup
from jaxinf.transfer import Compute, Limits, Load, Queues, Task, Write
from jaxinf.transfer.scheduling import next_unit
from jaxinf.transfer.tasks import TaskGroup

PAGE = 4096
NUM_STATES = 3
# The host's drives share its memory; cards have their own.
DRIVES = [(0, True), (0, True), (1, False)]
SHORT, LONG = PAGE, 1 << 20
"""Elements; the states of a long subgroup are worth a request each."""


def layout(number, num_elements):
    """Subgroup `number`, whose CSD depends on it."""
    subgroup = Subgroup(number, 0, number % len(DRIVES), 0, num_elements)
    extents = tuple(
        Extent(np.dtype(np.float32), num_elements, 0, 4 * num_elements * state)
        for state in range(NUM_STATES)
    )
    names = ("params", "mu", "nu")
    return SubgroupLayout(subgroup, names, names, extents, None)


def task(where, loads=(0, 1, 2), stores=(0, 1, 2)):
    states = tuple((state, "a") for state in loads)
    return Task(where, lambda csd, buffer, tells: None, states, stores)


class Buffer:
    """A buffer of a modelled memory."""

    def __init__(self, rig, memory, piece):
        self.rig, self.memory, self.piece = rig, memory, piece

    def release(self):
        self.rig.free_bytes[self.memory] += self.piece.num_bytes
        self.rig.forgotten(self.piece)


class Rig:
    """Queues over memories of a given length; records the work on each task."""

    def __init__(self, limits=(2, 2), memory_bytes=(1 << 40, 1 << 40)):
        self.queues = Queues(DRIVES, self.acquire, Limits(*limits))
        self.free_bytes = list(memory_bytes)
        self.under_way = []
        self.groups = []
        self.submitted = []
        self.computed = Counter()
        self.written = []
        self.loads = Counter()

    def submit(self, *tasks):
        group = TaskGroup(len(tasks))
        self.queues.submit(tasks, group)
        self.groups.append(group)
        self.submitted.extend(tasks)
        return group

    def forgotten(self, piece):
        """What was evicted before its task may be read again."""
        own = [one for one in self.submitted if one.piece == piece]
        if not any(self.computed[one] for one in own):
            for state in range(NUM_STATES):
                self.loads.pop((piece.subgroup, (state, "a")), None)

    def acquire(self, wanted):
        memory, num_bytes = DRIVES[wanted.piece.drive][0], wanted.piece.num_bytes
        if num_bytes > self.free_bytes[memory]:
            return None
        self.free_bytes[memory] -= num_bytes
        return Buffer(self, memory, wanted.piece)

    def begin(self):
        """Begins the next unit, and returns it."""
        unit = next_unit(self.queues)
        if unit is not None:
            self.under_way.append(unit)
        return unit

    def end(self, unit):
        self.under_way.remove(unit)
        match unit:
            case Load(_, items):
                for resident, states in items:
                    for state in states:
                        self.loads[resident.task.piece.subgroup, state] += 1
                self.queues.end(unit, [()] * len(items))
            case Compute(resident):
                found = resident.task
                assert not resident.missing
                self.computed[found] += 1
                self.queues.end(unit)
            case Write(_, items):
                for resident, states in items:
                    assert self.computed[resident.task] == 1
                    self.written.extend((resident.task, state) for state in states)
                self.queues.end(unit)

    def run(self):
        """Performs units until there is none."""
        units = []
        while (unit := self.begin()) is not None:
            self.end(unit)
            units.append(unit)
        return units

    def drain(self):
        self.queues.num_draining += 1
        units = self.run()
        self.queues.num_draining -= 1
        return units


def kinds(units):
    return [type(unit).__name__ for unit in units]


def test_what_is_computed_goes_before_what_is_loaded_and_writes_before_loads():
    rig = Rig(limits=(1, 1))
    rig.submit(*(task(layout(n, LONG)) for n in (0, 3)))
    assert kinds(rig.run()) == ["Load", "Compute", *["Write"] * 3] * 2


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
    stores, gives_up, stays, written
):
    rig, where = Rig(), layout(0, SHORT)
    rig.queues.keep(frozenset([where.key]))
    rig.queues.is_deferring = True
    rig.submit(task(where))
    rig.run()
    rig.queues.end_step()
    if not stays:
        rig.queues.keep(frozenset())
    rig.submit(task(where, loads=(), stores=stores))
    rig.run() if stays else rig.drain()
    rig.queues.end_step(given_up=[where.key] * gives_up)
    assert rig.queues.flush()
    rig.drain()
    assert [state for _, state in rig.written] == written
    assert bool(rig.queues.residents) == stays


def test_what_was_read_ahead_and_not_used_is_read_again():
    """A task verifies what it uses; the rest has no known checksum."""
    rig, where = Rig(), layout(0, SHORT)
    rig.queues.keep(frozenset([where.key]))
    rig.queues.prefetch([task(where)])
    load = rig.begin()
    rig.under_way.remove(load)
    rig.queues.end(load, [load.items[0][1]])
    rig.submit(task(where, loads=(2,), stores=(2,)))
    rig.drain()
    rig.queues.end_step()
    rig.submit(task(where, loads=(0, 2), stores=(2,)))
    units = [unit for unit in rig.drain() if isinstance(unit, Load)]
    assert [states for unit in units for _, states in unit.items] == [((0, "a"),)]


def test_held_prefetches_begin_later_and_submitted_tasks_do_not_wait():
    rig = Rig()
    rig.queues.prefetch([task(layout(n, SHORT)) for n in range(2)])
    rig.queues.is_holding = True
    assert rig.begin() is None
    rig.submit(task(layout(1, SHORT)))
    assert kinds(rig.run()) == ["Load", "Compute"]
    rig.queues.is_holding = False
    assert kinds(rig.run()) == ["Load"]


def test_a_prefetch_gets_no_memory_that_a_submitted_task_waits_for():
    rig = Rig(memory_bytes=(2 * layout(0, LONG).num_bytes - 1, 0))
    rig.submit(task(layout(0, LONG)), task(layout(3, LONG)))
    rig.queues.prefetch([task(layout(6, SHORT))])
    first, units = rig.begin(), []
    while (unit := rig.begin()) is not None:
        units.append(unit)
    assert not units  # the first task is loaded, and nothing else fits
    rig.end(first)
    assert [one.is_prefetch for one in rig.drain() if isinstance(one, Load)] == [
        False,
        True,
    ]


def test_nothing_begins_after_a_stop():
    rig = Rig()
    rig.submit(*(task(layout(n, LONG)) for n in range(6)))
    rig.queues.prefetch([task(layout(n, SHORT)) for n in range(6, 9)])
    first, second = rig.begin(), rig.begin()
    rig.queues.stop()
    rig.end(first)
    rig.queues.fail(second)
    rig.submit(task(layout(9, SHORT)))
    assert rig.begin() is None
    assert len(rig.queues.residents) == 2  # their memory is still to be released


@given(
    lengths=st.lists(st.sampled_from([SHORT, LONG]), min_size=1, max_size=8),
    staying=st.sets(st.integers(0, 7)),
    commits=st.lists(st.booleans(), min_size=1, max_size=5),
    at_once=st.sampled_from([(), (0,)]),
    room=st.integers(1, 3),
)
def test_what_stays_is_loaded_once_and_deferred_writes_are_made_by_commits(
    lengths, staying, commits, at_once, room
):
    layouts = [layout(3 * n, length) for n, length in enumerate(lengths)]
    held = [one for n, one in enumerate(layouts) if n in staying]
    memory = sum(one.num_bytes for one in held) + room * layout(0, LONG).num_bytes
    rig = Rig(memory_bytes=(memory, 0))
    queues = rig.queues
    queues.keep(frozenset(one.subgroup for one in held))
    queues.at_once = frozenset(at_once)
    wanted, deferred = Counter(), set()
    for is_committing in commits:
        queues.is_deferring = not is_committing
        rig.submit(*map(task, layouts))
        rig.drain()
        assert not queues.num_unfinished
        for one in layouts:
            for state in range(NUM_STATES):
                if one in held and not is_committing and state not in at_once:
                    deferred.add((one, state))
                else:
                    deferred.discard((one, state))
                    wanted[one, state] += 1
        if is_committing:
            assert not queues.flush()
        queues.end_step()
    found_bytes = sum(one.num_bytes for one in held) * (len(commits) - 1)
    assert queues.found_bytes == found_bytes
    assert queues.flush() == bool(deferred)
    rig.drain()
    wanted.update(deferred)
    assert Counter((t.piece, state) for t, state in rig.written) == wanted
    assert {r.task.piece for r in queues.residents} == set(held)
    for one in layouts:
        times = 1 if one in held else len(commits)
        found = [rig.loads[one.subgroup, (n, "a")] for n in range(NUM_STATES)]
        assert found == [times] * NUM_STATES
    queues.keep(frozenset())
    assert not queues.residents


def test_what_a_step_computed_does_not_count_when_it_is_given_up():
    rig = Rig()
    where, other = layout(0, SHORT), layout(3, SHORT)
    rig.queues.keep(frozenset({where.subgroup, other.subgroup}))
    rig.submit(task(where), task(other))
    rig.drain()
    rig.submit(task(where))  # again in the same step
    rig.drain()
    assert rig.loads[where.subgroup, (0, "a")] == 2
    rig.queues.end_step(given_up=[where.subgroup])
    rig.submit(task(where), task(other))
    rig.drain()
    assert rig.loads[where.subgroup, (0, "a")] == 3
    assert rig.loads[other.subgroup, (0, "a")] == 1
