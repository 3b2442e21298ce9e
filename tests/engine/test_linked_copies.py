"""Copies of a store by hard links (cp -al), made during a run.

The run's writes do not reach the copy. It replaces linked files by new ones with all
data that it still needs.
"""

import subprocess

import pytest
from families import family

from jaxinf.store import verify_step

# Many subgroups a chunk: parts of one are written while others are still to be read.
OPTIONS = {
    "leaves": {"bias": ((129,), "float32"), "embed": ((300, 1025), "float32")},
    "memory_bytes": 1 << 18,
    "num_workers": 2,
}


def linked_copy(driver):
    """Returns a copy by `cp -al`, and the bytes of every chunk in it."""
    copy = driver.store.path.with_name("copy")
    subprocess.run(["cp", "-al", driver.store.path, copy], check=True)
    chunks = [f for f in copy.glob("slots/*/*.*/c/**/*") if f.is_file()]
    assert len(chunks) == 8
    return copy, {file: file.read_bytes() for file in chunks}


@pytest.mark.parametrize("durability", family(["step", 4], short=["step"]))
def test_a_copy_in_the_middle_of_a_chunk(drive, durability):
    """Subgroups that were written before the copy are still there after it."""
    options = OPTIONS | {"num_workers": 1}  # a copy takes names that stay
    driver = drive(durability=durability, **options).init().steps(2)
    driver.engine.join()
    write, copies, num_writes = driver.opened.csds[0].write, [], 0

    def copying(transfers):
        nonlocal num_writes
        for transfer in transfers:
            write([transfer])
            num_writes += "trace.embed" in str(transfer.file)
            if num_writes == 5:
                copies.append(linked_copy(driver))

    driver.opened.csds[0].write = copying
    driver.steps(1)
    driver.engine.join()
    assert copies
    driver.opened.csds[0].write = write
    driver.steps(3).check(6)
    assert not verify_step(driver.opened.directory, driver.store.path / "current")
    driver.close()
    copy, _ = copies[0]
    again = drive(copy, **OPTIONS).init()
    again.check(again.at)
    again.steps(2).check(again.at)
