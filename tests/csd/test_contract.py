"""The contract of CSDs, on the kinds that every machine has."""

import pytest
from csd_contract import *  # noqa: F403 (tests and fixtures)

from jaxinf.csd import CSD_KINDS, parse_csd


@pytest.fixture(params=["host", "emulated"])
def spec(request):
    return parse_csd(request.param)


def test_kinds_have_names():
    assert all(parse_csd(kind).kind == kind for kind in CSD_KINDS)
    spec = parse_csd("emulated:buffers=2")
    assert (spec.kind, spec.num_buffers) == ("emulated", 2)
    assert spec.has_cards


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu", "csd='gpu': expected one of 'host'"),
        ("host:buffers=1", "buffers: expected no option"),
        ("emulated:drive=1GB/s", "drive: expected buffers"),
        ("emulated:buffers=0", "buffers=0: expected a number of subgroups"),
        ("smartssd:drive=1GB/s", "drive: expected xclbin or devices"),
        ("smartssd:devices=0", "devices=0: expected a number of devices"),
        ("smartssd:devices=many", "devices=many: expected a number"),
    ],
)
def test_other_kinds_and_options_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_csd(text, {})
