"""Damaged files are named and not trained on; after a repair the run continues."""

import os
import shutil
from pathlib import Path

import pytest

from jaxinf.errors import StoreCorruptError, StoreFormatError, StoreIOError
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


@pytest.mark.parametrize("num_csds", [0, 3])
@pytest.mark.parametrize("state", ["params", "trace"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_chunk_that_is_read(place, drive, damage, state, num_csds):
    harm, kind, remedy = DAMAGES[damage]
    path, roots = place / "store", make_roots(place, num_csds)
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


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_chunk_of_the_other_slot(place, drive, damage):
    """The committed step does not use the chunk, and a missing file is made again."""
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


@pytest.mark.parametrize("csd", [0, 1, 2])
@pytest.mark.parametrize("what", ["root", "directory"])
def test_a_csd_that_is_missing_at_open(place, drive, csd, what):
    roots = make_roots(place, 3)
    driver = drive(place / "store", csds=roots).init().steps(STEP)
    driver.close()
    gone = roots[csd]
    if what == "directory":
        gone = driver.opened.directory.csd_directory(csd)
    gone.rename(place / "away")
    with pytest.raises(StoreFormatError, match=rf"CSD {csd} .*{roots[csd]}.*mount"):
        drive(place / "store")
    (place / "away").rename(gone)
    driver = drive(place / "store").init()
    driver.check(STEP)
    driver.steps(2).check(STEP + 2)


@pytest.mark.parametrize(
    ("name", "text"),
    [("commit.json", "{"), ("commit.json", None), ("jaxinf.json", "{}")],
)
def test_a_document(place, drive, name, text):
    path = place / "store"
    drive(path).init().steps(STEP).close()
    file = path / "current" / name if name == "commit.json" else path / name
    before = file.read_bytes()
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(StoreFormatError, match=rf"{name}: .*(backup|checkpoint|not)"):
        drive(path)
    file.write_bytes(before)
    drive(path).init().steps(2).check(STEP + 2)


def make_roots(place: Path, num_csds: int) -> list[Path]:
    roots = [place / f"csd{number}" for number in range(num_csds)]
    for root in roots:
        root.mkdir()
    return roots
