"""From opening to the end of a process: no leftovers, no losses."""

import contextlib
import gc
import os
import threading
from pathlib import Path

import pytest

import jaxinf
from jaxinf.errors import StoreError

ENDING = Path(__file__).parents[1] / "programs" / "ending_processes.py"


def resources():
    threads = [t.name for t in threading.enumerate() if t.name.startswith("jaxinf")]
    links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    opened = [os.readlink(link) for link in links if os.path.lexists(link)]
    with open("/proc/self/maps") as maps:
        anonymous = sum(1 for line in maps if len(line.split()) == 5)
    return threads, sorted(name for name in opened if "jaxinf-test" in name), anonymous


def test_close_leaves_nothing(drive):
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
    gc.collect()
    after = resources()
    assert after[:2] == before[:2] == others[:2]
    assert after[2] - before[2] < 20  # mappings that malloc makes


def test_refused_openings_leave_nothing(drive, place):
    drive().init().close()
    (place / "store" / "current").unlink()
    (place / "store" / "current").write_text("")
    before = resources()[:2]
    for _ in range(3):
        try:
            jaxinf.open_store(place / "store")
        except jaxinf.StoreFormatError:
            continue
    assert resources()[:2] == before


@contextlib.contextmanager
def no_new_threads():
    """Makes the system refuse threads: no address space has room for such a stack."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)


def test_a_commit_without_a_thread_of_its_own(drive, caplog):
    driver = drive().init().steps(2)
    driver.update()
    driver.engine.join()
    with no_new_threads():
        driver.finish()
    assert "no thread to commit step 3 in the background" in caplog.text
    assert driver.opened.commit.step == 3
    driver.steps(1).check(4)


def test_workers_that_cannot_be_started(drive):
    drive().init().steps(1).close()
    before = resources()[:2]
    with (
        no_new_threads(),
        pytest.raises(StoreError, match=r"\d+ worker threads, .*\(ulimit -u"),
    ):
        drive()
    assert resources()[:2] == before
    with no_new_threads():
        new = drive("new")
        with pytest.raises(StoreError, match="worker threads"):
            new.init()
        new.close()
    assert resources()[:2] == before
    drive("new").init().steps(1).check(1)


def test_two_stores_in_one_process(drive):
    one, two = drive("one", num_csds=2), drive("two", num_csds=2)
    one.init()
    two.init()
    for step in range(1, 4):
        one.step()
        two.step()
        two.step()
        one.check(step)
        two.check(2 * step)
    one.close()
    two.steps(1).check(7)


@pytest.mark.long
@pytest.mark.parametrize("how", ["without_close", "lost_sight_of"])
def test_exit_without_close(drive, place, run_python, how):
    run_python(ENDING, place / "store", how)
    drive().init().check(3)


@pytest.mark.long
def test_exit_by_an_exception_in_the_middle_of_a_step(drive, place, run_python):
    done = run_python(ENDING, place / "store", "in_a_step", check=False)
    assert done.returncode == 7
    drive().init().check(2)


@pytest.mark.long
def test_exit_after_a_failure_says_it(drive, place, run_python):
    result = run_python(ENDING, place / "store", "after_a_failure", check=False)
    assert result.returncode == 1
    assert "stopped by StoreIOError: " in result.stderr
    assert "publish.lock: locking failed: Is a directory" in result.stderr
    (place / "store" / "publish.lock").rmdir()
    drive().init().check(2)


@pytest.mark.long
def test_a_fork_leaves_its_parents_store_alone(drive, place, run_python):
    result = run_python(ENDING, place / "store", "forked")
    assert result.stdout.split("\n")[:2] == ["child 0", "parent 0"]
    drive().init().check(4)


@pytest.mark.long
def test_a_fork_does_not_keep_the_lock(drive, place, run_python):
    result = run_python(ENDING, place / "store", "orphan", check=False)
    child = int(result.stdout)
    try:
        os.kill(child, 0)
        drive().init().step()
    finally:
        os.kill(child, 9)
