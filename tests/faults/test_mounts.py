"""Drives that come and go: read-only, not mounted, without power."""

import random
import re
import subprocess

import pytest
from families import LONG

from jaxinf.errors import ExchangeError, StoreError, StoreFormatError, StoreIOError
from jaxinf.store import verify_step

STEP = 3


def remount(path, how):
    subprocess.run(["mount", "-o", f"remount,{how}", path], check=True)


def test_a_file_system_becomes_read_only(mount_tmpfs, drive):
    """Opening reports it. During a run the kernel does not allow a remount."""
    path = mount_tmpfs("fs")
    drive(path / "store").init().steps(STEP).close()
    remount(path, "ro")
    with pytest.raises(PermissionError, match=r"/store: .*read-only.*remount it"):
        drive(path / "store")
    remount(path, "rw")
    driver = drive(path / "store").init()
    driver.check(STEP)
    driver.steps(2).check(STEP + 2)


def test_a_csd_becomes_read_only_during_a_run(mount_tmpfs, drive):
    roots = [mount_tmpfs(f"csd{number}") for number in range(3)]
    path = roots[0].parent / "store"
    driver = drive(path, csds=roots).init().steps(STEP)
    driver.store.wait()
    remount(roots[1], "ro")
    with pytest.raises(StoreIOError, match=r"csd1/.*\(EROFS\); mount .*writable"):
        driver.durable_step()
    driver.engine.close()
    remount(roots[1], "rw")
    driver = drive(path).init()
    driver.check(STEP)
    driver.steps(2).check(STEP + 2)


def test_an_export_to_a_read_only_or_full_place(mount_tmpfs, drive, place):
    out = mount_tmpfs("out", size="64k")
    options = {"export_every": 2, "export_to": f"file://{out}"}
    options["memory_bytes"] = 128 << 20
    remount(out, "ro")
    with pytest.raises(ExchangeError, match=r"/out: cannot "):
        drive(place / "refused", **options).init()
    remount(out, "rw")
    driver = drive(place / "store", **options).init().steps(2)
    driver.store.wait()
    [info] = driver.store.exports()
    assert re.match(r"StoreSpaceError: .*/out: the export takes", info.problem)
    driver.steps(1).check(3)


def test_a_csd_that_is_not_mounted(mount_ext4, place, drive):
    drives = [mount_ext4(f"csd{number}") for number in range(3)]
    driver = drive(place / "store", csds=[d.path for d in drives])
    driver.init().steps(STEP).store.checkpoint("kept")
    driver.close()
    drives[2].unmount()
    with pytest.raises(StoreFormatError, match=r"CSD 2 .*/csd2 .*mount the drive"):
        drive(place / "store")
    drives[2].mount()
    driver = drive(place / "store").init()
    driver.check(STEP)
    driver.steps(2).check(STEP + 2)
    kept = place / "store/checkpoints/kept"  # of links on each drive
    driver.check(STEP, kept)
    assert verify_step(driver.files.directory, kept) == []


@pytest.mark.parametrize("num_csds", [0, 3])
def test_power_cuts(mount_ext4, place, drive, num_csds):
    """The file systems stop in the middle of steps and lose what they did not flush."""
    store = mount_ext4("drive")
    drives = [mount_ext4(f"csd{number}") for number in range(num_csds)]
    moments, step = random.Random(num_csds), 0
    drive(store.path / "store", csds=[d.path for d in drives]).init().close()
    for _ in range(50 if LONG else 6):
        driver = drive(store.path / "store").init()
        assert driver.at >= step
        driver.check(driver.at)
        step = cut_during_steps(driver, [store, *drives], moments)
        for filesystem in (store, *drives):
            filesystem.unmount()
            filesystem.mount()
    driver = drive(store.path / "store").init()
    assert driver.at >= step
    driver.steps(2).check(driver.at)


def cut_during_steps(driver, drives, moments):
    """Cuts the power during a few steps; returns the last durable step."""
    driver.steps(moments.randrange(3))
    driver.store.wait()
    durable = driver.at
    names = list(driver.leaves)
    driver.update(range(moments.randrange(len(names) + 1)))
    if moments.random() < 0.5:
        driver.update(range(len(names)))
        driver.finish()
    for filesystem in moments.sample(drives, len(drives)):
        filesystem.cut_power()
    with pytest.raises(StoreError):
        driver.steps(10).store.wait()
    driver.engine.close()
    return durable
