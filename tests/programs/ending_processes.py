"""Processes with a store that end in various ways: `engine/test_lifetime.py`.

python ending_processes.py STORE WAY
"""

import gc
import os
import sys

from store_driver import Driver

import jaxinf

KEPT = []
"""Drivers that are there when the process ends."""


def begun(path):
    KEPT.append(Driver(path).init())
    return KEPT[0]


def lost_sight_of(path):
    driver = Driver(path).init()
    driver.steps(3)
    del driver
    gc.collect()


def in_a_step(path):
    driver = begun(path)
    driver.steps(2)
    driver.update([0])
    raise SystemExit(7)


def after_a_failure(path):
    driver = begun(path)
    driver.steps(2)
    driver.store.wait()
    lock = driver.files.directory.flip_lock
    lock.unlink()
    lock.mkdir()
    driver.step()


def forked(path):
    driver = begun(path)
    driver.steps(2)
    child = os.fork()
    if not child:
        status = 1
        try:
            _ = driver.store.step
        except jaxinf.StoreClosedError as error:
            status = 0 if "this is a fork of it" in str(error) else 2
        try:
            driver.update()
            status = 3
        except jaxinf.StoreClosedError:
            pass
        driver.close()
        print("child", status, flush=True)
        sys.exit(status)  # with all that exits do
    _, status = os.waitpid(child, 0)
    driver.steps(2)
    driver.check(4)
    print("parent", status, flush=True)


if __name__ == "__main__":
    globals()[sys.argv[2]](sys.argv[1])
