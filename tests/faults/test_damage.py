"""Damaged files that no step reads do not stop a run, which writes them anew.

What a step reads is compared with its checksum: `tests/engine/test_integrity.py`.
"""

import os

import pytest
from raw_stores import chunk_file

from jaxinf.store import verify_step

STEP = 3


def chunk_of(driver, slot):
    files = driver.files.directory
    committed = files.committed_slot()
    other = "b" if committed == "a" else "a"
    slot = committed if slot == "committed" else other
    return chunk_file(files, slot, 1, "params")


@pytest.mark.parametrize("damage", ["truncated", "one bit flipped"])
def test_a_chunk_of_the_other_slot(place, drive, damage):
    driver = drive(place / "store").init().steps(STEP)
    driver.close()
    file = chunk_of(driver, "other")
    data = bytearray(file.read_bytes())
    data[1000] ^= 0x10
    file.write_bytes(data if damage == "one bit flipped" else data[:100])
    drive(place / "store").init().steps(3).check(STEP + 3)


def test_a_chunk_without_its_padding(place, drive):
    """All elements are there, but zarr's readers would refuse the file."""
    driver = drive(place / "store").init().steps(STEP)
    driver.close()
    file, files = chunk_of(driver, "committed"), driver.files.directory
    num_bytes = file.stat().st_size
    os.truncate(file, num_bytes - 4096)
    (damage,) = verify_step(files, place / "store" / "current")
    assert damage.file == file
    assert damage.problem.startswith(f"expected a file of {num_bytes} bytes, found")
    drive(place / "store").init().steps(2).check(STEP + 2)
    assert file.stat().st_size == num_bytes
