"""Drives of unequal speed: chunks by the shares given, and the same bits."""

import math
import os

import pytest

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
        csds = dict(zip(roots, shares, strict=True))
        options = {"leaves": LEAVES, "chunk_elements": 4096, "csds": csds} | options
        return drive(name, **options)

    return make


def loads(driver):
    found = csd_bytes(driver.opened.directory.manifest)
    return [num_bytes / sum(found) for num_bytes in found]


@pytest.mark.parametrize(
    "shares",
    [
        pytest.param((3, 1), marks=pytest.mark.long),
        (0.5, 2.0, 1.5),
        pytest.param((1, 1), marks=pytest.mark.long),
    ],
)
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
    assert "jaxinf store copy, with --csd-root and --share" in caplog.text


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
        if not str(path).endswith("csd1"):
            return real(path)
        free = (1 << 20) // 4096  # two slots of 512 KiB
        return os.statvfs_result((4096, 4096, free, free, free, 10, 10, 10, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    driver = on((1, 3)).init()
    first, second = csd_bytes(driver.opened.directory.manifest)
    assert 400_000 < second <= 512 << 10
    assert first > second
    driver.steps(2).check(2)
