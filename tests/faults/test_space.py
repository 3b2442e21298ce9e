"""File systems that are full: of bytes or of inodes, in the middle of a run.

Every test fills a small file system for real, reads the error, makes room and goes on.
"""

import os

import pytest

from jaxinf.errors import StoreSpaceError

STEP = 3


@pytest.fixture
def small(mount_tmpfs):
    """A file system of 16 MiB with some 200 free inodes more than a store takes."""
    return mount_tmpfs("small", size="16m", nr_inodes=400)


def fill_bytes(path):
    with open(path / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    return [path / "filler"]


def fill_inodes(path):
    made = []
    try:
        while True:
            made.append(path / f"filler{len(made)}")
            os.symlink("nowhere", made[-1])
    except OSError:
        made.pop()
    return made


FILLERS = {"bytes": fill_bytes, "inodes": fill_inodes}
REMEDIES = {
    "bytes": "No space left on device; free space there",
    "inodes": "No space left on device; no inodes are left there: remove files",
}


def go_on_with_room(drive, driver, made, at):
    path = driver.store.path
    driver.engine.close()
    for file in made:
        file.unlink()
    again = drive(path).init()
    assert again.at == at
    return again


def test_no_free_bytes_stop_no_step(small, drive):
    """All chunks are preallocated, and a record takes its predecessor's room."""
    driver = drive(small / "store").init().steps(2)
    driver.store.wait()
    fill_bytes(small)
    driver.steps(STEP).check(2 + STEP)


def test_no_free_inodes_at_the_commit(small, drive):
    driver = drive(small / "store").init().steps(STEP)
    driver.store.wait()
    made = fill_inodes(small)
    with pytest.raises(StoreSpaceError, match=REMEDIES["inodes"]) as caught:
        driver.durable_step()
    assert str(small / "store") in str(caught.value)
    driver = go_on_with_room(drive, driver, made, STEP)
    driver.check(STEP)
    driver.steps(3).check(STEP + 3)


@pytest.mark.parametrize("what", FILLERS)
def test_full_in_the_middle_of_a_step(small, drive, what):
    """Chunks that a reader holds are replaced, and that takes room."""
    driver = drive(small / "store").init().steps(STEP)
    with driver.store.snapshot():
        driver.durable_step()
        made = FILLERS[what](small)
        with pytest.raises(StoreSpaceError, match=REMEDIES[what]) as caught:
            driver.durable_step()
        assert str(small / "store") in str(caught.value)
    driver = go_on_with_room(drive, driver, made, STEP + 1)
    driver.steps(2).check(STEP + 3)


@pytest.mark.parametrize("what", FILLERS)
def test_full_at_the_creation(small, drive, what):
    made = FILLERS[what](small)
    driver = drive(small / "store")
    with pytest.raises(StoreSpaceError, match=r"inodes|has [\d,]+ free"):
        driver.init()
    go_on_with_room(drive, driver, made, 0).steps(STEP).check(STEP)


def test_a_full_csd(mount_tmpfs, drive):
    roots = [mount_tmpfs(f"csd{number}", size="2m") for number in range(3)]
    driver = drive(roots[0].parent / "store", csds=roots).init().steps(STEP)
    with driver.store.snapshot():
        driver.durable_step()
        (made,) = fill_bytes(roots[0])
        with pytest.raises(StoreSpaceError, match=str(roots[0])):
            driver.durable_step()
    driver = go_on_with_room(drive, driver, [made], STEP + 1)
    driver.steps(1).check(STEP + 2)
