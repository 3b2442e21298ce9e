"""A data loader that forks its workers beside a training run, at any instant of it."""

import os
import subprocess
import sys

import pytest
from families import LONG

NUM_STEPS = 10_000 if LONG else 300

PROGRAM = """
import multiprocessing, sys, warnings
import numpy as np
from store_driver import Driver

warnings.simplefilter("ignore")  # of forks beside threads, which this is about
LEAVES = {"b": ((129,), "float32"), "w": ((3, 4096), "float32")}
NUM_WORKERS = 3


def serve(batches, number):
    while True:
        batches.send(np.full(64, number))


def worker(number):
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(theirs, number), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def main(path, num_steps):
    driver = Driver(path, leaves=LEAVES, csds=sys.argv[3:]).init()
    workers = []
    for step in range(num_steps):
        driver.step()
        if len(workers) == NUM_WORKERS and step % 2:
            process, batches = workers.pop(0)
            batches.close()
            process.kill()
            process.join()
        if len(workers) < NUM_WORKERS:
            workers.append(worker(step))
        for _, batches in workers:
            assert batches.recv().shape == (64,)
    driver.check(num_steps)
    driver.close()
    # Workers that are left hold nothing of the store.
    again = Driver(path, leaves=LEAVES).init()
    again.steps(1).check(num_steps + 1)
    again.close()
    print(f"{num_steps} steps")


context = multiprocessing.get_context("fork")
main(sys.argv[1], int(sys.argv[2]))
"""


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_csds", [0, 2])
def test_fork_workers(place, num_csds):
    roots = [place / f"csd{n}" for n in range(num_csds)]
    for root in roots:
        root.mkdir()
    words = [sys.executable, "-c", PROGRAM, place / "store", NUM_STEPS, *roots]
    result = subprocess.run(
        list(map(str, words)),
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == f"{NUM_STEPS} steps\n"
