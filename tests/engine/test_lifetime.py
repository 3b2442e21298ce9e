"""From opening to the end of a process: no leftovers, no losses."""

import contextlib
import gc
import os
import threading
import weakref
from pathlib import Path

import pytest

import jaxinf

ENDING = Path(__file__).parents[1] / "programs" / "ending_processes.py"


def resources():
    threads = [t.name for t in threading.enumerate() if t.name.startswith("jaxinf")]
    links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    opened = [os.readlink(link) for link in links if os.path.lexists(link)]
    with open("/proc/self/maps") as maps:
        anonymous = sum(1 for line in maps if len(line.split()) == 5)
    return threads, sorted(name for name in opened if "jaxinf-test" in name), anonymous


def test_close_and_a_refused_opening_leave_nothing(drive, place):
    gc.collect()
    others = resources()
    drive("warm up").init().steps(1).close()
    gc.collect()
    before = resources()
    for number in range(5):
        driver = drive(f"store {number}").init().steps(3)
        with driver.store.snapshot():
            driver.step()
        driver.close()
    (place / "store 1" / "current").unlink()
    (place / "store 1" / "current").write_text("")
    for _ in range(3):
        with contextlib.suppress(jaxinf.StoreFormatError):
            jaxinf.open_store(place / "store 1")
    gc.collect()
    after = resources()
    assert after[:2] == before[:2] == others[:2]
    assert after[2] - before[2] < 20  # mappings that malloc makes


@pytest.mark.parametrize("memory_bytes", [None, 1 << 18], ids=["stays", "passes"])
def test_an_update_leaves_nothing_of_its_caller_alive(drive, memory_bytes):
    """A cycle of references would keep a step's gradients until garbage is looked for.

    Nor does state that stays in memory refer to the arrays of its last update.
    """
    options = {} if memory_bytes is None else {"memory_bytes": memory_bytes}
    driver = drive(**options).init().steps(1)
    gc.disable()
    try:
        part = driver.part(0)
        driver.engine.steps.update(driver.at, part)
        arrays = [weakref.ref(part.gradient), weakref.ref(part.out)]
        del part
        assert [array() for array in arrays] == [None, None]
    finally:
        gc.enable()


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "status", "step", "said"),
    [
        ("lost_sight_of", 0, 3, ()),
        ("in_a_step", 7, 2, ()),
        ("forked", 0, 4, ("child 0\nparent 0\n",)),
        ("after_a_failure", 1, 2, ("stopped by StoreIOError: ", "publish.lock: lock")),
    ],
)
def test_the_end_of_a_process(drive, place, run_python, how, status, step, said):
    done = run_python(ENDING, place / "store", how, check=False)
    assert done.returncode == status, done.stderr
    assert all(text in done.stdout + done.stderr for text in said)
    if how == "after_a_failure":
        (place / "store" / "publish.lock").rmdir()
    drive().init().check(step)


CAPPED = Path(__file__).with_name("memory_cap.py")
NUM_PARAMS = 16_000_000  # 183 MiB of state, and as much in the other slot


@pytest.mark.long
def test_steps_stay_in_the_budget(tmp_path, run_python):
    """State of any size passes through the budget, and needs no more memory."""
    done = run_python(CAPPED, tmp_path, NUM_PARAMS)
    assert done.stdout == "3\n"
