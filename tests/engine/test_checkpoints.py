"""Checkpoints: steps that are kept while the run goes on in other files."""

import errno
import os
import shutil
import subprocess

import pytest
from families import family
from inject import at_each_call
from raw_stores import edit

from jaxinf.errors import StoreIOError, StoreMismatchError, StoreSpaceError
from jaxinf.store import restore_members_checkpoint, verify_step


def path_of(driver, name):
    return driver.store.path / "checkpoints" / name


def data_files(driver, name):
    """The real files of a checkpoint's chunks."""
    directory = driver.files.directory
    held = directory.manifest.held_chunks()
    return [directory.chunk_path(f"checkpoints/{name}", one) for one in held]


def is_clean(driver, name):
    return not verify_step(driver.files.directory, path_of(driver, name))


@pytest.mark.parametrize(("num_csds", "durability"), [(3, "step"), (0, "checkpoint")])
def test_a_checkpoint_stays_as_it_is(drive, num_csds, durability):
    driver = drive(num_csds=num_csds, durability=durability).init().steps(3)
    assert driver.store.checkpoint() == "3"
    before = {f: (f.read_bytes(), f.stat().st_ino) for f in data_files(driver, "3")}
    assert len(before) == 9  # one leaf also has a remainder
    driver.steps(2)
    assert driver.store.checkpoint("five") == "five"
    driver.steps(10).check(15)
    (driver.store.path / "checkpoints" / "notes.txt").touch()
    found = [(c.name, c.step) for c in driver.store.checkpoints()]
    assert found == [("3", 3), ("five", 5)]
    for name, step in found:
        driver.check(step, path_of(driver, name))
        assert is_clean(driver, name)
    for file, (content, inode) in before.items():
        assert (file.read_bytes(), file.stat().st_ino) == (content, inode)


def test_saving_writes_nothing_and_removing_leaves_nothing(drive, place):
    driver = drive(num_csds=2).init().steps(2)
    driver.store.wait()
    written = driver.files.meters.snapshot().drive_write_bytes
    driver.store.checkpoint()
    assert driver.files.meters.snapshot().drive_write_bytes == written
    driver.steps(2).store.checkpoint()
    held = [place / f"held{n}" for n, _ in enumerate(data_files(driver, "2"))]
    for file, link in zip(data_files(driver, "2"), held, strict=True):
        os.link(file, link)
    for name in ("2", "4"):
        driver.store.remove_checkpoint(name)
    assert driver.store.checkpoints() == []
    assert not [p for p in place.rglob("*") if p.name in ("2", "4")]
    driver.steps(2).check(6)
    assert {link.stat().st_nlink for link in held} == {1}


def test_restoring_goes_on_from_a_checkpoint(drive):
    driver = drive(num_csds=3).init()
    driver.store.annotate(4, {"at": 4})
    driver.steps(4)
    driver.store.checkpoint()
    driver.steps(3).close()
    for before in (7, 9):  # it can be repeated
        for name, step in (("4", 4), (None, before)):  # opening gives nothing up
            with drive(driver.store.path, restore=name).store as store:
                assert store.step == step
        again = drive(driver.store.path, restore="4")
        assert again.store.payload == {"at": 4}
        again.init().steps(5).check(9)
        again.check(4, path_of(driver, "4"))
        assert is_clean(again, "4")
        again.close()
    last = drive(driver.store.path).init()
    assert last.store.step == 9
    last.check(9)


@pytest.fixture
def failing_links(monkeypatch):
    """Makes links of one leaf fail while the list has an error's number."""
    codes = []

    def fail(source, target, **_):
        if codes and "embed" in str(source):
            raise OSError(codes[0], os.strerror(codes[0]))

    at_each_call(monkeypatch, os, "link", fail)
    return codes


def test_the_step_before_a_restore_is_not_lost_if_it_fails(drive, failing_links):
    driver = drive().init().steps(4)
    driver.store.checkpoint()
    driver.steps(3).close()
    failing_links.append(errno.EIO)
    with pytest.raises(StoreIOError, match="embed"):
        drive(driver.store.path, restore="4")
    failing_links.clear()
    again = drive(driver.store.path)
    assert again.store.step == 7
    again.init().steps(1).check(8)


def test_a_checkpoint_stays_if_the_one_in_its_place_fails(drive, place, failing_links):
    driver = drive(num_csds=3).init().steps(1)
    driver.store.checkpoint("best")
    driver.steps(2).store.wait()
    failing_links.append(errno.ENOSPC)
    with pytest.raises(StoreSpaceError, match="embed"):
        driver.store.checkpoint("best", overwrite=True)
    assert {p.name for p in place.rglob("checkpoints/*")} == {"best"}
    driver.check(1, path_of(driver, "best"))
    assert is_clean(driver, "best")
    failing_links.clear()
    driver.store.checkpoint("best", overwrite=True)
    driver.check(3, path_of(driver, "best"))


def test_room_is_checked_before(drive, monkeypatch):
    """That of the checkpoint that is replaced counts."""
    driver = drive(leaves={"w": ((1 << 20,), "float32")}).init().steps(1)
    real, free_bytes = os.statvfs, 8 << 20

    def statvfs(path):
        fields = list(real(path))
        fields[4] = free_bytes // fields[1]  # f_bavail, in units of f_frsize
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", statvfs)
    driver.store.checkpoint("fits")
    with pytest.raises(StoreSpaceError, match=r"steps to come need .* remove another"):
        driver.steps(1).store.checkpoint()  # the other slot is still to be replaced
    assert [c.name for c in driver.store.checkpoints()] == ["fits"]
    assert not list((driver.store.path / "checkpoints").glob(".*"))
    free_bytes = 0
    driver.steps(1).store.checkpoint("fits", overwrite=True)
    free_bytes = 16 << 20
    driver.store.checkpoint()
    monkeypatch.undo()
    driver.steps(2).check(5)
    driver.check(3, path_of(driver, "fits"))
    driver.check(3, path_of(driver, "3"))


