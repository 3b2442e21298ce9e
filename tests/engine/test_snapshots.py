"""Snapshots beside a training run, through the public interface."""

import threading

import numpy as np
import pytest

from jaxinf.store import StoreDirectory, pinned_step

NUM_SNAPSHOTS = 50


@pytest.mark.long
def test_each_is_one_step_of_a_run(drive):
    driver = drive(num_csds=2, chunk_elements=4096, memory_bytes=1 << 22).init()
    stop, stepped, seen = threading.Event(), threading.Event(), []

    def train():
        while not stop.is_set():
            driver.step()
            stepped.set()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(NUM_SNAPSHOTS):
            assert stepped.wait(60)
            stepped.clear()
            with pinned_step(StoreDirectory.open(driver.store.path)) as step:
                seen.append((step.commit.step, driver.found(step.path)))
    finally:
        stop.set()
        thread.join()
    driver.store.check()
    steps = [step for step, _ in seen]
    assert steps == sorted(steps)
    assert len({*steps}) > 1
    for step, found in seen:
        for name, arrays in driver.expected(step).items():
            for held, wanted in zip(found[name], arrays, strict=True):
                np.testing.assert_array_equal(held, wanted, err_msg=name)
    assert not list((driver.store.path / "snapshots").iterdir())
