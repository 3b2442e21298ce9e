"""A crash at every boundary of a step, with every kind of loss, leaves a whole step.

A run is recorded as a log of its operations on the file systems. At each boundary
between two operations, the states that a crash may leave are put on a drive and opened
by the real code. `JAXINF_FAULTS=long` visits many more of them.
"""

import os
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from disk_model import Barrier
from disk_recorder import Recorder
from families import LONG
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_stores import memory_directory
from recorded_run import Mixture, RecordedRun, small_driver

from jaxinf.engine import bind_optimizer

NUM_EXAMPLES = 5000 if LONG else 100


def plain(driver, mark):
    """Creation and a few steps."""
    driver.init()
    mark(0)
    for step in range(1, 4):
        driver.durable_step()
        mark(step)


def pinned(driver, mark):
    """Steps while a reader holds snapshots: chunk files are replaced."""
    driver.init()
    mark(0)
    for step in range(1, 4):
        with driver.store.snapshot():
            driver.durable_step()
            mark(step)


def staying(driver, mark):
    """A commit every two steps, with state in memory; a step that is given up."""
    driver.init()
    mark(0)
    for step in range(1, 6):
        driver.step()
        driver.engine.steps.join()
        if step % 2 == 0:
            mark(step)
            driver.update([0, 1], gradient=7.0)
            driver.engine.steps.abandon()
    driver.store.wait()
    mark(5)


def made_anew(driver, mark):
    """An abandoned creation, and another one over it."""
    bind_optimizer(driver.engine, driver.description, may_create=True)
    driver.engine.close()
    again = small_driver(driver.store.path)
    with closing(again.engine):
        plain(again, mark)


def kept(driver, mark):
    """A checkpoint made, restored after its slot was rewritten, and removed."""
    driver.init()
    mark(0)
    driver.store.checkpoint()
    mark(0, "0")
    for step in range(1, 3):
        driver.durable_step()
        mark(step, "0")
    driver.engine.close()
    again = small_driver(driver.store.path, restore="0")
    with closing(again.engine):
        mark(2, "0")  # which the first step gives up
        again.init().engine.steps.begin_overwrite()
        mark(0, "0")
        again.durable_step()
        mark(1, "0")
        again.store.remove_checkpoint("0")
        mark(1)


def replaced(driver, mark):
    """A checkpoint made in the place of another: at each moment there is one."""
    driver.init()
    mark(0)
    driver.store.checkpoint("best")
    mark(0, "best of 0")
    driver.durable_step()
    mark(1, "best of 0")
    driver.store.checkpoint("best", overwrite=True)
    mark(1, "best of 1")
    driver.durable_step()
    mark(2, "best of 1")


def carried(driver, mark):
    """Steps that carry arrays, others, and none; and a checkpoint of one."""
    driver.init()
    mark(0)
    driver.carry = lambda step: {("n",): np.full(3, step), ("a",): np.array(step)}
    for step in (1, 2):
        driver.durable_step()
        mark(step)
    driver.store.checkpoint()
    mark(2, "2")
    driver.engine.close()
    for step in (3, 4):
        again = small_driver(driver.store.path).init()
        again.carry = None if step == 4 else lambda step: {("n",): np.full(1, step)}
        with closing(again.engine):
            again.durable_step()
            mark(step, "2")
    again = small_driver(driver.store.path, restore="2")
    again.engine.steps.begin_overwrite()
    mark(2, "2")
    again.engine.close()


# Each script with its options, on one drive or on three CSDs; `JAXINF_FAULTS=long` has
# both of all.
SCRIPTS = {
    "plain": (plain, {}, (0, 3)),
    "frozen": (plain, {"is_partly_frozen": True}, (3,)),
    "staying": (staying, {"durability": 2}, (0,)),
    "staying in part": (staying, {"durability": 2, "memory_bytes": 110_000}, (0,)),
    "pinned": (pinned, {}, (3,)),
    "kept": (kept, {}, (0, 3)),
    "replaced": (replaced, {}, (3,)),
    "made anew": (made_anew, {}, (0,)),
    "carried": (carried, {}, (0,)),
}
NAMES = ("jaxinf.json", "slots", "current", "commit.json")
# One of so many names that a snapshot makes and removes is visited.
ONE_IN: dict[str, int] = dict.fromkeys(
    ["pinned", "kept", "replaced", "carried"], 10 if LONG else 1000
)
# The marks whose boundaries are visited; by default those of the second step.
VISITED = {
    "replaced": slice(2, 3),  # one is set aside, and the other gets its name
    "carried": slice(3, None),  # other arrays, none, and those of a checkpoint
    "kept": slice(None),
    "frozen": slice(None),
}


