"""Drives of unequal speed: chunks by shares, given or measured, and the same bits."""

import math
import os

import numpy as np
import pytest

import jaxinf.engine.drive_speed as drive_speed
from jaxinf.csd import parse_csd
from jaxinf.store import csd_bytes, csd_shares

LEAVES = {
    "bias": ((129,), "float32"),
    "embed": ((64, 4096), "float32"),
    "half": ((33, 257), "bfloat16"),
}

if os.environ.get("JAXINF_TEST_CSD", "host") != "host":
    pytest.skip("drives are those of the host's tests", allow_module_level=True)


@pytest.fixture
def on(drive, place):
    """Makes a driver of a store on drives with shares."""

    def make(shares, name="store", **options):
        roots = [place / f"csd{number}" for number in range(len(shares))]
        for root in roots:
            root.mkdir(exist_ok=True)
        csds = dict(zip(roots, shares, strict=True)) if None not in shares else roots
        options = {"leaves": LEAVES, "chunk_elements": 4096, "csds": csds} | options
        return drive(name, **options)

    return make


def loads(driver):
    found = csd_bytes(driver.opened.directory.manifest)
    return [num_bytes / sum(found) for num_bytes in found]


@pytest.mark.parametrize("shares", [(3, 1), (0.5, 2.0, 1.5), (1, 1)])
def test_chunks_are_dealt_by_shares_with_the_same_bits(on, drive, shares, caplog):
    driver = on(shares).init().steps(3)
    wanted = [share / sum(shares) for share in shares]
    assert loads(driver) == pytest.approx(wanted, abs=0.02)
    driver.check(3)
    manifest = driver.opened.directory.manifest
    by_chunks = [share / sum(csd_shares(manifest)) for share in csd_shares(manifest)]
    assert by_chunks == pytest.approx(wanted, abs=0.02)
    driver.close()
    on(shares).init().steps(1).check(4)
    assert caplog.text == ""


def test_a_store_that_is_dealt_otherwise_says_so(on, caplog):
    on((1, 1)).init().close()
    on((3, 1)).init().close()
    assert "asks for shares of 3 : 1" in caplog.text
    assert "jaxinf store rebalance --by-speed" in caplog.text


@pytest.mark.parametrize("share", [0, -1, math.inf, math.nan, "3", True, None])
def test_shares_that_are_none(drive, place, share):
    (place / "a").mkdir()
    with pytest.raises(ValueError, match=r"/a: expected its share as a number above 0"):
        drive(csds={place / "a": share})
    with pytest.raises(ValueError, match="expected a directory on a mounted drive"):
        drive(csds={place / "none": 1.0})


def test_a_full_drive_has_what_it_has_room_for(on, place, monkeypatch):
    real = os.statvfs

    def statvfs(path):
        if not str(path).endswith("csd0"):
            return real(path)
        free = (1 << 20) // 4096  # two slots of 512 KiB
        return os.statvfs_result((4096, 4096, free, free, free, 10, 10, 10, 0, 255))

    monkeypatch.setattr(drive_speed.os, "statvfs", statvfs)
    driver = on((3, 1)).init()
    first, second = csd_bytes(driver.opened.directory.manifest)
    assert 400_000 < first <= 512 << 10
    assert second > first
    driver.steps(2).check(2)


def test_drives_are_measured_when_a_store_is_made(on, monkeypatch):
    measured = []

    def measure(csd, roots):
        measured.append(roots)
        return [9e8, 3e8]

    monkeypatch.setattr(drive_speed, "measure_csds", measure)
    options = {"csd": "host:drives=900MB/s+300MB/s"}
    on((None, None), "short", **options).init()
    assert not measured  # a short store is not worth it
    monkeypatch.setattr(drive_speed, "_LEAST_BYTES", 1)
    on((None, None), "same").init()
    assert not measured  # two roots of one drive
    on((2, 1), "given", **options).init()
    assert not measured
    driver = on((None, None), **options).init()
    assert loads(driver) == pytest.approx([0.75, 0.25], abs=0.02)
    on((None, None), **options).init()
    assert len(measured) == 1


def test_a_measurement_leaves_nothing(place, monkeypatch):
    monkeypatch.setattr(drive_speed, "_NUM_BLOCKS", 2)
    roots = [place / "a", place / "b"]
    for root in roots:
        root.mkdir()
    csd = parse_csd("emulated:drives=400MB/s+100MB/s,link=1B/s")
    rates = drive_speed.measure_csds(csd, roots)
    # No drive is faster than its limit, whatever else the machine does.
    assert 0 < rates[0] <= 400e6
    assert 0 < rates[1] <= 100e6
    assert sorted(place.rglob("*")) == roots


def test_drives_that_are_alike_have_equal_shares():
    assert drive_speed.shares_of([1.2e9, 1e9]) == (1, 1)
    assert drive_speed.shares_of([9e8, 3e8, 31e7]) == (3, 1, 1.03)
    assert np.argmax(drive_speed.shares_of([1e6, 5e9])) == 1
