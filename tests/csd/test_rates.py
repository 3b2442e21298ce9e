"""Bandwidths as users write them."""

import pytest

from jaxinf.csd import open_csds, parse_csd
from jaxinf.csd.rates import CsdRates, parse_rates
from jaxinf.errors import CsdError
from jaxinf.io import ByteMeters


def test_rates_as_users_write_them():
    assert parse_rates({}) == CsdRates()
    assert not CsdRates().is_set
    rates = parse_rates({"drive_read": "3.2GB/s", "drive_write": "1.6 GB/s"})
    assert rates == CsdRates(drive_read=3.2e9, drive_write=1.6e9)
    assert rates.is_set
    assert parse_rates({"drive": "2GiB/s"}) == CsdRates(2 << 30, 2 << 30)
    assert parse_rates({"link": "500kB/s", "kernel": "7B/s"}).link == 5e5
    flags = parse_rates({"gradients": "drive", "writes": "joined"})
    assert flags == CsdRates(has_stored_gradients=True, is_joined=True)
    assert flags.is_set
    assert parse_csd("host:drive=1MB/s").rates == CsdRates(1e6, 1e6)


def test_drives_of_unequal_speed(tmp_path):
    rates = parse_csd("host:drives=9MB/s+3MB/s,link=1MB/s").rates
    assert rates.of_csd(1) == CsdRates(3e6, 3e6, link=1e6)
    assert rates.of_drives == CsdRates(drives=(9e6, 3e6))
    roots = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for root in roots:
        root.mkdir()
    with pytest.raises(CsdError, match="a rate of drives= for each drive, found 2 for"):
        open_csds(
            parse_csd("host:drives=9MB/s+3MB/s"),
            roots,
            memory_bytes=1 << 20,
            meters=ByteMeters(),
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host:speed=1GB/s", "speed=1GB/s: expected one of drive, drives, allocate"),
        ("host:drives=1GB/s+", r"drives=1GB/s\+: expected bytes a second above 0"),
        ("host:link=fast", "link=fast: expected bytes a second above 0"),
        ("emulated:link=0GB/s", "link=0GB/s: expected bytes a second above 0"),
        ("emulated:link", "link=: expected bytes a second above 0"),
        ("emulated:link=1GB", "link=1GB: expected bytes"),
        ("emulated:buffers=0", "buffers=0: expected a number of subgroups"),
        ("host:buffers=1", "buffers=1: expected one of drive"),
        ("emulate", "csd='emulate': expected one of 'host', 'emulated', 'smartssd'"),
    ],
)
def test_what_is_none(text, message):
    with pytest.raises(ValueError, match=message):
        parse_csd(text)