def runs(*names, short=(("plain", 0),)):
    """Parametrises a test with runs; those that are not short only if there is time."""
    return pytest.mark.parametrize(
        "run",
        [
            pytest.param(
                (name, num_csds),
                id=f"{name}-{num_csds}",
                marks=[] if (name, num_csds) in short else [pytest.mark.faults],
            )
            for name in names
            for num_csds in ((0, 3) if LONG else SCRIPTS[name][2])
        ],
        indirect=True,
    )


@pytest.fixture(scope="module")
def run(request):
    name, num_csds = request.param
    with memory_directory() as place:
        script, options, _ = SCRIPTS[name]
        recorded = RecordedRun(place, num_csds, script, **options)
        recorded.name = name
        yield recorded


def enumerate_states(run, mark, *, one_in=1):
    """Visits the cuts from one of the run's marks to the next; 0 is the creation."""
    at = [0, *(number for number, _ in run.log.marks)]
    for cut in reversed(list(run.log.cuts())):
        if at[mark] <= cut.number <= at[mark + 1]:
            for chosen in cut.extremes(one_in=one_in, names=NAMES):
                run.check(cut, chosen)


@runs(*SCRIPTS)
def test_every_boundary_of_a_commit(run):
    # The first step links unchanged chunks; later ones find the links.
    marks = range(1, len(run.log.marks))
    if not LONG:
        marks = marks[VISITED.get(run.name, slice(1, 2))]
    for mark in marks:
        enumerate_states(run, mark, one_in=ONE_IN.get(run.name, 1))
    assert run.num_states > (30 if run.name == "replaced" else 300)
    assert run.num_mixed_spares or run.name != "plain"


@runs("plain", "made anew")
@pytest.mark.faults
def test_every_boundary_of_the_creation(run):
    enumerate_states(run, 0, one_in=20 if LONG else 1000)


@runs(*SCRIPTS, short=(("plain", 0), ("frozen", 3)))
@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    derandomize=not LONG,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_any_loss_at_any_boundary(run, data):
    cuts = list(run.log.cuts())
    cut = cuts[data.draw(st.integers(0, len(cuts) - 1))]
    bits = data.draw(st.integers(0, (1 << len(cut.pending)) - 1))
    chosen = {p for i, p in enumerate(cut.pending) if bits >> i & 1}
    run.check(cut, chosen, goes_on=True)


# --- the enumerator finds errors ---------------------------------------------------


def test_what_the_recorder_does_not_see_is_noticed(place):
    with Recorder(place) as recorder:
        os.system(f"touch {place}/unseen")
        with pytest.raises(AssertionError):
            recorder.check()


def barriers_of_commit(run):
    """Returns the numbers of the operations that a step's commit waits for."""
    (_, (first, _), (last, _), _) = run.log.marks
    numbers = [
        number
        for number in range(first, last)
        if isinstance(run.log.operations[number], Barrier)
    ]
    is_whole_fs = [isinstance(run.log.operations[n].of, tuple) for n in numbers]
    return numbers[is_whole_fs.index(True) :]


def without(run, number):
    operations = list(run.log.operations)
    operations[number] = []
    run.log = replace(run.log, operations=operations)
    return run


@pytest.mark.parametrize("forgotten", [0, 1, 2, 3])
def test_each_forgotten_barrier_is_found(place, forgotten):
    """Chunks, the record, its name, the name `current` must all be durable."""
    run = RecordedRun(place, 0, plain)
    barriers = barriers_of_commit(run)
    assert len(barriers) == 4
    without(run, barriers[forgotten])
    with pytest.raises(Mixture):
        enumerate_states(run, 2)


@pytest.mark.parametrize("csd", [0, 1, 2])
def test_each_forgotten_csd_is_found(place, csd):
    run = RecordedRun(place, 3, plain)
    without(run, barriers_of_commit(run)[csd])
    with pytest.raises(Mixture, match="a mixture that says it is step"):
        enumerate_states(run, 2)
