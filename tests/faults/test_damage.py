"""Damaged files are named and not trained on; after a repair the run continues."""

import os
import shutil

import pytest

from jaxinf.errors import StoreCorruptError, StoreIOError
from jaxinf.store import verify_step

STEP = 3


def delete(file):
    file.unlink()


def truncate(file):
    os.truncate(file, 100)


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[1000] ^= 0x10
    file.write_bytes(data)


DAMAGES = {
    "deleted": (delete, StoreIOError, "restore it from a checkpoint"),
    "truncated": (truncate, StoreIOError, "found 100; restore it from a checkpoint"),
    "one bit flipped": (flip_a_bit, StoreCorruptError, "expected CRC-32C .* restore"),
}


@pytest.mark.parametrize(
    ("damage", "state", "num_csds"),
    [
        ("deleted", "params", 0),
        ("truncated", "trace", 2),
        ("one bit flipped", "params", 2),
    ],
)
def test_a_chunk_that_is_read(place, drive, damage, state, num_csds):
    harm, kind, remedy = DAMAGES[damage]
    path, roots = place / "store", [place / f"csd{n}" for n in range(num_csds)]
    for root in roots:
        root.mkdir()
    driver = drive(path, csds=roots).init().steps(STEP)
    driver.close()
    slot = driver.opened.directory.committed_slot()
    file = driver.opened.directory.chunk_file(slot, 1, 0, state)
    backup = shutil.copy(file, place / "backup")
    harm(file)

    driver = drive(path)
    assert driver.store.step == STEP
    damages = verify_step(driver.opened.directory, path / "current")
    assert [d.file for d in damages] == [file]
    with pytest.raises(kind, match=rf"{state}\.embed/c/0/0.*{remedy}") as caught:
        driver.init().step()
    assert str(file) in str(caught.value)
    driver.engine.close()

    shutil.copy(backup, file)
    driver = drive(path).init()
    driver.check(STEP)
    driver.steps(2).check(STEP + 2)


@pytest.mark.parametrize("damage", ["truncated", "one bit flipped"])
def test_a_chunk_of_the_other_slot(place, drive, damage):
    """The committed step does not use the chunk."""
    path = place / "store"
    driver = drive(path).init().steps(STEP)
    driver.close()
    slot = driver.opened.directory.committed_slot()
    spare = "b" if slot == "a" else "a"
    file = driver.opened.directory.chunk_file(spare, 1, 0, "params")
    DAMAGES[damage][0](file)
    drive(path).init().steps(3).check(STEP + 3)


def test_a_chunk_without_its_padding(place, drive):
    """All elements are there, but zarr's readers would refuse the file."""
    driver = drive(place / "store").init().steps(STEP)
    driver.close()
    files = driver.opened.directory
    slot = files.committed_slot()
    assert slot is not None
    file = files.chunk_file(slot, 1, 0, "params")
    num_bytes = file.stat().st_size
    os.truncate(file, num_bytes - 4096)
    (damage,) = verify_step(files, files.step_path(slot))
    assert damage.file == file
    assert damage.problem.startswith(f"expected a file of {num_bytes} bytes, found")
    drive(place / "store").init().steps(2).check(STEP + 2)
    assert file.stat().st_size == num_bytes