def test_names_that_are_refused(drive):
    driver = drive().init().steps(1)
    for name in ("", "..", "a/b", ".hidden", "a\nb", "x" * 201, "77"):
        with pytest.raises(ValueError, match="checkpoint name"):
            driver.store.checkpoint(name)
    assert driver.store.checkpoints() == []
    driver.store.checkpoint("best")
    with pytest.raises(StoreMismatchError, match="a checkpoint 'best' already; give"):
        driver.store.checkpoint("best")
    with pytest.raises(ValueError, match=r"expected a checkpoint 'west'; .* best"):
        driver.store.remove_checkpoint("west")
    driver.close()
    with pytest.raises(ValueError, match=r"expected a checkpoint '1'; .* best"):
        drive(driver.store.path, restore="1")
    with pytest.raises(ValueError, match="to restore, found no committed step"):
        drive("new", restore="1")
    assert not (driver.store.path.parent / "new").exists()


def test_leftovers_of_a_crash_go(drive, place):
    driver = drive(num_csds=2).init().steps(1)
    driver.store.checkpoint("kept")
    driver.close()
    root = driver.store.path / "checkpoints"
    shutil.copytree(root / "kept", root / ".new-1", symlinks=True)
    shutil.copytree(root / "kept", root / ".gone-1", symlinks=True)
    for csd in range(2):
        (data,) = (place / f"csd{csd}").iterdir()
        kept = data / "checkpoints" / "kept"
        shutil.copytree(kept, data / "checkpoints" / "half")
    again = drive(driver.store.path).init()
    assert [p.name for p in root.iterdir()] == ["kept"]
    assert not list(place.rglob("half"))
    again.check(1, path_of(again, "kept"))
    again.close()
    # One that was to be replaced is put back; some files are the other one's.
    folders = [root, *place.glob("csd*/*/checkpoints")]
    for folder in folders:
        (folder / "kept").rename(folder / ".old-kept")
    (folders[-1] / "kept" / "half").mkdir(parents=True)
    restore_members_checkpoint(driver.store.path, "kept", discard_current=True)
    assert [p.name for p in place.rglob("checkpoints/*")] == ["kept"] * 3
    again = drive(driver.store.path).init()
    again.check(1, path_of(again, "kept"))
    assert is_clean(again, "kept")


def test_the_last_numbers_stay_and_every_name(drive):
    driver = drive(keep_steps=(0, 2)).init()
    for _ in range(5):
        driver.step()
        driver.store.checkpoint()
        if driver.store.step == 2:
            driver.store.checkpoint("two")
    assert [c.name for c in driver.store.checkpoints()] == ["two", "4", "5"]
    for step, name in ((2, "two"), (4, "4"), (5, "5")):
        driver.check(step, path_of(driver, name))
    driver.close()
    # After a restore, those of later steps are left as they are.
    again = drive(driver.store.path, keep_steps=(0, 2), restore="two").init()
    for _ in range(2):
        again.durable_step()
        again.store.checkpoint(overwrite=True)
    assert [c.name for c in again.store.checkpoints()] == ["two", "3", "4", "5"]


def test_a_checkpoint_of_another_tree_is_not_restored(drive):
    driver = drive().init().steps(1)
    driver.store.checkpoint("one")
    driver.close()

    def change(document):
        document["leaves"][1]["states"][1][1] = "bfloat16"

    edit(path_of(driver, "one") / "jaxinf.json", change)
    with pytest.raises(StoreMismatchError, match="holds other arrays than"):
        drive(driver.store.path, restore="one")
    again = drive(driver.store.path).init()
    again.check(1)


# Many subgroups a chunk: parts of one are written while others are still to be read.
MANY = {
    "leaves": {"bias": ((129,), "float32"), "embed": ((300, 1025), "float32")},
    "memory_bytes": 1 << 18,
    "num_workers": 2,
}


@pytest.mark.parametrize("durability", family(["step", 4], short=["step"]))
def test_a_copy_in_the_middle_of_a_chunk(drive, durability):
    """Subgroups that were written before the copy are still there after it."""
    options = MANY | {"num_workers": 1}  # a copy takes names that stay
    driver = drive(durability=durability, **options).init().steps(2)
    driver.engine.steps.join()
    write, num_writes = driver.files.csds[0].write, 0
    copy = driver.store.path.with_name("copy")

    def copying(transfers):
        nonlocal num_writes
        for transfer in transfers:
            write([transfer])
            num_writes += "trace.embed" in str(transfer.file)
            if num_writes == 5:
                subprocess.run(["cp", "-al", driver.store.path, copy], check=True)

    driver.files.csds[0].write = copying
    driver.steps(1)
    driver.engine.steps.join()
    assert copy.exists()
    driver.files.csds[0].write = write
    driver.steps(3).check(6)
    assert not verify_step(driver.files.directory, driver.store.path / "current")
    driver.close()
    again = drive(copy, **MANY).init()
    again.check(again.at)
    again.steps(2).check(again.at)
