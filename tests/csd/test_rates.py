"""Bandwidths as users write them."""

import pytest

from jaxinf.csd import parse_csd
from jaxinf.csd.rates import CsdRates, parse_rates


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host:speed=1GB/s", "speed=1GB/s: expected one of drive, allocate"),
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
