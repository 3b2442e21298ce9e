"""The choice of updates on a device, from rates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinf.streaming.update.interval import (
    UpdateRates,
    interval,
    update_s,
)

SECONDS = st.floats(1e-12, 1e-6)
RATES = st.builds(UpdateRates, SECONDS, SECONDS, SECONDS, SECONDS)


def published(host_params_per_s, link_bytes_per_s):
    """A machine whose state is in memory, of which the device's part goes both ways."""
    device = 12 / link_bytes_per_s
    return UpdateRates(1 / host_params_per_s, 0.0, device, 0.0)


@pytest.mark.parametrize(
    ("params_per_s", "bytes_per_s"), [(2.2e9, 50e9), (0.96e9, 24e9)]
)
def test_the_published_machines_take_every_other(params_per_s, bytes_per_s):
    assert interval(published(params_per_s, bytes_per_s)) == 2


def test_the_bound_of_drives_leaves_nothing_to_gain():
    rates = published(2.2e9, 50e9)
    least = 24 / rates.host
    assert interval(rates._replace(drive=24 / (least * 0.99))) == 0
    assert interval(rates._replace(drive=24 / (least * 1.5))) == 2


def test_a_device_that_costs_the_host_as_much_is_left_out():
    rates = published(2.2e9, 50e9)
    assert interval(rates._replace(handled=rates.host)) == 0
    assert interval(rates._replace(device=float("inf"))) == 0


@given(RATES)
def test_the_host_never_waits_and_would_with_a_smaller_number(rates):
    every = interval(rates)
    if not every:
        return
    share = 1 / every
    host_s = (1 - share) * rates.host + share * rates.handled
    assert share * rates.device <= host_s * (1 + 1e-6)
    assert update_s(rates, every) <= 0.95 * update_s(rates, 0)
    if every > 1:
        share = 1 / (every - 1)
        host_s = (1 - share) * rates.host + share * rates.handled
        assert share * rates.device > host_s * (1 - 1e-6)
