"""A data loader that forks its workers beside a training run, at any instant of it."""

import pytest
from families import LONG

NUM_STEPS = 10_000 if LONG else 300

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
    given = place / "store", NUM_STEPS, num_csds
    result = run_python(PROGRAM, *given, limit_s=1800)
    assert result.stdout == f"{NUM_STEPS} steps\n"
