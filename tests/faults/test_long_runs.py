"""Long runs keep nothing of earlier steps; workers that fork; the kill campaign."""

import os
import threading
from pathlib import Path

import pytest
from families import LONG
from store_driver import Driver

NUM_FORKS = 10_000 if LONG else 300
NUM_KILLS = 720 if LONG else 36
NUM_STEPS = 5000 if LONG else 300
WARM_UP = 50
GROWTH_BYTES = 8 << 20
NUM_IN_FLIGHT = 4
"""Files that prefetching workers may have open at any moment."""

LEAVES = {
    "bias": ((129,), "float32"),
    "embed": ((5, 1025), "float32"),
    "scale": ((), "float32"),
}


def resources():
    for thread in threading.enumerate():
        if thread.name == "jaxinf-commit":  # it has committed, and is about to end
            thread.join(60)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    num_fds = len(os.listdir("/proc/self/fd"))
    return num_fds, threading.active_count(), pages * os.sysconf("SC_PAGE_SIZE")


def test_steps_keep_nothing(place):
    driver = Driver(
        place / "store", LEAVES, memory_bytes=1 << 20, keep_steps=(0, 1)
    ).init()
    try:
        driver.steps(WARM_UP).store.wait()
        num_fds, num_threads, num_bytes = resources()
        for step in range(WARM_UP, NUM_STEPS):
            driver.step()
            if step % 100 == 0:
                driver.store.checkpoint()
        driver.store.wait()
        found = resources()
        assert found[0] <= num_fds + NUM_IN_FLIGHT
        assert found[1] == num_threads
        assert found[2] < num_bytes + GROWTH_BYTES
        assert len(os.listdir(place / "store" / "checkpoints")) == 1
    finally:
        driver.engine.close()


PROGRAM = """
import os, signal, sys, warnings
from store_driver import Driver

warnings.simplefilter("ignore")  # of forks beside threads, which this is about
LEAVES = {"b": ((129,), "float32"), "w": ((3, 4096), "float32")}
path, num_steps, num_csds = sys.argv[1:]
options = {"num_csds": int(num_csds), "memory_bytes": 1 << 20}
driver = Driver(path, LEAVES, **options).init()
children = []
for step in range(int(num_steps)):
    driver.step()
    child = os.fork()
    if not child:
        signal.pause()  # while the parent makes further steps
    children.append(child)
    if len(children) > 3:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children.pop(0), 0)
driver.check(driver.at)
driver.close()
# Children that are left hold nothing of the store.
again = Driver(path, leaves=LEAVES).init()
again.steps(1).check(int(num_steps) + 1)
again.close()
for child in children:
    os.kill(child, signal.SIGKILL)
print(f"{num_steps} steps")
"""


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_csds", [0, 2])
def test_fork_workers(place, run_python, num_csds):
    given = place / "store", NUM_FORKS, num_csds
    result = run_python(PROGRAM, *given, limit_s=1800)
    assert result.stdout == f"{NUM_FORKS} steps\n"


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_killed_runs_go_on_with_the_same_bits(place, run_python):
    options = ["--directory", place, "--kills", NUM_KILLS, "--num-steps", 12]
    script = Path(__file__).parents[2] / "scripts" / "kill_campaign.py"
    result = run_python(script, *options, limit_s=1800)
    print(result.stdout)
    assert f"{NUM_KILLS} kills, 0 mismatching bits, 0 faults" in result.stdout
